#include <algorithm>

#include "blockcompact/block_scores.h"
#include "buffers.h"
#include "handlers.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::AttendType;
using blockcompact::BlockReduction;
using blockcompact::KeyBlocks;
using blockcompact::PackedView;
using blockcompact::PlainView;
using blockcompact::ScoreCall;
using blockcompact::Status;
using blockcompact::SummaryCall;

using Ord = ffi::Buffer<ffi::U32, 1>;
using Number = ffi::Buffer<ffi::S32, 1>;
using Scores = ffi::Buffer<ffi::F32, 3>;

ffi::ErrorOr<AttendType> TypeOf(const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::F32) return AttendType::kF32;
  if (buffer.element_type() == ffi::BF16) return AttendType::kBf16;
  return ffi::Unexpected<ffi::Error>(
      ffi::Error::InvalidArgument("keys and queries must be bfloat16 or float32"));
}

ffi::ErrorOr<KeyBlocks> KeysOf(const Number& layer, const Int32Rows& table,
                               const Number& num_keys) {
  if (layer.element_count() != 1 || num_keys.element_count() != 1) {
    return ffi::Unexpected<ffi::Error>(
        ffi::Error::InvalidArgument("`layer` and `num_keys` must have 1 element"));
  }
  KeyBlocks keys;
  keys.layer = *layer.typed_data();
  keys.block_table = table.typed_data();
  keys.num_entries = static_cast<int64_t>(table.element_count());
  keys.num_keys = *num_keys.typed_data();
  return keys;
}

// The view of blocks that JAX owns. Layouts from kNhd on are plain.
struct BlocksView {
  std::unique_ptr<PlainView> plain;
  std::unique_ptr<PackedView> packed;

  ffi::Error Set(const ffi::AnyBuffer& blocks, int64_t layout) {
    if (layout >= static_cast<int64_t>(PlainOrder::kNhd)) {
      auto view = PlainViewOf("blocks", blocks, layout);
      if (view.has_error()) return view.error();
      plain = std::make_unique<PlainView>(*view);
    } else {
      const auto dims = blocks.dimensions();
      auto view = PackedViewOf("blocks", blocks, layout, dims.size() == 5 ? dims[0] : 1);
      if (view.has_error()) return view.error();
      packed = std::make_unique<PackedView>(*view);
    }
    return ffi::Error::Success();
  }
};

ffi::ErrorOr<ScoreCall> ScoreCallOf(const ffi::AnyBuffer& queries, const KeyBlocks& keys,
                                    ffi::Result<Scores>& scores, int64_t block_tokens,
                                    int64_t reduction, float scale) {
  const auto type = TypeOf(queries);
  if (type.has_error()) return ffi::Unexpected<ffi::Error>(type.error());
  const auto dims = queries.dimensions();
  const auto out = scores->dimensions();
  ScoreCall call;
  call.reduction = static_cast<BlockReduction>(reduction);
  const int64_t columns =
      keys.num_entries * (call.reduction == BlockReduction::kTokens ? block_tokens : 1);
  if (dims.size() != 3 || out[0] != dims[0] || out[1] != dims[1] || out[2] != columns) {
    return ffi::Unexpected<ffi::Error>(ffi::Error::InvalidArgument(
        "`queries` must be [heads, queries, dim] and the result have their rows"));
  }
  call.type = *type;
  call.num_query_heads = dims[0];
  call.num_queries = dims[1];
  call.head_dim = dims[2];
  call.scale = scale;
  const int64_t row_bytes = dims[2] * static_cast<int64_t>(call.type);
  call.queries = {static_cast<const std::byte*>(queries.untyped_data()), dims[1] * row_bytes,
                  row_bytes};
  call.scores = scores->typed_data();
  return call;
}

void ClearUnlessOk(const Status& status, void* data, size_t size_bytes) {
  if (!status.ok()) std::fill_n(static_cast<std::byte*>(data), size_bytes, std::byte{0});
}

ffi::Error Score(ffi::ThreadPool threads, ffi::AnyBuffer queries, ffi::AnyBuffer blocks,
                 Number layer, Int32Rows table, Number num_keys, ffi::Result<Scores> scores,
                 StatusResult status, int64_t layout, int64_t reduction, float scale) {
  auto keys = KeysOf(layer, table, num_keys);
  if (keys.has_error()) return keys.error();
  BlocksView view;
  if (auto error = view.Set(blocks, layout); error.failure()) return error;
  keys->plain = view.plain.get();
  keys->packed = view.packed.get();
  const int64_t block_tokens =
      view.plain ? view.plain->shape.block_tokens : view.packed->shape.block_tokens;
  const auto call = ScoreCallOf(queries, *keys, scores, block_tokens, reduction, scale);
  if (call.has_error()) return call.error();
  const Status done = blockcompact::ScoreBlocks(*keys, *call, OnThreadPool(threads));
  ClearUnlessOk(done, scores->typed_data(), scores->size_bytes());
  WriteStatus(done, status);
  return ffi::Error::Success();
}

ffi::Error PoolScore(ffi::ThreadPool threads, ffi::AnyBuffer queries, Ord ord, Number layer,
                     Int32Rows table, Number num_keys, ffi::Result<Scores> scores,
                     ffi::Result<Ord> next_ord, StatusResult status, int64_t pool,
                     int64_t block_tokens, int64_t reduction, float scale) {
  const auto keys = KeysOf(layer, table, num_keys);
  if (keys.has_error()) return keys.error();
  const auto call = ScoreCallOf(queries, *keys, scores, block_tokens, reduction, scale);
  if (call.has_error()) return call.error();
  const Status done =
      blockcompact::PoolScoreBlocks({pool, *ord.typed_data()}, *keys, *call, OnThreadPool(threads));
  ClearUnlessOk(done, scores->typed_data(), scores->size_bytes());
  *next_ord->typed_data() = *ord.typed_data();
  WriteStatus(done, status);
  return ffi::Error::Success();
}

ffi::ErrorOr<SummaryCall> SummaryCallOf(ffi::Result<ffi::AnyBuffer>& min_keys,
                                        ffi::Result<ffi::AnyBuffer>& max_keys) {
  const auto type = TypeOf(*min_keys);
  if (type.has_error()) return ffi::Unexpected<ffi::Error>(type.error());
  return SummaryCall{*type, static_cast<std::byte*>(min_keys->untyped_data()),
                     static_cast<std::byte*>(max_keys->untyped_data())};
}

ffi::Error Summarize(ffi::ThreadPool threads, ffi::AnyBuffer blocks, Number layer, Int32Rows table,
                     Number num_keys, ffi::Result<ffi::AnyBuffer> min_keys,
                     ffi::Result<ffi::AnyBuffer> max_keys, StatusResult status, int64_t layout) {
  auto keys = KeysOf(layer, table, num_keys);
  if (keys.has_error()) return keys.error();
  BlocksView view;
  if (auto error = view.Set(blocks, layout); error.failure()) return error;
  keys->plain = view.plain.get();
  keys->packed = view.packed.get();
  const auto call = SummaryCallOf(min_keys, max_keys);
  if (call.has_error()) return call.error();
  const Status done = blockcompact::SummarizeBlocks(*keys, *call, OnThreadPool(threads));
  ClearUnlessOk(done, min_keys->untyped_data(), min_keys->size_bytes());
  ClearUnlessOk(done, max_keys->untyped_data(), max_keys->size_bytes());
  WriteStatus(done, status);
  return ffi::Error::Success();
}

ffi::Error PoolSummarize(ffi::ThreadPool threads, Ord ord, Number layer, Int32Rows table,
                         Number num_keys, ffi::Result<ffi::AnyBuffer> min_keys,
                         ffi::Result<ffi::AnyBuffer> max_keys, ffi::Result<Ord> next_ord,
                         StatusResult status, int64_t pool) {
  const auto keys = KeysOf(layer, table, num_keys);
  if (keys.has_error()) return keys.error();
  const auto call = SummaryCallOf(min_keys, max_keys);
  if (call.has_error()) return call.error();
  const Status done = blockcompact::PoolSummarizeBlocks({pool, *ord.typed_data()}, *keys, *call,
                                                        OnThreadPool(threads));
  ClearUnlessOk(done, min_keys->untyped_data(), min_keys->size_bytes());
  ClearUnlessOk(done, max_keys->untyped_data(), max_keys->size_bytes());
  *next_ord->typed_data() = *ord.typed_data();
  WriteStatus(done, status);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kScoreBlocks, Score,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // queries
                           .Arg<ffi::AnyBuffer>()  // blocks
                           .Arg<Number>()          // layer
                           .Arg<Int32Rows>()       // block_table
                           .Arg<Number>()          // num_keys
                           .Ret<Scores>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("layout")
                           .Attr<int64_t>("reduction")
                           .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER(kPoolScoreBlocks, PoolScore,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // queries
                           .Arg<Ord>()
                           .Arg<Number>()     // layer
                           .Arg<Int32Rows>()  // block_table
                           .Arg<Number>()     // num_keys
                           .Ret<Scores>()
                           .Ret<Ord>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("pool")
                           .Attr<int64_t>("block_tokens")
                           .Attr<int64_t>("reduction")
                           .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER(kSummarizeBlocks, Summarize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // blocks
                           .Arg<Number>()          // layer
                           .Arg<Int32Rows>()       // block_table
                           .Arg<Number>()          // num_keys
                           .Ret<ffi::AnyBuffer>()  // min_keys
                           .Ret<ffi::AnyBuffer>()  // max_keys
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("layout"));

XLA_FFI_DEFINE_HANDLER(kPoolSummarizeBlocks, PoolSummarize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ord>()
                           .Arg<Number>()          // layer
                           .Arg<Int32Rows>()       // block_table
                           .Arg<Number>()          // num_keys
                           .Ret<ffi::AnyBuffer>()  // min_keys
                           .Ret<ffi::AnyBuffer>()  // max_keys
                           .Ret<Ord>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("pool"));

}  // namespace

HandlerList BlockScoreHandlers() {
  return {{"blockcompact_score_blocks", kScoreBlocks},
          {"blockcompact_pool_score_blocks", kPoolScoreBlocks},
          {"blockcompact_summarize_blocks", kSummarizeBlocks},
          {"blockcompact_pool_summarize_blocks", kPoolSummarizeBlocks}};
}

}  // namespace blockcompact_ffi
