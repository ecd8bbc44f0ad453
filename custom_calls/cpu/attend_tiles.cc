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

void TileReader::AddTo(PrefetchQueue* queue, int64_t key, int64_t end, bool has_values) const {
  if (key >= end) return;
  for (TokenRun run = sequence_.RunAt(key, end);; run = sequence_.RunAfter(run, key, end)) {
    for (int64_t kv = 0; kv <= (has_values ? 1 : 0); ++kv) {
      Pieces pieces = PiecesOf(run, kv);
      if (pieces.stride_bytes == pieces.piece_bytes) {
        pieces.piece_bytes *= pieces.num_pieces;
        pieces.num_pieces = 1;
      }
      const std::byte* piece = run.segment->head(run.entry, kv, kv_head_) + pieces.offset_bytes;
      for (int64_t i = 0; i < pieces.num_pieces; ++i, piece += pieces.stride_bytes) {
        queue->Add(piece, pieces.piece_bytes);
      }
    }
    key += run.num_tokens;
    if (key >= end) return;
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

// Whether the tile of `key` lies in tile order in the run.
bool TileReader::IsTile(const TokenRun& run, int64_t run_key, int64_t key,
                        int64_t tile_tokens) const {
  const int64_t run_end = run_key + run.num_tokens;
  const bool is_whole = key + tile_tokens <= run_end || run_end == sequence_.num_keys;
  return is_whole && run.segment->is_amx() && (run.token + key - run_key) % tile_tokens == 0;
}

void TileReader::FindPlaces(int64_t first_key, int64_t num_keys, TilePlaces* places) const {
  *places = {};
  places->first_key = first_key;
  if (!sequence_.segments[0].is_amx() && !sequence_.segments[sequence_.num_segments - 1].is_amx()) {
    return;
  }
  const int64_t end = std::min(first_key + num_keys, sequence_.num_keys);
  for (int64_t key = first_key; key < end;) {
    const TokenRun run = sequence_.RunAt(key, sequence_.num_keys);
    const BlockShape& shape = run.segment->shape();
    const int64_t run_end = std::min(end, key + run.num_tokens);
    const int64_t first_tile = (key - first_key + kTileTokens - 1) / kTileTokens;
    const std::byte* k = run.segment->head(run.entry, 0, kv_head_);
    const std::byte* v = run.segment->head(run.entry, 1, kv_head_);
    const int64_t v_bytes = kDimsOfWord * shape.element_bytes;  // of a token in 16 dims
    for (int64_t tile = first_tile; first_key + tile * kTileTokens < run_end; ++tile) {
      const int64_t tile_key = first_key + tile * kTileTokens;
      const int64_t token = run.token + tile_key - key;
      if (IsTile(run, key, tile_key, kTileTokens))
        places->k[tile] = k + token * shape.token_bytes();
      if (tile % 2 == 0 && IsTile(run, key, tile_key, kValueTokens)) {
        places->v[tile / 2] = {v + token * v_bytes, shape.block_tokens * v_bytes};
      }
    }
    key += run.num_tokens;
  }
}

template <int64_t kRows>
void TileReader::CollectRows(int64_t key, int64_t kv, const std::byte* (&rows)[kRows]) const {
  const int64_t end = std::min(key + kRows, sequence_.num_keys);
  std::fill_n(rows, kRows, nullptr);
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
  if (!sequence_.has_plain()) return;
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
  // A function that only asks for memory would be taken for one without effect, its calls dropped.
  asm volatile("");
}

const std::byte* TileReader::K(int64_t key, std::byte* scratch) const {
  const TokenRun block = sequence_.RunAt(key, sequence_.num_keys);
  if (IsTile(block, key, key, kTileTokens)) {
    return block.segment->head(block.entry, 0, kv_head_) +
           block.token * block.segment->shape().token_bytes();
  }
  const int64_t num_tokens = std::min(kTileTokens, sequence_.num_keys - key);
  const BlockShape& shape = block.segment->shape();
  const bool is_vec = block.segment->packed != nullptr && !block.segment->is_amx();
  if (is_vec && block.num_tokens >= num_tokens) {
    const std::byte* column =
        block.segment->head(block.entry, 0, kv_head_) + block.token * shape.element_bytes;
    kernels_.pack_k_vec(column, num_tokens, shape.block_tokens, shape.head_dim, scratch);
    return scratch;
  }
  const std::byte* rows[kTileTokens];
  CollectRows(key, 0, rows);
  kernels_.pack_k(rows, shape.head_dim, scratch);
  return scratch;
}

void TileReader::ReadKeys(const TilePlaces& places, int64_t key, int64_t end, std::byte* scratch,
                          ScoreJob* job) const {
  const int64_t tile_bytes = kTileTokens * job->dims_padded * shape().element_bytes;
  const std::byte* const* k = places.k + (key - places.first_key) / kTileTokens;
  const int64_t tile_lines = job->ahead.num_lines / (2 * kGroupTiles);
  for (int64_t i = 0; i < kGroupTiles; ++i, key += kTileTokens, scratch += tile_bytes) {
    if (key >= end) {
      job->k_tiles[i] = job->k_tiles[i - 1];
    } else {
      if (k[i] == nullptr) {
        job->ahead.Ask(tile_lines);
        job->ahead.num_lines -= tile_lines;
      }
      job->k_tiles[i] = k[i] != nullptr ? k[i] : K(key, scratch);
    }
    if (k[i] == nullptr) PrefetchRows(key + kGroupTokens, 0);
  }
}

VTile TileReader::V(int64_t key, std::byte* scratch) const {
  const std::byte* rows[kValueTokens];
  CollectRows(key, 1, rows);
  kernels_.pack_v(rows, shape().head_dim, scratch);
  return {scratch, kVStrideElements * shape().element_bytes};
}

VTile CopySeen(const VTile& tile, int64_t begin, int64_t end, int64_t dims_padded, AttendType type,
               std::byte* scratch) {
  const int64_t pair = PairElements(static_cast<int64_t>(type));
  const int64_t num_words = kValueTokens / pair;
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
