#include "blockcompact/device_attend.h"

#include <algorithm>
#include <memory>
#include <shared_mutex>
#include <utility>

#include "device_columns.h"
#include "key_blocks.h"

namespace blockcompact {
namespace {

using ReadLock = std::shared_lock<std::shared_mutex>;

Status Fail(StatusCode code) { return {code, -1}; }

GridOrder OrderOf(const Pool& pool) {
  if (pool.plain() != nullptr) return GridOrder::kPlain;
  return pool.packed()->layout == PackedLayout::kAmx ? GridOrder::kAmx : GridOrder::kVec;
}

// Looks the pool up, locks it for reading, checks its ord, and runs `call`.
template <typename Call>
Status OnDevicePool(const PoolRef& ref, const Call& call) {
  const std::shared_ptr<Pool> pool = FindAnyPool(ref.pool_id);
  if (pool == nullptr) return Fail(StatusCode::kUnknownPool);
  if (!pool->is_on_device()) return Fail(StatusCode::kOtherDevice);
  const ReadLock lock(pool->mutex);
  if (pool->generation != ref.ord) return Fail(StatusCode::kStaleOrd);
  return call(*pool);
}

bool HasShape(const KeyBlocks& keys, int64_t num_query_heads, int64_t head_dim) {
  const BlockShape& shape = ShapeOf(keys);
  return shape.head_dim == head_dim && num_query_heads > 0 &&
         num_query_heads % shape.num_heads == 0;
}

// Checked keys with their table on the device. The layer is taken here: the view has that one.
GridKeys PutKeys(const Pool& pool, const KeyBlocks& keys, int64_t num_entries,
                 DeviceContext& context, DeviceColumns* columns) {
  const int32_t numbers[2] = {0, static_cast<int32_t>(keys.num_keys)};
  const auto base_of = [&](const std::vector<std::byte*>& bases) {
    return context.runtime.PlaceOf(bases[static_cast<size_t>(keys.layer)]).device_address;
  };
  GridKeys grid;
  if (pool.plain() != nullptr) {
    grid.plain = {base_of(pool.plain()->layer_bases), 0, pool.plain()->strides};
  } else {
    grid.packed = {base_of(pool.packed()->layer_bases), 0, pool.packed()->block_bytes};
  }
  grid.shape = ShapeOf(keys);
  grid.num_layers = 1;
  grid.num_entries = num_entries;
  grid.layer = columns->Put(numbers, 2);
  grid.num_keys = grid.layer + 1;
  grid.block_table = columns->Put(keys.block_table, num_entries);
  return grid;
}

template <typename Byte>
GridRowsAt<Byte> GridOf(const RowsAt<Byte>& rows) {
  return {rows.base, rows.head_stride_bytes, rows.query_stride_bytes};
}

void EnqueueAttend(const Pool& pool, const KeyBlocks& keys, const AttendCall& call) {
  DeviceContext& context = ContextOf(pool.device());
  GridAttend grid;
  const int64_t num_entries = NumUsedEntries(keys);
  grid.keys.shape = ShapeOf(keys);
  grid.keys.num_entries = num_entries;
  grid.queries = {GridOf(call.queries), call.num_query_heads, call.num_queries, call.scale};
  grid.sight = {true, call.window_tokens};
  grid.out = GridOf(call.out);
  grid.block_mass = GridOf(call.block_mass);
  grid.max_blocks = call.max_blocks;
  grid.log_sum_exp = call.log_sum_exp;
  DeviceColumns columns(context, pool.stream, num_entries, 0, grid.TakeScratch(nullptr));
  grid.TakeScratch(columns.scratch());
  grid.keys = PutKeys(pool, keys, num_entries, context, &columns);
  columns.Send();
  context.runtime.Attend(OrderOf(pool), grid, pool.stream);
  columns.Finish();
}

void EnqueueScore(const Pool& pool, const ScoreSequence& sequence) {
  const auto& [keys, call] = sequence;
  DeviceContext& context = ContextOf(pool.device());
  const GridQueries queries{GridOf(call.queries), call.num_query_heads, call.num_queries,
                            call.scale};
  const int64_t num_tokens = keys.num_entries * ShapeOf(keys).block_tokens;
  const bool is_by_token = call.reduction == BlockReduction::kTokens;
  const auto scratch_bytes =
      is_by_token ? 0 : queries.num_rows() * num_tokens * static_cast<int64_t>(sizeof(float));
  DeviceColumns columns(context, pool.stream, keys.num_entries, 0, scratch_bytes);
  const GridKeys grid = PutKeys(pool, keys, keys.num_entries, context, &columns);
  columns.Send();
  const int64_t row_stride =
      call.row_stride > 0 ? call.row_stride : (is_by_token ? num_tokens : keys.num_entries);
  context.runtime.Score(
      OrderOf(pool), grid, queries,
      {call.reduction, reinterpret_cast<float*>(columns.scratch()), call.scores, row_stride},
      pool.stream);
  columns.Finish();
}

}  // namespace

Status DevicePoolAttend(const AttendCall& call) {
  if (call.num_segments != 1) return Fail(StatusCode::kShapeMismatch);
  const AttendSegment& segment = call.segments[0];
  return OnDevicePool(segment.pool, [&](const Pool& pool) {
    KeyBlocks keys;
    keys.layer = segment.layer;
    keys.block_table = segment.block_table;
    keys.num_entries = segment.num_entries;
    keys.num_keys = segment.num_keys;
    const Status status = CheckOnPool(pool, call.type, &keys);
    if (!HasShape(keys, call.num_query_heads, call.head_dim)) {
      return Fail(StatusCode::kShapeMismatch);
    }
    if (!status.ok()) return status;
    if (keys.num_keys < call.num_queries) return Fail(StatusCode::kNumKeysOutOfRange);
    if (call.num_queries > 0) EnqueueAttend(pool, keys, call);
    return Status{};
  });
}

Status DevicePoolScoreSequences(const PoolRef& ref, std::vector<ScoreSequence> sequences) {
  return OnDevicePool(ref, [&](const Pool& pool) {
    int64_t num_entries = 0;
    for (auto& [keys, call] : sequences) {
      Status status = CheckOnPool(pool, call.type, &keys);
      if (!HasShape(keys, call.num_query_heads, call.head_dim)) {
        return Fail(StatusCode::kShapeMismatch);
      }
      if (status.row >= 0) status.row += num_entries;
      if (!status.ok()) return status;
      num_entries += keys.num_entries;
    }
    for (const ScoreSequence& sequence : sequences) EnqueueScore(pool, sequence);
    return Status{};
  });
}

}  // namespace blockcompact
