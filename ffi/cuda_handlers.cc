#include "cuda_handlers.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "buffers.h"
#include "launch.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::GridFault;
using blockcompact::GridPacked;
using blockcompact::GridPlain;
using blockcompact::GridRows;
using blockcompact::PackedLayout;
using blockcompact::PackedView;
using blockcompact::PlainView;
using blockcompact::RowLimits;
using blockcompact::Rows;

using Stream = ffi::PlatformStream<cudaStream_t>;

ffi::Error ToError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error) + " (" +
                              cudaGetErrorName(error) + ")");
}

// Dense views: their layers lie at equal distances.
template <typename View>
int64_t LayerBytes(const View& view) {
  return view.num_layers() > 1 ? view.layer_bases[1] - view.layer_bases[0] : 0;
}

GridPlain GridOf(const PlainView& view) {
  return {view.layer_bases.empty() ? nullptr : view.layer_bases[0], LayerBytes(view), view.strides};
}

GridPacked GridOf(const PackedView& view) {
  return {view.layer_bases.empty() ? nullptr : view.layer_bases[0], LayerBytes(view),
          view.block_bytes};
}

template <typename T>
T* Take(ffi::ScratchAllocator& scratch, int64_t num_bytes) {
  constexpr size_t kAlignment = 256;
  const auto memory =
      scratch.Allocate(static_cast<size_t>(std::max<int64_t>(num_bytes, 1)), kAlignment);
  return memory.has_value() ? static_cast<T*>(*memory) : nullptr;
}

ffi::Error OutOfScratch(int64_t num_bytes) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "no " + std::to_string(num_bytes) + " bytes of scratch memory on the device");
}

// The rows of a call with their scratch, checked on the stream; writes the status.
ffi::Error CheckOnStream(cudaStream_t stream, ffi::ScratchAllocator& scratch, const Rows& rows,
                         const RowLimits& limits, StatusResult& status, GridRows* grid) {
  *grid = {rows, limits, Take<GridFault>(scratch, sizeof(GridFault)), nullptr};
  const int64_t owner_bytes = blockcompact::cuda::OwnerBytes(limits);
  if (rows.to_block != nullptr) grid->owner = Take<int32_t>(scratch, owner_bytes);
  if (grid->fault == nullptr || (rows.to_block != nullptr && grid->owner == nullptr)) {
    return OutOfScratch(owner_bytes);
  }
  return ToError(blockcompact::cuda::CheckRows(*grid, status->typed_data(), stream), "row checks");
}

// Pageable host memory would fault in the kernel and take the whole context with it.
ffi::Error CheckDeviceReads(const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.size_bytes() == 0) return ffi::Error::Success();
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, buffer.untyped_data());
  if (error != cudaSuccess) return ToError(error, "cudaPointerGetAttributes");
  if (attributes.devicePointer == buffer.untyped_data()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string("`") + name +
                                     "` lies in memory that the device cannot read; put it on the "
                                     "device or in pinned host memory");
}

ffi::Error ShapeMismatch() {
  return ffi::Error::InvalidArgument(
      "the plain and the packed operand differ in heads, block_tokens, head_dim or element size");
}

// All blocks of dense arrays, each from and to its own number; nothing is checked or refused.
template <typename From, typename To, typename Launch>
ffi::Error ConvertAll(cudaStream_t stream, ffi::ScratchAllocator& scratch, const From& from,
                      const To& to, const Launch& launch) {
  if (from.shape != to.shape || from.num_blocks != to.num_blocks) return ShapeMismatch();
  const int64_t num_rows = from.num_layers() * from.num_blocks;
  auto* fault = Take<GridFault>(scratch, sizeof(GridFault));
  if (fault == nullptr) return OutOfScratch(sizeof(GridFault));
  const cudaError_t error = cudaMemsetAsync(fault, 0xff, sizeof(GridFault), stream);
  if (error != cudaSuccess) return ToError(error, "cudaMemsetAsync");
  const Rows rows{num_rows, nullptr, nullptr, nullptr, nullptr};
  return launch(GridRows{rows, {1, num_rows, num_rows, from.shape.block_tokens}, fault, nullptr});
}

ffi::Error Pack(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::AnyBuffer plain,
                ffi::Result<ffi::AnyBuffer> packed, int64_t layout, int64_t order) {
  const auto from = PlainViewOf("plain", plain, order);
  if (from.has_error()) return from.error();
  const auto to = PackedViewOf("packed", *packed, layout, from->num_layers());
  if (to.has_error()) return to.error();
  return ConvertAll(stream, scratch, *from, *to, [&](const GridRows& grid) {
    return ToError(blockcompact::cuda::PackRows(to->layout, GridOf(*from), GridOf(*to), to->shape,
                                                grid, stream),
                   "pack");
  });
}

ffi::Error Unpack(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::AnyBuffer packed,
                  ffi::Result<ffi::AnyBuffer> plain, int64_t layout, int64_t order) {
  const auto to = PlainViewOf("plain", *plain, order);
  if (to.has_error()) return to.error();
  const auto from = PackedViewOf("packed", packed, layout, to->num_layers());
  if (from.has_error()) return from.error();
  if (auto error = CheckDeviceReads("packed", packed); error.failure()) return error;
  return ConvertAll(stream, scratch, *from, *to, [&](const GridRows& grid) {
    return ToError(blockcompact::cuda::UnpackRows(from->layout, GridOf(*from), GridOf(*to),
                                                  to->shape, grid, stream),
                   "unpack");
  });
}

ffi::Error UnpackScatter(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::AnyBuffer pool,
                         ffi::AnyBuffer packed, Int32Rows layer, Int32Rows source_block,
                         Int32Rows physical_block, Int32Rows valid_tokens, ffi::RemainingArgs,
                         ffi::Result<ffi::AnyBuffer> new_pool, StatusResult status, int64_t layout,
                         int64_t order) {
  if (auto error = CheckInPlace(pool, *new_pool); error.failure()) return error;
  if (auto error = CheckRowArrays({&layer, &source_block, &physical_block, &valid_tokens}, status);
      error.failure()) {
    return error;
  }
  const auto to = PlainViewOf("pool", *new_pool, order);
  if (to.has_error()) return to.error();
  const auto from = PackedViewOf("packed_source", packed, layout, to->num_layers());
  if (from.has_error()) return from.error();
  if (from->shape != to->shape) return ShapeMismatch();
  if (auto error = CheckDeviceReads("packed_source", packed); error.failure()) return error;
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  source_block.typed_data(), physical_block.typed_data(),
                  valid_tokens.typed_data()};
  const RowLimits limits{to->num_layers(), from->num_blocks, to->num_blocks,
                         to->shape.block_tokens};
  GridRows grid;
  if (auto error = CheckOnStream(stream, scratch, rows, limits, status, &grid); error.failure()) {
    return error;
  }
  return ToError(blockcompact::cuda::UnpackRows(from->layout, GridOf(*from), GridOf(*to), to->shape,
                                                grid, stream),
                 "unpack_scatter");
}

// The pool is [num_blocks, ...] or, with a layer axis, [num_layers, num_blocks, ...].
ffi::Error BlockMove(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::AnyBuffer pool,
                     Int32Rows layer, Int32Rows from_block, Int32Rows to_block, ffi::RemainingArgs,
                     ffi::Result<ffi::AnyBuffer> new_pool, StatusResult status,
                     bool has_layer_axis) {
  if (auto error = CheckInPlace(pool, *new_pool); error.failure()) return error;
  if (auto error = CheckRowArrays({&layer, &from_block, &to_block}, status); error.failure()) {
    return error;
  }
  const auto dims = pool.dimensions();
  const size_t block_axis = has_layer_axis ? 1 : 0;
  if (dims.size() <= block_axis) {
    return ffi::Error::InvalidArgument("`pool` has rank " + std::to_string(dims.size()) +
                                       "; expected a block axis and the axes of a block");
  }
  const int64_t num_layers = has_layer_axis ? dims[0] : 1;
  const int64_t num_blocks = dims[block_axis];
  const int64_t num_cells = std::max<int64_t>(1, num_layers * num_blocks);
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  from_block.typed_data(), to_block.typed_data(), nullptr};
  blockcompact::GridMove move;
  move.pool = static_cast<std::byte*>(new_pool->untyped_data());
  move.block_bytes = static_cast<int64_t>(pool.size_bytes()) / num_cells;
  const RowLimits limits{num_layers, num_blocks, num_blocks, 0};
  if (auto error = CheckOnStream(stream, scratch, rows, limits, status, &move.grid);
      error.failure()) {
    return error;
  }
  const int64_t saved_bytes = rows.num_rows * move.block_bytes;
  move.saved = Take<std::byte>(scratch, saved_bytes);
  if (move.saved == nullptr) return OutOfScratch(saved_bytes);
  return ToError(blockcompact::cuda::MoveBlocks(move, stream), "block_move");
}

ffi::Error Gather(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::AnyBuffer pool,
                  Int32Rows layer, Int32Rows physical_block, ffi::Result<ffi::AnyBuffer> out,
                  StatusResult status, int64_t order, bool is_token_contiguous) {
  if (auto error = CheckRowArrays({&layer, &physical_block}, status); error.failure()) {
    return error;
  }
  const auto from = PlainViewOf("pool", pool, order);
  if (from.has_error()) return from.error();
  const int64_t num_rows = static_cast<int64_t>(layer.element_count());
  const auto to = GatherTarget(*out, from->shape, num_rows, static_cast<PlainOrder>(order),
                               is_token_contiguous);
  if (to.has_error()) return to.error();
  const Rows rows{num_rows, layer.typed_data(), physical_block.typed_data(), nullptr, nullptr};
  const RowLimits limits{from->num_layers(), from->num_blocks, 0, from->shape.block_tokens};
  GridRows grid;
  if (auto error = CheckOnStream(stream, scratch, rows, limits, status, &grid); error.failure()) {
    return error;
  }
  return ToError(
      blockcompact::cuda::GatherRows(GridOf(*from), GridOf(*to), from->shape, grid, stream),
      "gather");
}

XLA_FFI_DEFINE_HANDLER(kPack, Pack,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("layout")
                           .Attr<int64_t>("order"));

XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("layout")
                           .Attr<int64_t>("order"));

XLA_FFI_DEFINE_HANDLER(kUnpackScatter, UnpackScatter,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()  // pool
                           .Arg<ffi::AnyBuffer>()  // packed_source
                           .Arg<Int32Rows>()       // layer
                           .Arg<Int32Rows>()       // source_block
                           .Arg<Int32Rows>()       // physical_block
                           .Arg<Int32Rows>()       // valid_tokens
                           .RemainingArgs()        // results this call must come after
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("layout")
                           .Attr<int64_t>("order"));

XLA_FFI_DEFINE_HANDLER(kBlockMove, BlockMove,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()  // pool
                           .Arg<Int32Rows>()       // layer
                           .Arg<Int32Rows>()       // from_block
                           .Arg<Int32Rows>()       // to_block
                           .RemainingArgs()        // results this call must come after
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Int32Rows>()
                           .Attr<bool>("has_layer_axis"));

XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()  // pool
                           .Arg<Int32Rows>()       // layer
                           .Arg<Int32Rows>()       // physical_block
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("order")
                           .Attr<bool>("is_token_contiguous"));

}  // namespace

HandlerList CudaHandlers() {
  return {{"blockcompact_pack", kPack},
          {"blockcompact_unpack", kUnpack},
          {"blockcompact_unpack_scatter", kUnpackScatter},
          {"blockcompact_block_move", kBlockMove},
          {"blockcompact_gather", kGather}};
}

}  // namespace blockcompact_ffi
