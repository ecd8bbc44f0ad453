#include "attend_tiles.h"

#include <algorithm>
#include <cstring>

namespace blockcompact {
namespace {

constexpr int64_t kLine = 64;  // bytes

// Copies a token whose elements are not contiguous.
template <typename T>
void CopyToken(const TokenRun& run, int64_t kv, const std::byte* head, int64_t token,
               std::byte* row) {
  const BlockShape& shape = run.segment->shape();
  constexpr int64_t kPair = PairElements(sizeof(T));
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    int64_t place = VecKOffset(token, d, shape.block_tokens);
    if (run.segment->is_amx()) {
      place = kv == 0 ? AmxKOffset(token, d, shape.head_dim, kPair)
                      : AmxVOffset(token, d, shape.block_tokens, kPair);
    }
    std::memcpy(row + d * static_cast<int64_t>(sizeof(T)),
                head + place * static_cast<int64_t>(sizeof(T)), sizeof(T));
  }
}

// Where the K of a run starts in a block of layout `vec`.
const std::byte* ColumnOf(const TokenRun& run, int64_t kv_head) {
  return run.segment->head(run.entry, 0, kv_head) + run.token * run.segment->shape().element_bytes;
}

// Contiguous pieces of equal size at equal distances.
struct Pieces {
  int64_t offset_bytes;  // from the start of the head's region
  int64_t num_pieces;
  int64_t piece_bytes;
  int64_t stride_bytes;
};

// Where the tokens of a run lie in K (kv 0) or V (kv 1) of a head.
Pieces PiecesOf(const TokenRun& run, int64_t kv) {
  const BlockShape& shape = run.segment->shape();
  const int64_t element = shape.element_bytes;
  if (run.segment->plain != nullptr) {
    const int64_t stride = run.segment->plain->strides.token_bytes;
    return {run.token * stride, run.num_tokens, shape.token_bytes(), stride};
  }
  if (run.segment->is_amx() && kv == 1) {
    const int64_t group = kDimsOfWord * element;
    return {run.token * group, shape.head_dim / kDimsOfWord, run.num_tokens * group,
            shape.block_tokens * group};
  }
  if (!run.segment->is_amx() && kv == 0) {
    return {run.token * element, shape.head_dim, run.num_tokens * element,
            shape.block_tokens * element};
  }
  return {run.token * shape.token_bytes(), 1, run.num_tokens * shape.token_bytes(), 0};
}

}  // namespace

void TileReader::AddTo(PrefetchQueue* queue, int64_t key, int64_t end, int64_t kv) const {
  while (key < end) {
    const TokenRun run = sequence_.RunAt(key, end);
    Pieces pieces = PiecesOf(run, kv);
    if (pieces.stride_bytes == pieces.piece_bytes) {
      pieces.piece_bytes *= pieces.num_pieces;
      pieces.num_pieces = 1;
    }
    const std::byte* piece = run.segment->head(run.entry, kv, kv_head_) + pieces.offset_bytes;
    for (int64_t i = 0; i < pieces.num_pieces; ++i, piece += pieces.stride_bytes) {
      queue->Add(piece, pieces.piece_bytes);
    }
    key += run.num_tokens;
  }
}

TokenRun KeySequence::RunAt(int64_t key, int64_t end) const {
  const KeySegment* segment = &segments[0];
  if (key >= segment->first_key + segment->num_keys) segment = &segments[num_segments - 1];
  const int64_t block_tokens = segment->shape().block_tokens;
  const int64_t place = key - segment->first_key;
  const int64_t token = place % block_tokens;
  const int64_t segment_end = std::min(end, segment->first_key + segment->num_keys);
  return {segment, place / block_tokens, token, std::min(block_tokens - token, segment_end - key)};
}

// Tiles in tile order from `key` on, of a run up to the end of its block or segment.
int64_t TileReader::NumInPlace(int64_t key, const TokenRun& run) const {
  if (!run.segment->is_amx() || run.token % kTileTokens != 0) return 0;
  const bool is_last = key + run.num_tokens == sequence_.num_keys;
  return (run.num_tokens + (is_last ? kTileTokens - 1 : 0)) / kTileTokens;
}

const std::byte* TileReader::KPlace(const TokenRun& run) const {
  return run.segment->head(run.entry, 0, kv_head_) + run.token * run.segment->shape().token_bytes();
}

VTile TileReader::VPlace(const TokenRun& run) const {
  const BlockShape& shape = run.segment->shape();
  const int64_t token_bytes = kDimsOfWord * shape.element_bytes;  // of one group of dims
  return {run.segment->head(run.entry, 1, kv_head_) + run.token * token_bytes,
          shape.block_tokens * token_bytes};
}

void TileReader::FindPlaces(int64_t key, int64_t num_tiles, TilePlaces* places) const {
  std::fill_n(places->k, num_tiles, nullptr);
  std::fill_n(places->v, num_tiles, VTile{});
  for (int64_t tile = 0; tile < num_tiles && key < sequence_.num_keys;) {
    const TokenRun run = sequence_.RunAt(key, sequence_.num_keys);
    const int64_t count = std::min(NumInPlace(key, run), num_tiles - tile);
    if (count > 0) {
      const BlockShape& shape = run.segment->shape();
      const std::byte* k = KPlace(run);
      const VTile v = VPlace(run);
      for (int64_t i = 0; i < count; ++i) {
        places->k[tile + i] = k + i * kTileTokens * shape.token_bytes();
        places->v[tile + i] = {v.base + i * kTileTokens * kDimsOfWord * shape.element_bytes,
                               v.dim_group_stride_bytes};
      }
    }
    tile += std::max<int64_t>(count, 1);
    key += std::max<int64_t>(count, 1) * kTileTokens;
  }
}

void TileReader::CollectRows(int64_t key, int64_t kv, const std::byte* (&rows)[kTileTokens]) const {
  const int64_t end = std::min(key + kTileTokens, sequence_.num_keys);
  std::fill_n(rows, kTileTokens, nullptr);
  for (int64_t next = key; next < end;) {
    const TokenRun run = sequence_.RunAt(next, end);
    const BlockShape& shape = run.segment->shape();
    const std::byte* head = run.segment->head(run.entry, kv, kv_head_);
    for (int64_t i = 0; i < run.num_tokens; ++i, ++next) {
      const int64_t token = run.token + i;
      if (run.segment->plain != nullptr) {
        rows[next - key] = head + token * run.segment->plain->strides.token_bytes;
      } else if (!run.segment->is_amx() && kv == 1) {
        rows[next - key] = head + token * shape.token_bytes();
      } else {
        std::byte* row = rows_ + (next - key) * shape.token_bytes();
        shape.element_bytes == 2 ? CopyToken<uint16_t>(run, kv, head, token, row)
                                 : CopyToken<uint32_t>(run, kv, head, token, row);
        rows[next - key] = row;
      }
    }
  }
}

void TileReader::PrefetchRows(int64_t key, int64_t kv) const {
  const int64_t end = std::min(key + kTileTokens, sequence_.num_keys);
  if (key >= end) return;
  const TokenRun run = sequence_.RunAt(key, end);
  const PlainView* plain = run.segment->plain;
  if (plain == nullptr) return;
  const int64_t stride = plain->strides.token_bytes;
  const std::byte* row = run.segment->head(run.entry, kv, kv_head_) + run.token * stride;
  for (int64_t i = 0; i < run.num_tokens; ++i, row += stride) {
    for (int64_t byte = 0; byte < plain->shape.token_bytes(); byte += kLine) {
      __builtin_prefetch(row + byte);
    }
  }
}

const std::byte* TileReader::K(int64_t key, std::byte* scratch) const {
  const TokenRun block = sequence_.RunAt(key, sequence_.num_keys);
  if (NumInPlace(key, block) > 0) return KPlace(block);
  const int64_t end = std::min(key + kTileTokens, sequence_.num_keys);
  const TokenRun run = sequence_.RunAt(key, end);
  const BlockShape& shape = run.segment->shape();
  if (run.segment->packed != nullptr && !run.segment->is_amx() && run.num_tokens == end - key) {
    const std::byte* column = ColumnOf(run, kv_head_);
    const int64_t next_key = std::min(key + kGroupTokens, sequence_.num_keys - 1);
    const TokenRun next = sequence_.RunAt(next_key, next_key + 1);
    const bool has_columns = next.segment->packed != nullptr && !next.segment->is_amx();
    kernels_.pack_k_vec(column, has_columns ? ColumnOf(next, kv_head_) : column, run.num_tokens,
                        shape.block_tokens, shape.head_dim, scratch);
    return scratch;
  }
  const std::byte* rows[kTileTokens];
  CollectRows(key, 0, rows);
  kernels_.pack_k(rows, shape.head_dim, scratch);
  return scratch;
}

VTile TileReader::V(int64_t key, std::byte* scratch) const {
  const TokenRun block = sequence_.RunAt(key, sequence_.num_keys);
  if (NumInPlace(key, block) > 0) return VPlace(block);
  const BlockShape& shape = sequence_.segments[0].shape();
  const std::byte* rows[kTileTokens];
  CollectRows(key, 1, rows);
  kernels_.pack_v(rows, shape.head_dim, scratch);
  return {scratch, kTileTokens * kDimsOfWord * shape.element_bytes};
}

VTile CopySeen(const VTile& tile, int64_t begin, int64_t end, int64_t dims_padded, AttendType type,
               std::byte* scratch) {
  const int64_t pair = PairElements(static_cast<int64_t>(type));
  const int64_t num_words = kTileTokens / pair;
  const auto is_seen = [&](int64_t token) { return begin <= token && token < end; };
  for (int64_t word = 0; word < num_words; ++word) {
    uint32_t mask = is_seen(word) ? 0xFFFFFFFFU : 0U;
    if (pair == 2) {
      mask = (is_seen(2 * word) ? 0xFFFFU : 0U) | (is_seen(2 * word + 1) ? 0xFFFF0000U : 0U);
    }
    for (int64_t group = 0; group < dims_padded / kDimsOfWord; ++group) {
      uint32_t line[kDimsOfWord];
      std::memcpy(line, tile.base + group * tile.dim_group_stride_bytes + 64 * word, sizeof(line));
      for (uint32_t& value : line) value &= mask;
      std::memcpy(scratch + (group * num_words + word) * 64, line, sizeof(line));
    }
  }
  return {scratch, num_words * 64};
}

}  // namespace blockcompact
