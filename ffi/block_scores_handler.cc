#include <algorithm>

#include "blockcompact/block_scores.h"
#include "buffers.h"
#include "handlers.h"
#include "score_operands.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::Status;
using blockcompact::SummaryCall;

using Ord = ffi::Buffer<ffi::U32, 1>;

void ClearUnlessOk(const Status& status, void* data, size_t size_bytes) {
  if (!status.ok()) std::fill_n(static_cast<std::byte*>(data), size_bytes, std::byte{0});
}

ffi::Error PoolScore(ffi::ThreadPool threads, ffi::AnyBuffer queries, Ord ord, Number layer,
                     Int32Rows table, Number num_keys, ffi::Result<Scores> scores,
                     ffi::Result<Ord> next_ord, StatusResult status, int64_t pool,
                     int64_t block_tokens, int64_t reduction, float scale) {
  const auto keys = KeysOf(layer, table, num_keys);
  if (keys.has_error()) return keys.error();
  const auto call = ScoreCallOf(queries, keys->num_entries, scores, block_tokens, reduction, scale);
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
  return {{"blockcompact_pool_score_blocks", kPoolScoreBlocks},
          {"blockcompact_summarize_blocks", kSummarizeBlocks},
          {"blockcompact_pool_summarize_blocks", kPoolSummarizeBlocks}};
}

}  // namespace blockcompact_ffi
