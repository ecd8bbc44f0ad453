// Python module `blockcompact_jax._native`: the registry, host calls and FFI handlers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>

#include "attend_host.h"
#include "block_scores_host.h"
#include "blockcompact/head_kernels.h"
#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "blockcompact/streaming.h"
#include "buffers.h"
#include "device_host.h"
#include "handlers.h"
#include "host_threads.h"
#include "ledger_host.h"
#include "python_values.h"
#include "rank_host.h"
#include "upload_host.h"

#ifndef BLOCKCOMPACT_VERSION
#error "BLOCKCOMPACT_VERSION is set by CMakeLists.txt"
#endif

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

using blockcompact::BlockShape;
using blockcompact::PoolMemory;
using blockcompact::PoolRef;
using blockcompact::Rows;
using blockcompact::SerialFor;
using blockcompact::Status;

using StreamAddress = std::pair<int32_t, uintptr_t>;  // device (-1: the host), handle

PoolMemory MemoryOf(const std::vector<uintptr_t>& pointers, int64_t size_bytes, int64_t num_layers,
                    int64_t layer_stride_bytes, bool is_writable, const StreamAddress& stream,
                    py::object keepalive) {
  PoolMemory memory;
  for (uintptr_t pointer : pointers) {
    memory.allocations.push_back(reinterpret_cast<std::byte*>(pointer));
  }
  memory.size_bytes = size_bytes;
  memory.num_layers = num_layers;
  memory.layer_stride_bytes = layer_stride_bytes;
  memory.is_writable = is_writable;
  memory.stream = {stream.first, reinterpret_cast<void*>(stream.second)};
  memory.keepalive = Keepalive(std::move(keepalive));
  return memory;
}

int64_t RegisterPlain(const std::vector<uintptr_t>& pointers, int64_t size_bytes,
                      int64_t num_layers, int64_t num_blocks,
                      const std::array<int64_t, 4>& shape,  // heads, tokens, dim, element bytes
                      const std::array<int64_t, 5>& stride_bytes,  // layer, kv, block, head, token
                      bool is_writable, const StreamAddress& stream, py::object keepalive) {
  const auto& [layer, kv, block, head, token] = stride_bytes;
  return blockcompact::AddPlainPool(
      MemoryOf(pointers, size_bytes, num_layers, layer, is_writable, stream, std::move(keepalive)),
      num_blocks, BlockShape{shape[0], shape[1], shape[2], shape[3]}, {kv, block, head, token});
}

int64_t RegisterPacked(const std::vector<uintptr_t>& pointers, int64_t size_bytes,
                       int64_t num_layers, int64_t num_blocks, const std::array<int64_t, 4>& shape,
                       int64_t layout, const std::array<int64_t, 2>& stride_bytes,  // layer, block
                       bool is_writable, const StreamAddress& stream, py::object keepalive) {
  return blockcompact::AddPackedPool(MemoryOf(pointers, size_bytes, num_layers, stride_bytes[0],
                                              is_writable, stream, std::move(keepalive)),
                                     num_blocks, BlockShape{shape[0], shape[1], shape[2], shape[3]},
                                     static_cast<blockcompact::PackedLayout>(layout),
                                     stride_bytes[1]);
}

py::object PoolOrd(int64_t pool_id) {
  const std::shared_ptr<blockcompact::Pool> pool = blockcompact::FindAnyPool(pool_id);
  if (pool == nullptr) return py::none();
  uint32_t generation = 0;
  {
    const py::gil_scoped_release unlocked;
    const std::shared_lock<std::shared_mutex> lock(pool->mutex);
    generation = pool->generation;
  }
  return py::int_(generation);
}

py::tuple HostPoolPack(int64_t plain_pool, uint32_t ord_plain, int64_t packed_pool,
                       uint32_t ord_packed, const RowArray& layer, const RowArray& plain_block,
                       const RowArray& source_block) {
  const int64_t num_rows = layer.size();
  const Rows rows{num_rows, RowData(layer, num_rows), RowData(plain_block, num_rows),
                  RowData(source_block, num_rows), nullptr};
  PoolRef packed{packed_pool, ord_packed};
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::PoolPack({plain_pool, ord_plain}, &packed, rows, SerialFor);
  }
  return py::make_tuple(packed.ord, StatusArray(status));
}

py::tuple HostPoolUpload(int64_t packed_pool, uint32_t ord_packed, int64_t plain_pool,
                         uint32_t ord_plain, const RowArray& layer, const RowArray& source_block,
                         const RowArray& physical_block, const RowArray& valid_tokens) {
  const int64_t num_rows = layer.size();
  const Rows rows{num_rows, RowData(layer, num_rows), RowData(source_block, num_rows),
                  RowData(physical_block, num_rows), RowData(valid_tokens, num_rows)};
  PoolRef plain{plain_pool, ord_plain};
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::PoolUpload({packed_pool, ord_packed}, &plain, rows, SerialFor);
  }
  return py::make_tuple(plain.ord, StatusArray(status));
}

py::tuple HostPoolBlockMove(int64_t pool, uint32_t ord, const RowArray& layer,
                            const RowArray& from_block, const RowArray& to_block) {
  const int64_t num_rows = layer.size();
  const Rows rows{num_rows, RowData(layer, num_rows), RowData(from_block, num_rows),
                  RowData(to_block, num_rows), nullptr};
  PoolRef ref{pool, ord};
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::PoolBlockMove(&ref, rows, SerialFor);
  }
  return py::make_tuple(ref.ord, StatusArray(status));
}

// `out` is a dense array of exactly the bytes of the gathered blocks.
py::object HostPoolGather(int64_t pool, uint32_t ord, const RowArray& layer,
                          const RowArray& physical_block, py::array out, bool is_token_contiguous) {
  const int64_t num_rows = layer.size();
  const Rows rows{num_rows, RowData(layer, num_rows), RowData(physical_block, num_rows), nullptr,
                  nullptr};
  const std::shared_ptr<blockcompact::Pool> found = blockcompact::FindAnyPool(pool);
  if (found == nullptr) return StatusArray({blockcompact::StatusCode::kUnknownPool, -1});
  if (found->plain() == nullptr) {
    return StatusArray({blockcompact::StatusCode::kWrongPoolKind, -1});
  }
  const BlockShape& shape = found->plain()->shape;
  if (out.nbytes() != num_rows * shape.packed_row_bytes() || !out.writeable() ||
      (out.flags() & py::array::c_style) == 0) {
    throw std::invalid_argument("`out` must be a dense writable array of the gathered bytes");
  }
  const PlainDims dims = is_token_contiguous ? TokenContiguousDims(shape, num_rows)
                                             : DensePlainDims(shape, PlainOrder::kHnd);
  const blockcompact::PlainView to{{static_cast<std::byte*>(out.mutable_data())},
                                   num_rows,
                                   shape,
                                   ToBytes(dims, shape.element_bytes)};
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::PoolGather({pool, ord}, to, rows, SerialFor);
  }
  return StatusArray(status);
}

py::dict BuildInfo() {
  const auto names = [](const std::vector<blockcompact::Impl>& impls) {
    py::list result;
    for (blockcompact::Impl impl : impls) result.append(blockcompact::ImplName(impl));
    return result;
  };
  py::dict info;
  info["version"] = BLOCKCOMPACT_VERSION;
  info["compiler"] = BLOCKCOMPACT_COMPILER;
  info["simd_compiled"] = names(blockcompact::CompiledImpls());
  info["simd_available"] = names(blockcompact::AvailableImpls());
  info["simd_chosen"] = blockcompact::ImplName(blockcompact::ChosenImpl());
  info["cuda"] = BLOCKCOMPACT_CUDA;
  return info;
}

py::dict FfiTargets() {
  py::dict targets;
  for (const HandlerList& handlers : {ArrayHandlers(), PoolHandlers(), AttendHandlers(),
                                      BlockScoreHandlers(), RankHandlers(), ReferenceHandlers()}) {
    for (const auto& [name, handler] : handlers) {
      targets[py::str(name)] = py::capsule(reinterpret_cast<void*>(handler));
    }
  }
  return targets;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  blockcompact::ChosenImpl();  // a wrong BLOCKCOMPACT_FORCE_IMPL fails the import with its sentence
  NumHostThreads();            // likewise BLOCKCOMPACT_NUM_THREADS
  module.def("build_info", &BuildInfo);
  module.def("ffi_targets", &FfiTargets);
  module.def("force_impl", &blockcompact::ForceImpl, py::arg("name"));
  module.def("force_streaming_from", &blockcompact::ForceStreamingFrom, py::arg("num_bytes"));
  module.def("register_plain", &RegisterPlain, py::kw_only(), py::arg("pointers"),
             py::arg("size_bytes"), py::arg("num_layers"), py::arg("num_blocks"), py::arg("shape"),
             py::arg("stride_bytes"), py::arg("is_writable"), py::arg("stream"),
             py::arg("keepalive"));
  module.def("register_packed", &RegisterPacked, py::kw_only(), py::arg("pointers"),
             py::arg("size_bytes"), py::arg("num_layers"), py::arg("num_blocks"), py::arg("shape"),
             py::arg("layout"), py::arg("stride_bytes"), py::arg("is_writable"), py::arg("stream"),
             py::arg("keepalive"));
  module.def("unregister", &blockcompact::RemovePool, py::arg("pool_id"));
  module.def("num_pools", &blockcompact::NumPools);
  module.def("pool_ord", &PoolOrd, py::arg("pool_id"));
  module.def("pool_pack", &HostPoolPack, py::arg("plain_pool"), py::arg("ord_plain"),
             py::arg("packed_pool"), py::arg("ord_packed"), py::arg("layer").noconvert(),
             py::arg("plain_block").noconvert(), py::arg("source_block").noconvert());
  module.def("pool_upload", &HostPoolUpload, py::arg("packed_pool"), py::arg("ord_packed"),
             py::arg("plain_pool"), py::arg("ord_plain"), py::arg("layer").noconvert(),
             py::arg("source_block").noconvert(), py::arg("physical_block").noconvert(),
             py::arg("valid_tokens").noconvert());
  module.def("pool_block_move", &HostPoolBlockMove, py::arg("pool"), py::arg("ord"),
             py::arg("layer").noconvert(), py::arg("from_block").noconvert(),
             py::arg("to_block").noconvert());
  module.def("pool_gather", &HostPoolGather, py::arg("pool"), py::arg("ord"),
             py::arg("layer").noconvert(), py::arg("physical_block").noconvert(),
             py::arg("out").noconvert(), py::arg("is_token_contiguous"));
  DefineAttend(module);
  DefineDevice(module);
  DefineUploads(module);
  DefineBlockScores(module);
  DefineLedger(module);
  DefineRank(module);
}

}  // namespace blockcompact_ffi
