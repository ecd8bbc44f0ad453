// Scores of keys and blocks on a grid: what one thread does, (row, lane) by (row, lane). A row is a
// query of one head. Every sum runs in ascending order with fused multiply-adds that are spelled
// out, so that its bits depend neither on the layout nor on what a compiler fuses.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "blockcompact/block_scores.h"
#include "blockcompact/grid_memory.h"
#include "blockcompact/grid_moves.h"
#include "blockcompact/grid_rows.h"
#include "blockcompact/host_device.h"

namespace blockcompact {

// Where the keys and values of a head lie, by the order of a block's elements.
enum class GridOrder { kAmx, kVec, kPlain };

// Blocks, plain or packed, and the tokens of a sequence that a table lists. What is behind a
// pointer lies on the device.
struct GridKeys {
  GridPlain plain;    // of GridOrder::kPlain
  GridPacked packed;  // of the others
  BlockShape shape;
  int64_t num_layers = 0;
  int64_t num_blocks = 0;
  int64_t num_entries = 0;
  const int32_t* layer = nullptr;
  const int32_t* block_table = nullptr;
  const int32_t* num_keys = nullptr;
  GridFault* fault = nullptr;  // null: checked before

  BLOCKCOMPACT_HOST_DEVICE bool is_refused() const {
    return fault != nullptr && *fault != kNoGridFault;
  }
  BLOCKCOMPACT_HOST_DEVICE int64_t num_tokens() const { return num_entries * shape.block_tokens; }
};

// [num_query_heads, num_queries, contiguous last axis].
template <typename Byte>
struct GridRowsAt {
  Byte* base = nullptr;  // null: not wanted
  int64_t head_stride_bytes = 0;
  int64_t query_stride_bytes = 0;

  BLOCKCOMPACT_HOST_DEVICE Byte* row(int64_t head, int64_t query) const {
    return base + head * head_stride_bytes + query * query_stride_bytes;
  }
};

// Query head h uses KV head h / (query heads / KV heads).
struct GridQueries {
  GridRowsAt<const std::byte> rows;
  int64_t num_query_heads = 0;
  int64_t num_queries = 0;
  float scale = 1.0F;

  BLOCKCOMPACT_HOST_DEVICE int64_t num_rows() const { return num_query_heads * num_queries; }
};

// Keys that a row sees: [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

BLOCKCOMPACT_HOST_DEVICE inline float GridFloat(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
BLOCKCOMPACT_HOST_DEVICE inline float GridFloat(float value) { return value; }

// One element of one token, K (kv = 0) or V, of a head.
template <GridOrder kOrder, typename T>
struct TokenReader {
  const std::byte* first = nullptr;  // plain: the token's; else: the region's
  int64_t token = 0;
  const BlockShape& shape;
  int64_t kv = 0;

  BLOCKCOMPACT_HOST_DEVICE TokenReader(const GridKeys& keys, int64_t layer, int64_t block,
                                       int64_t its_kv, int64_t kv_head, int64_t its_token)
      : token(its_token), shape(keys.shape), kv(its_kv) {
    if (kOrder == GridOrder::kPlain) {
      first = keys.plain.token(layer, block, kv, kv_head, token);
    } else {
      first = keys.packed.block(layer, block) + (2 * kv_head + kv) * shape.region_bytes();
    }
  }
  BLOCKCOMPACT_HOST_DEVICE float operator[](int64_t dim) const {
    constexpr int64_t kPair = PairElements(sizeof(T));
    int64_t at = dim;
    if (kOrder == GridOrder::kAmx) {
      at = kv == 0 ? AmxKOffset(token, dim, shape.head_dim, kPair)
                   : AmxVOffset(token, dim, shape.block_tokens, kPair);
    } else if (kOrder == GridOrder::kVec) {
      at = kv == 0 ? VecKOffset(token, dim, shape.block_tokens)
                   : VecVOffset(token, dim, shape.head_dim);
    }
    return GridFloat(LoadRun<T, 1>(first + at * static_cast<int64_t>(sizeof(T))).elements[0]);
  }
};

// Faults without a row come first, as in the checks of the CPU: those of the layer, then of the
// number of keys, then of the entries in order.
BLOCKCOMPACT_HOST_DEVICE inline GridFault KeyFaultAt(int64_t row, StatusCode code) {
  return static_cast<GridFault>(row + 1) << 8 | static_cast<GridFault>(code);
}

struct CheckKeysBody {
  GridKeys keys;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t entry, uint32_t) const {
    const int64_t num_keys = *keys.num_keys;
    if (!IsIn(*keys.layer, keys.num_layers)) {
      AtomicMin(keys.fault, KeyFaultAt(-1, StatusCode::kLayerOutOfRange));
    }
    if (!IsIn(num_keys, keys.num_tokens() + 1)) {
      AtomicMin(keys.fault, KeyFaultAt(-1, StatusCode::kNumKeysOutOfRange));
    } else if (entry * keys.shape.block_tokens < num_keys &&
               !IsIn(keys.block_table[entry], keys.num_blocks)) {
      AtomicMin(keys.fault, KeyFaultAt(entry, StatusCode::kFromBlockOutOfRange));
    }
  }
};

struct WriteKeyStatusBody {
  const GridFault* fault;
  int32_t* status;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t, uint32_t) const {
    const bool is_ok = *fault == kNoGridFault;
    status[0] = is_ok ? 0 : static_cast<int32_t>(*fault & 0xff);
    status[1] = is_ok ? -1 : static_cast<int32_t>(*fault >> 8) - 1;
  }
};

// Checks with one thread more than there are entries: without any, the numbers are still checked.
template <typename Launch>
auto LaunchKeyChecks(const GridKeys& keys, int32_t* status, const Launch& launch) {
  auto error = launch(CheckKeysBody{keys}, keys.num_entries + 1, int64_t{1});
  if (error != decltype(error){} || status == nullptr) return error;
  return launch(WriteKeyStatusBody{keys.fault, status}, int64_t{1}, int64_t{1});
}

inline constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// All keys, or those that a query of attention sees: those up to its own, of these the newest.
struct GridSight {
  bool is_causal = false;  // the last keys are the queries' own
  int64_t window_tokens = 0;

  BLOCKCOMPACT_HOST_DEVICE KeyRange Of(int64_t query, int64_t num_queries, int64_t num_keys) const {
    if (!is_causal) return {0, num_keys};
    const int64_t end = num_keys - num_queries + query + 1;
    const int64_t begin = window_tokens > 0 && end > window_tokens ? end - window_tokens : 0;
    return {begin, end};
  }
};

// A lane is a token: q . k times the scale; -inf where the row sees no key, zero where the call is
// refused. Neighbouring threads read neighbouring elements of packed keys.
template <GridOrder kOrder, typename T>
struct TokenScoreBody {
  GridKeys keys;
  GridQueries queries;
  GridSight sight;
  float* scores;  // [rows, num_entries * block_tokens], rows at a distance of `row_stride`
  int64_t row_stride;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    float* score = scores + row * row_stride + lane;
    *score = keys.is_refused() ? 0.0F : ScoreOf(row, lane);
  }

  BLOCKCOMPACT_HOST_DEVICE float ScoreOf(int64_t row, int64_t key) const {
    const int64_t head = row / queries.num_queries;
    const KeyRange seen =
        sight.Of(row - head * queries.num_queries, queries.num_queries, *keys.num_keys);
    if (key < seen.begin || key >= seen.end) return kNoScore;
    const BlockShape& shape = keys.shape;
    const int64_t kv_head = head / (queries.num_query_heads / shape.num_heads);
    const int64_t entry = key / shape.block_tokens;
    const TokenReader<kOrder, T> token(keys, *keys.layer, keys.block_table[entry], 0, kv_head,
                                       key - entry * shape.block_tokens);
    const std::byte* query = queries.rows.row(head, row - head * queries.num_queries);
    float sum = 0;
    for (int64_t dim = 0; dim < shape.head_dim; ++dim) {
      const auto element = LoadRun<T, 1>(query + dim * static_cast<int64_t>(sizeof(T)));
      sum = fmaf(GridFloat(element.elements[0]), token[dim], sum);
    }
    return sum * queries.scale;
  }
};

// The larger; NaN where one is.
BLOCKCOMPACT_HOST_DEVICE inline float NanMax(float a, float b) {
  return a != a || a > b ? a : b;  // b too may be NaN
}

// A softmax that is not normalised: the largest score, and the sum of exp(score - largest).
struct ScoreMass {
  float maximum;
  float sum;
};

BLOCKCOMPACT_HOST_DEVICE inline ScoreMass MassOf(const float* scores, int64_t num_scores) {
  ScoreMass mass{kNoScore, 0};
  for (int64_t i = 0; i < num_scores; ++i) mass.maximum = NanMax(mass.maximum, scores[i]);
  if (mass.maximum == kNoScore) return mass;
  for (int64_t i = 0; i < num_scores; ++i) mass.sum += expf(scores[i] - mass.maximum);
  return mass;
}

// A lane is an entry: the scores of its tokens reduced.
struct ReduceScoresBody {
  GridKeys keys;
  BlockReduction reduction;
  const float* token_scores;  // [rows, num_entries * block_tokens]
  float* scores;              // [rows, num_entries], rows at a distance of `row_stride`
  int64_t row_stride;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t entry) const {
    float* score = scores + row * row_stride + entry;
    *score = keys.is_refused() ? 0.0F : Reduced(row, entry);
  }

  BLOCKCOMPACT_HOST_DEVICE float Reduced(int64_t row, int64_t entry) const {
    const int64_t block_tokens = keys.shape.block_tokens;
    const int64_t left = *keys.num_keys - entry * block_tokens;
    const int64_t count = left < block_tokens ? left : block_tokens;
    if (count <= 0) return kNoScore;
    const float* values = token_scores + row * keys.num_tokens() + entry * block_tokens;
    if (reduction == BlockReduction::kLogSumExp) {
      const ScoreMass mass = MassOf(values, count);
      return mass.maximum == kNoScore ? kNoScore : mass.maximum + logf(mass.sum);
    }
    float result = values[0];
    for (int64_t i = 1; i < count; ++i) {
      result = reduction == BlockReduction::kMax ? NanMax(result, values[i]) : result + values[i];
    }
    return reduction == BlockReduction::kMean ? result * (1.0F / static_cast<float>(count))
                                              : result;
  }
};

// Calls `function` with the order and the element type as types.
template <typename Function>
auto WithKeyType(GridOrder order, int64_t element_bytes, const Function& function) {
  const auto with_type = [&](auto kind) {
    return element_bytes == 2 ? function(kind, uint16_t{}) : function(kind, float{});
  };
  switch (order) {
    case GridOrder::kAmx:
      return with_type(std::integral_constant<GridOrder, GridOrder::kAmx>{});
    case GridOrder::kVec:
      return with_type(std::integral_constant<GridOrder, GridOrder::kVec>{});
    default:
      return with_type(std::integral_constant<GridOrder, GridOrder::kPlain>{});
  }
}

template <typename Launch>
auto LaunchTokenScores(GridOrder order, const GridKeys& keys, const GridQueries& queries,
                       const GridSight& sight, float* scores, int64_t row_stride,
                       const Launch& launch) {
  return WithKeyType(order, keys.shape.element_bytes, [&](auto kind, auto element) {
    using Body = TokenScoreBody<decltype(kind)::value, decltype(element)>;
    const Body body{keys, queries, sight, scores, row_stride};
    return launch(body, queries.num_rows(), keys.num_tokens());
  });
}

// Where the scores of blocks go. `token_scores` is scratch for all reductions but kTokens.
struct GridScores {
  BlockReduction reduction = BlockReduction::kMax;
  float* token_scores = nullptr;
  float* scores = nullptr;
  int64_t row_stride = 0;  // of `scores`
};

template <typename Launch>
auto LaunchScores(GridOrder order, const GridKeys& keys, const GridQueries& queries,
                  const GridScores& to, const Launch& launch) {
  if (to.reduction == BlockReduction::kTokens) {
    return LaunchTokenScores(order, keys, queries, {}, to.scores, to.row_stride, launch);
  }
  const auto error =
      LaunchTokenScores(order, keys, queries, {}, to.token_scores, keys.num_tokens(), launch);
  if (error != decltype(error){}) return error;
  const ReduceScoresBody body{keys, to.reduction, to.token_scores, to.scores, to.row_stride};
  return launch(body, queries.num_rows(), keys.num_entries);
}

}  // namespace blockcompact
