// Attention on a grid, in launches of independent threads: scores, softmax by blocks, weights,
// weighted sums by parts, and their merge. See grid_scores.h for the order of sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blockcompact/grid_scores.h"

namespace blockcompact {

inline constexpr int64_t kGridPartTokens = 256;  // whose values one thread sums

// The keys are one sequence, whose last num_queries keys are the queries' own.
struct GridAttend {
  GridKeys keys;
  GridQueries queries;
  GridSight sight;
  GridRowsAt<std::byte> out;         // head_dim elements of the keys' type
  GridRowsAt<std::byte> block_mass;  // max_blocks floats
  int64_t max_blocks = 0;
  float* log_sum_exp = nullptr;  // [rows] or null
  // Scratch.
  float* weights = nullptr;     // [rows, tokens]: scores first
  ScoreMass* blocks = nullptr;  // [rows, num_entries]
  ScoreMass* rows = nullptr;    // [rows]
  float* parts = nullptr;       // [rows, num_parts, head_dim]

  BLOCKCOMPACT_HOST_DEVICE int64_t num_parts() const {
    return (keys.num_tokens() + kGridPartTokens - 1) / kGridPartTokens;
  }
  BLOCKCOMPACT_HOST_DEVICE int64_t head_of(int64_t row) const { return row / queries.num_queries; }
  BLOCKCOMPACT_HOST_DEVICE int64_t query_of(int64_t row) const { return row % queries.num_queries; }
  BLOCKCOMPACT_HOST_DEVICE KeyRange seen(int64_t row) const {
    return sight.Of(query_of(row), queries.num_queries, *keys.num_keys);
  }
  BLOCKCOMPACT_HOST_DEVICE const ScoreMass& block(int64_t row, int64_t entry) const {
    return blocks[row * keys.num_entries + entry];
  }

  // Lays the scratch out from `memory` on, and returns its size. Null: only the size.
  int64_t TakeScratch(std::byte* memory) {
    int64_t used = 0;
    const auto take = [&](auto** place, int64_t count) {
      *place = reinterpret_cast<std::remove_reference_t<decltype(*place)>>(memory + used);
      used += (count * static_cast<int64_t>(sizeof(**place)) + 15) / 16 * 16;
    };
    take(&weights, queries.num_rows() * keys.num_tokens());
    take(&blocks, queries.num_rows() * keys.num_entries);
    take(&rows, queries.num_rows());
    take(&parts, queries.num_rows() * num_parts() * keys.shape.head_dim);
    return used;
  }
};

// A lane is an entry.
struct BlockMassBody {
  GridAttend call;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t entry) const {
    const int64_t tokens = call.keys.shape.block_tokens;
    const float* scores = call.weights + row * call.keys.num_tokens() + entry * tokens;
    call.blocks[row * call.keys.num_entries + entry] = MassOf(scores, tokens);
  }
};

// One lane: the softmax of a row from those of its blocks.
struct RowMassBody {
  GridAttend call;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t) const {
    ScoreMass total{kNoScore, 0};
    for (int64_t entry = 0; entry < call.keys.num_entries; ++entry) {
      total.maximum = NanMax(total.maximum, call.block(row, entry).maximum);
    }
    for (int64_t entry = 0; entry < call.keys.num_entries; ++entry) {
      const ScoreMass& block = call.block(row, entry);
      if (block.maximum == kNoScore) continue;
      total.sum = fmaf(block.sum, expf(block.maximum - total.maximum), total.sum);
    }
    call.rows[row] = total;
    if (call.log_sum_exp != nullptr) call.log_sum_exp[row] = total.maximum + logf(total.sum);
  }
};

// A lane is a token: its score becomes its weight.
struct WeightBody {
  GridAttend call;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t key) const {
    float* weight = call.weights + row * call.keys.num_tokens() + key;
    *weight = expf(*weight - call.rows[row].maximum);
  }
};

// A lane is a dim of a part: its weighted sum over the keys of the part that the row sees. Values
// that it does not see are not read.
template <GridOrder kOrder, typename T>
struct PartBody {
  GridAttend call;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    const GridKeys& keys = call.keys;
    const int64_t part = lane / keys.shape.head_dim, dim = lane % keys.shape.head_dim;
    const KeyRange seen = call.seen(row);
    const int64_t first = part * kGridPartTokens, last = first + kGridPartTokens;
    const int64_t begin = seen.begin > first ? seen.begin : first;
    const int64_t end = seen.end < last ? seen.end : last;
    const int64_t kv_head =
        call.head_of(row) / (call.queries.num_query_heads / keys.shape.num_heads);
    const float* weights = call.weights + row * keys.num_tokens();
    float sum = 0;
    for (int64_t key = begin; key < end; ++key) {
      const int64_t entry = key / keys.shape.block_tokens;
      const TokenReader<kOrder, T> value(keys, *keys.layer, keys.block_table[entry], 1, kv_head,
                                         key - entry * keys.shape.block_tokens);
      sum = fmaf(weights[key], value[dim], sum);
    }
    call.parts[(row * call.num_parts() + part) * keys.shape.head_dim + dim] = sum;
  }
};

BLOCKCOMPACT_HOST_DEVICE inline void StoreElement(std::byte* to, float value, float) {
  StoreRun(to, Run<float, 1>{{value}});
}
// bfloat16, to the nearest, ties to even.
BLOCKCOMPACT_HOST_DEVICE inline void StoreElement(std::byte* to, float value, uint16_t) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = value != value;
  bits = is_nan ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
  StoreRun(to, Run<uint16_t, 1>{{static_cast<uint16_t>(bits >> 16)}});
}

// A lane is a dim of the result.
template <typename T>
struct MergeBody {
  GridAttend call;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t dim) const {
    const int64_t head_dim = call.keys.shape.head_dim;
    float sum = 0;
    for (int64_t part = 0; part < call.num_parts(); ++part) {
      sum += call.parts[(row * call.num_parts() + part) * head_dim + dim];
    }
    std::byte* to = call.out.row(call.head_of(row), call.query_of(row));
    StoreElement(to + dim * sizeof(T), sum / call.rows[row].sum, T{});
  }
};

// A lane is a column of the mass: a used entry's, or zero.
struct EntryMassBody {
  GridAttend call;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t entry) const {
    float mass = 0;
    if (entry < call.keys.num_entries && call.block(row, entry).maximum != kNoScore) {
      const ScoreMass& block = call.block(row, entry);
      const ScoreMass& total = call.rows[row];
      mass = block.sum * expf(block.maximum - total.maximum) / total.sum;
    }
    std::byte* to = call.block_mass.row(call.head_of(row), call.query_of(row));
    StoreRun(to + int64_t{entry} * sizeof(float), Run<float, 1>{{mass}});
  }
};

// The keys were checked, and hold at least as many as there are queries. Seven launches in order.
template <typename Launch>
auto LaunchAttend(GridOrder order, const GridAttend& call, const Launch& launch) {
  const GridKeys& keys = call.keys;
  const int64_t num_rows = call.queries.num_rows();
  const int64_t dims = keys.shape.head_dim;
  auto error = LaunchTokenScores(order, keys, call.queries, call.sight, call.weights,
                                 keys.num_tokens(), launch);
  const auto then = [&](const auto& body, int64_t num_lanes) {
    if (error == decltype(error){}) error = launch(body, num_rows, num_lanes);
  };
  then(BlockMassBody{call}, keys.num_entries);
  then(RowMassBody{call}, 1);
  then(WeightBody{call}, keys.num_tokens());
  WithKeyType(order, keys.shape.element_bytes, [&](auto kind, auto element) {
    then(PartBody<decltype(kind)::value, decltype(element)>{call}, call.num_parts() * dims);
    then(MergeBody<decltype(element)>{call}, dims);
  });
  if (call.block_mass.base != nullptr) then(EntryMassBody{call}, call.max_blocks);
  return error;
}

}  // namespace blockcompact
