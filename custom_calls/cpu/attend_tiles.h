// Keys and values of the segments, seen as one sequence of tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blockcompact/attend.h"
#include "blockcompact/attend_kernels.h"
#include "blockcompact/pool.h"
#include "blockcompact/prefetch.h"

namespace blockcompact {

// A checked segment and its place in the sequence.
struct KeySegment {
  const PlainView* plain = nullptr;
  const PackedView* packed = nullptr;
  int64_t layer = 0;
  const int32_t* block_table = nullptr;
  int64_t first_key = 0;
  int64_t num_keys = 0;
  int64_t first_column = 0;  // used entries of the segments before

  const BlockShape& shape() const { return plain != nullptr ? plain->shape : packed->shape; }
  bool is_amx() const { return packed != nullptr && packed->layout == PackedLayout::kAmx; }
  const std::byte* head(int64_t entry, int64_t kv, int64_t kv_head) const {
    const int64_t block = block_table[entry];
    return plain != nullptr ? plain->head(layer, block, kv, kv_head)
                            : packed->head(layer, block, kv, kv_head);
  }
};

// Neighbouring tokens of one block.
struct TokenRun {
  const KeySegment* segment = nullptr;
  int64_t entry = 0;  // of the segment's table
  int64_t token = 0;  // in the block
  int64_t num_tokens = 0;

  int64_t column() const { return segment->first_column + entry; }
};

struct KeySequence {
  KeySegment segments[kMaxAttendSegments];
  int64_t num_segments = 0;
  int64_t num_keys = 0;

  bool has_plain() const {
    return segments[0].plain != nullptr || segments[num_segments - 1].plain != nullptr;
  }

  // The tokens from `key` on that lie in its block, at most up to key `end`.
  TokenRun RunAt(int64_t key, int64_t end) const;

  // The run after one that ends at `key`, without a division where that is in the next block.
  TokenRun RunAfter(const TokenRun& run, int64_t key, int64_t end) const {
    const KeySegment& segment = *run.segment;
    const int64_t segment_end = segment.first_key + segment.num_keys;
    if (key >= segment_end) return RunAt(key, end);
    return {&segment, run.entry + 1, 0,
            std::min(segment.shape().block_tokens, std::min(end, segment_end) - key)};
  }
};

// Where neighbouring tiles of a KV head lie in tile order, null where one does not: at most those
// of a chunk.
struct TilePlaces {
  int64_t first_key = 0;
  const std::byte* k[kChunkTiles];
  VTile v[kChunkVTiles];
};

// Reads tiles of one KV head: in place where they lie in tile order, else through a scratch tile.
class TileReader {
 public:
  // `rows` has room for the rows of a tile, each head_dim elements.
  TileReader(const KeySequence& sequence, const AttendKernels& kernels, int64_t kv_head,
             std::byte* rows)
      : sequence_(sequence), kernels_(kernels), kv_head_(kv_head), rows_(rows) {}

  // Tile of the keys from `key` on; keys past the last may be anything in K and V. K is given where
  // it lies if it can be, V is always put in order.
  const std::byte* K(int64_t key, std::byte* scratch) const;
  VTile V(int64_t key, std::byte* scratch) const;

  // Places of the tiles of num_keys keys; the first key is a multiple of kValueTokens.
  void FindPlaces(int64_t first_key, int64_t num_keys, TilePlaces* places) const;

  // Fills in the K tiles of the group of `key`; the keys at `end` and beyond are scored and not
  // looked at. `scratch` has room for the tiles of a group. Half of the job's lines ahead are asked
  // for where tiles are put in order.
  void ReadKeys(const TilePlaces& places, int64_t key, int64_t end, std::byte* scratch,
                ScoreJob* job) const;

  // Adds the bytes of the keys [key, end), and of their values, to what will be read soon.
  void AddTo(PrefetchQueue* queue, int64_t key, int64_t end, bool has_values) const;

  // Asks for the rows of a tile that will be read soon, where it lies as plain rows.
  void PrefetchRows(int64_t key, int64_t kv) const;

 private:
  const BlockShape& shape() const { return sequence_.segments[0].shape(); }
  bool IsTile(const TokenRun& run, int64_t run_key, int64_t key, int64_t tile_tokens) const;
  template <int64_t kRows>
  void CollectRows(int64_t key, int64_t kv, const std::byte* (&rows)[kRows]) const;

  const KeySequence& sequence_;
  const AttendKernels& kernels_;
  int64_t kv_head_;
  std::byte* rows_;
};

// Copies a V tile with zeros for the tokens outside [begin, end).
VTile CopySeen(const VTile& tile, int64_t begin, int64_t end, int64_t dims_padded, AttendType type,
               std::byte* scratch);

}  // namespace blockcompact
