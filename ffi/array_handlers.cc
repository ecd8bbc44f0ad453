#include <algorithm>

#include "blockcompact/block_move.h"
#include "blockcompact/rows.h"
#include "buffers.h"
#include "handlers.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::CheckRows;
using blockcompact::PackedView;
using blockcompact::PlainView;
using blockcompact::Rows;
using blockcompact::Status;

ffi::Error ShapeMismatch() {
  return ffi::Error::InvalidArgument(
      "the plain and the packed operand differ in heads, block_tokens, head_dim or element size");
}

// Dense layers seen as one layer of all their blocks.
template <typename View>
View JoinLayers(View view) {
  view.num_blocks *= view.num_layers();
  view.layer_bases.resize(1);
  return view;
}

// Rows 0 ... num_rows - 1, each from and to its own number.
std::vector<int32_t> Identity(int64_t num_rows) {
  std::vector<int32_t> numbers(static_cast<size_t>(num_rows));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int32_t>(i);
  return numbers;
}

ffi::Error Pack(ffi::ThreadPool threads, ffi::AnyBuffer plain, ffi::Result<ffi::AnyBuffer> packed,
                int64_t layout, int64_t order) {
  const auto from = PlainViewOf("plain", plain, order);
  if (from.has_error()) return from.error();
  const auto to = PackedViewOf("packed", *packed, layout, from->num_layers());
  if (to.has_error()) return to.error();
  if (from->shape != to->shape || from->num_blocks != to->num_blocks) return ShapeMismatch();
  const int64_t num_rows = from->num_layers() * from->num_blocks;
  const std::vector<int32_t> numbers = Identity(num_rows);
  const Rows rows{num_rows, nullptr, numbers.data(), nullptr, nullptr};
  blockcompact::PackRows(JoinLayers(*from), JoinLayers(*to), rows, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error Unpack(ffi::ThreadPool threads, ffi::AnyBuffer packed, ffi::Result<ffi::AnyBuffer> plain,
                  int64_t layout, int64_t order) {
  const auto to = PlainViewOf("plain", *plain, order);
  if (to.has_error()) return to.error();
  const auto from = PackedViewOf("packed", packed, layout, to->num_layers());
  if (from.has_error()) return from.error();
  if (from->shape != to->shape || from->num_blocks != to->num_blocks) return ShapeMismatch();
  const int64_t num_rows = to->num_layers() * to->num_blocks;
  const std::vector<int32_t> numbers = Identity(num_rows);
  const Rows rows{num_rows, nullptr, numbers.data(), nullptr, nullptr};
  blockcompact::UnpackRows(JoinLayers(*from), JoinLayers(*to), rows, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error UnpackScatter(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::AnyBuffer packed,
                         Int32Rows layer, Int32Rows source_block, Int32Rows physical_block,
                         Int32Rows valid_tokens, ffi::RemainingArgs,
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
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  source_block.typed_data(), physical_block.typed_data(),
                  valid_tokens.typed_data()};
  const Status checked =
      CheckRows(rows, {to->num_layers(), from->num_blocks, to->num_blocks, to->shape.block_tokens});
  if (checked.ok()) blockcompact::UnpackRows(*from, *to, rows, OnThreadPool(threads));
  WriteStatus(checked, status);
  return ffi::Error::Success();
}

// The pool is [num_blocks, ...] or, with a layer axis, [num_layers, num_blocks, ...].
ffi::Error BlockMove(ffi::ThreadPool threads, ffi::AnyBuffer pool, Int32Rows layer,
                     Int32Rows from_block, Int32Rows to_block, ffi::RemainingArgs,
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
  const int64_t block_bytes = static_cast<int64_t>(pool.size_bytes()) / num_cells;
  std::vector<std::byte*> bases;
  for (int64_t l = 0; l < num_layers; ++l) {
    bases.push_back(static_cast<std::byte*>(new_pool->untyped_data()) +
                    l * num_blocks * block_bytes);
  }
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  from_block.typed_data(), to_block.typed_data(), nullptr};
  const Status checked = CheckRows(rows, {num_layers, num_blocks, num_blocks, 0});
  if (checked.ok()) {
    blockcompact::MoveBlocks(blockcompact::DenseBlockSpace(std::move(bases), block_bytes), rows,
                             OnThreadPool(threads));
  }
  WriteStatus(checked, status);
  return ffi::Error::Success();
}

ffi::Error Gather(ffi::ThreadPool threads, ffi::AnyBuffer pool, Int32Rows layer,
                  Int32Rows physical_block, ffi::Result<ffi::AnyBuffer> out, StatusResult status,
                  int64_t order, bool is_token_contiguous) {
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
  const Status checked =
      CheckRows(rows, {from->num_layers(), from->num_blocks, 0, from->shape.block_tokens});
  if (checked.ok()) {
    blockcompact::GatherRows(*from, *to, rows, OnThreadPool(threads));
  } else {
    std::fill_n(static_cast<std::byte*>(out->untyped_data()), out->size_bytes(), std::byte{0});
  }
  WriteStatus(checked, status);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kPack, Pack,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("layout")
                           .Attr<int64_t>("order"));

XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("layout")
                           .Attr<int64_t>("order"));

XLA_FFI_DEFINE_HANDLER(kUnpackScatter, UnpackScatter,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
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
                           .Ctx<ffi::ThreadPool>()
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
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // pool
                           .Arg<Int32Rows>()       // layer
                           .Arg<Int32Rows>()       // physical_block
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("order")
                           .Attr<bool>("is_token_contiguous"));

}  // namespace

HandlerList ArrayHandlers() {
  return {{"blockcompact_pack", kPack},
          {"blockcompact_unpack", kUnpack},
          {"blockcompact_unpack_scatter", kUnpackScatter},
          {"blockcompact_block_move", kBlockMove},
          {"blockcompact_gather", kGather}};
}

}  // namespace blockcompact_ffi
