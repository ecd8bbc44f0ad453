// The calls on JAX arrays, the same for every backend: how they are bound, checked and refused.
//
// A `Backend` is what XLA gives a call of its device (by a CtxDecoding) and does the work on it:
//   ffi::Error CheckReads(const char* name, const ffi::AnyBuffer& buffer);
//   ffi::Error PackAll(const PlainView& from, const PackedView& to);    // each to its own number
//   ffi::Error UnpackAll(const PackedView& from, const PlainView& to);
// and, after it has checked the rows against the limits and written the status,
//   ffi::Error Unpack(const PackedView& from, const PlainView& to, const CheckedRows& call);
//   ffi::Error Move(const PoolBlocks& pool, const CheckedRows& call);
//   ffi::Error Gather(const PlainView& from, const PlainView& to, const CheckedRows& call,
//                     const ffi::AnyBuffer& out);  // zeros where it is refused
//   ffi::Error Score(const BlocksView& blocks, const KeyOperands& keys,
//                    const blockcompact::ScoreCall& call, Scores& scores);  // likewise
#pragma once

#include <algorithm>

#include "blockcompact/rows.h"
#include "buffers.h"
#include "handlers.h"
#include "score_operands.h"

namespace blockcompact_ffi {

// Rows of a call, what they must stay within, and where the outcome goes.
struct CheckedRows {
  blockcompact::Rows rows;
  blockcompact::RowLimits limits;
  StatusResult& status;
};

// A dense pool of blocks of contiguous bytes, layer after layer.
struct PoolBlocks {
  std::byte* base;
  int64_t num_layers;
  int64_t num_blocks;
  int64_t block_bytes;
};

// Which keys of some blocks; the values lie where the backend reads them.
struct KeyOperands {
  const Number& layer;
  const Int32Rows& block_table;
  const Number& num_keys;
  StatusResult& status;
};

template <typename Backend>
struct ArrayCalls {
  using Rows = blockcompact::Rows;

  static ffi::Error ShapeMismatch() {
    return ffi::Error::InvalidArgument(
        "the plain and the packed operand differ in heads, block_tokens, head_dim or element size");
  }

  static ffi::Error Pack(ffi::AnyBuffer plain, ffi::Result<ffi::AnyBuffer> packed, int64_t layout,
                         int64_t order, Backend backend) {
    const auto from = PlainViewOf("plain", plain, order);
    if (from.has_error()) return from.error();
    const auto to = PackedViewOf("packed", *packed, layout, from->num_layers());
    if (to.has_error()) return to.error();
    if (from->shape != to->shape || from->num_blocks != to->num_blocks) return ShapeMismatch();
    return backend.PackAll(*from, *to);
  }

  static ffi::Error Unpack(ffi::AnyBuffer packed, ffi::Result<ffi::AnyBuffer> plain, int64_t layout,
                           int64_t order, Backend backend) {
    const auto to = PlainViewOf("plain", *plain, order);
    if (to.has_error()) return to.error();
    const auto from = PackedViewOf("packed", packed, layout, to->num_layers());
    if (from.has_error()) return from.error();
    if (from->shape != to->shape || from->num_blocks != to->num_blocks) return ShapeMismatch();
    if (auto error = backend.CheckReads("packed", packed); error.failure()) return error;
    return backend.UnpackAll(*from, *to);
  }

  static ffi::Error UnpackScatter(ffi::AnyBuffer pool, ffi::AnyBuffer packed, Int32Rows layer,
                                  Int32Rows source_block, Int32Rows physical_block,
                                  Int32Rows valid_tokens, ffi::RemainingArgs,
                                  ffi::Result<ffi::AnyBuffer> new_pool, StatusResult status,
                                  int64_t layout, int64_t order, Backend backend) {
    if (auto error = CheckInPlace(pool, *new_pool); error.failure()) return error;
    if (auto error =
            CheckRowArrays({&layer, &source_block, &physical_block, &valid_tokens}, status);
        error.failure()) {
      return error;
    }
    const auto to = PlainViewOf("pool", *new_pool, order);
    if (to.has_error()) return to.error();
    const auto from = PackedViewOf("packed_source", packed, layout, to->num_layers());
    if (from.has_error()) return from.error();
    if (from->shape != to->shape) return ShapeMismatch();
    if (auto error = backend.CheckReads("packed_source", packed); error.failure()) return error;
    const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                    source_block.typed_data(), physical_block.typed_data(),
                    valid_tokens.typed_data()};
    return backend.Unpack(
        *from, *to,
        {rows,
         {to->num_layers(), from->num_blocks, to->num_blocks, to->shape.block_tokens},
         status});
  }

  // The pool is [num_blocks, ...] or, with a layer axis, [num_layers, num_blocks, ...].
  static ffi::Error BlockMove(ffi::AnyBuffer pool, Int32Rows layer, Int32Rows from_block,
                              Int32Rows to_block, ffi::RemainingArgs,
                              ffi::Result<ffi::AnyBuffer> new_pool, StatusResult status,
                              bool has_layer_axis, Backend backend) {
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
    return backend.Move({static_cast<std::byte*>(new_pool->untyped_data()), num_layers, num_blocks,
                         static_cast<int64_t>(pool.size_bytes()) / num_cells},
                        {rows, {num_layers, num_blocks, num_blocks, 0}, status});
  }

  static ffi::Error Gather(ffi::AnyBuffer pool, Int32Rows layer, Int32Rows physical_block,
                           ffi::Result<ffi::AnyBuffer> out, StatusResult status, int64_t order,
                           bool is_token_contiguous, Backend backend) {
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
    return backend.Gather(
        *from, *to,
        {rows, {from->num_layers(), from->num_blocks, 0, from->shape.block_tokens}, status}, *out);
  }

  static ffi::Error Score(ffi::AnyBuffer queries, ffi::AnyBuffer blocks, Number layer,
                          Int32Rows block_table, Number num_keys, ffi::Result<Scores> scores,
                          StatusResult status, int64_t layout, int64_t reduction, float scale,
                          Backend backend) {
    if (auto error = CheckNumbers(layer, num_keys); error.failure()) return error;
    if (auto error = CheckRowArrays({&block_table}, status); error.failure()) return error;
    BlocksView view;
    if (auto error = view.Set(blocks, layout); error.failure()) return error;
    const blockcompact::BlockShape& shape = view.shape();
    const auto call = ScoreCallOf(queries, static_cast<int64_t>(block_table.element_count()),
                                  scores, shape.block_tokens, reduction, scale);
    if (call.has_error()) return call.error();
    if (static_cast<int64_t>(call->type) != shape.element_bytes ||
        call->head_dim != shape.head_dim || call->num_query_heads <= 0 ||
        call->num_query_heads % shape.num_heads != 0) {
      return ffi::Error::InvalidArgument(
          "`queries` and `blocks` differ in dtype or head_dim, or their heads do not divide");
    }
    if (auto error = backend.CheckReads("blocks", blocks); error.failure()) return error;
    return backend.Score(view, {layer, block_table, num_keys, status}, *call, *scores);
  }

  // By the names that the calls have on every platform.
  static HandlerList Handlers() {
    XLA_FFI_DEFINE_HANDLER(kPack, Pack,
                           ffi::Ffi::Bind()
                               .Arg<ffi::AnyBuffer>()
                               .Ret<ffi::AnyBuffer>()
                               .Attr<int64_t>("layout")
                               .Attr<int64_t>("order")
                               .Ctx<Backend>());
    XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                           ffi::Ffi::Bind()
                               .Arg<ffi::AnyBuffer>()
                               .Ret<ffi::AnyBuffer>()
                               .Attr<int64_t>("layout")
                               .Attr<int64_t>("order")
                               .Ctx<Backend>());
    XLA_FFI_DEFINE_HANDLER(kUnpackScatter, UnpackScatter,
                           ffi::Ffi::Bind()
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
                               .Attr<int64_t>("order")
                               .Ctx<Backend>());
    XLA_FFI_DEFINE_HANDLER(kBlockMove, BlockMove,
                           ffi::Ffi::Bind()
                               .Arg<ffi::AnyBuffer>()  // pool
                               .Arg<Int32Rows>()       // layer
                               .Arg<Int32Rows>()       // from_block
                               .Arg<Int32Rows>()       // to_block
                               .RemainingArgs()        // results this call must come after
                               .Ret<ffi::AnyBuffer>()
                               .Ret<Int32Rows>()
                               .Attr<bool>("has_layer_axis")
                               .Ctx<Backend>());
    XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                           ffi::Ffi::Bind()
                               .Arg<ffi::AnyBuffer>()  // pool
                               .Arg<Int32Rows>()       // layer
                               .Arg<Int32Rows>()       // physical_block
                               .Ret<ffi::AnyBuffer>()
                               .Ret<Int32Rows>()
                               .Attr<int64_t>("order")
                               .Attr<bool>("is_token_contiguous")
                               .Ctx<Backend>());
    XLA_FFI_DEFINE_HANDLER(kScoreBlocks, Score,
                           ffi::Ffi::Bind()
                               .Arg<ffi::AnyBuffer>()  // queries
                               .Arg<ffi::AnyBuffer>()  // blocks
                               .Arg<Number>()          // layer
                               .Arg<Int32Rows>()       // block_table
                               .Arg<Number>()          // num_keys
                               .Ret<Scores>()
                               .Ret<Int32Rows>()
                               .Attr<int64_t>("layout")
                               .Attr<int64_t>("reduction")
                               .Attr<float>("scale")
                               .Ctx<Backend>());
    return {{"blockcompact_pack", kPack},
            {"blockcompact_unpack", kUnpack},
            {"blockcompact_unpack_scatter", kUnpackScatter},
            {"blockcompact_block_move", kBlockMove},
            {"blockcompact_gather", kGather},
            {"blockcompact_score_blocks", kScoreBlocks}};
  }
};

}  // namespace blockcompact_ffi
