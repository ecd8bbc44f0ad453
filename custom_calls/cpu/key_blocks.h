// What calls on blocks of keys share: their checks, their tasks, and the pool they lie in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <shared_mutex>

#include "attend_tiles.h"
#include "blockcompact/block_scores.h"
#include "blockcompact/open_transfers.h"
#include "blockcompact/pool.h"

namespace blockcompact {

inline constexpr int64_t kMinTaskTokens = 512;
inline constexpr int64_t kMaxTaskTokens = 4096;
inline constexpr int64_t kMinTasks = 16;  // of a call, where it has as many keys

inline const BlockShape& ShapeOf(const KeyBlocks& keys) {
  return keys.plain != nullptr ? keys.plain->shape : keys.packed->shape;
}

inline int64_t NumUsedEntries(const KeyBlocks& keys) {
  const int64_t block_tokens = ShapeOf(keys).block_tokens;
  return (keys.num_keys + block_tokens - 1) / block_tokens;
}

inline Status CheckKeys(const KeyBlocks& keys, AttendType type) {
  const BlockShape& shape = ShapeOf(keys);
  if (shape.element_bytes != static_cast<int64_t>(type)) return {StatusCode::kShapeMismatch, -1};
  const int64_t num_layers = keys.plain ? keys.plain->num_layers() : keys.packed->num_layers();
  const int64_t num_blocks = keys.plain ? keys.plain->num_blocks : keys.packed->num_blocks;
  if (keys.layer < 0 || keys.layer >= num_layers) return {StatusCode::kLayerOutOfRange, -1};
  if (keys.num_keys < 0 || keys.num_keys > keys.num_entries * shape.block_tokens) {
    return {StatusCode::kNumKeysOutOfRange, -1};
  }
  for (int64_t entry = 0; entry < NumUsedEntries(keys); ++entry) {
    const int64_t block = keys.block_table[entry];
    if (block < 0 || block >= num_blocks) return {StatusCode::kFromBlockOutOfRange, entry};
  }
  return {};
}

inline KeySequence SequenceOf(const KeyBlocks& keys) {
  KeySequence sequence;
  sequence.num_segments = 1;
  sequence.num_keys = keys.num_keys;
  sequence.segments[0] = {keys.plain, keys.packed,   keys.layer, keys.block_table,
                          0,          keys.num_keys, 0};
  return sequence;
}

inline int64_t EntriesOfTask(const KeyBlocks& keys) {
  const BlockShape& shape = ShapeOf(keys);
  const int64_t tokens =
      std::clamp(keys.num_keys * shape.num_heads / kMinTasks, kMinTaskTokens, kMaxTaskTokens);
  return std::max<int64_t>(1, tokens / shape.block_tokens);
}

// Looks the pool up, locks it for reading, and runs the call with its views.
template <typename Call>
Status OnPool(const PoolRef& ref, const Call& call) {
  const std::shared_ptr<Pool> pool = FindPool(ref.pool_id);
  if (pool == nullptr) return {StatusCode::kUnknownPool, -1};
  const std::shared_lock<std::shared_mutex> lock(pool->mutex);
  if (pool->generation != ref.ord) return {StatusCode::kStaleOrd, -1};
  return call(*pool);
}

// Sets the views of the keys and checks them; refused where a transfer writes blocks that would be
// read.
inline Status CheckOnPool(const Pool& pool, AttendType type, KeyBlocks* keys) {
  keys->plain = pool.plain();
  keys->packed = pool.packed();
  const Status status = CheckKeys(*keys, type);
  if (!status.ok()) return status;
  return CheckNotOpen(pool, Access::kRead,
                      {NumUsedEntries(*keys), keys->block_table, /*layer=*/nullptr, keys->layer});
}

}  // namespace blockcompact
