// Row lists and the operations over them. A row moves one block of one layer.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/status.h"
#include "blockcompact/views.h"

namespace blockcompact {

inline constexpr int32_t kHole = -1;

// Parallel arrays of num_rows entries. A row whose block fields are all kHole is padding.
struct Rows {
  int64_t num_rows = 0;
  const int32_t* layer = nullptr;  // null: layer 0
  const int32_t* from_block = nullptr;
  const int32_t* to_block = nullptr;      // null: the row's own number
  const int32_t* valid_tokens = nullptr;  // null: all tokens of the block

  int64_t layer_of(int64_t row) const { return layer == nullptr ? 0 : layer[row]; }
  bool is_hole(int64_t row) const { return from_block[row] == kHole; }
};

struct RowLimits {
  int64_t num_layers = 0;
  int64_t num_from_blocks = 0;
  int64_t num_to_blocks = 0;
  int64_t block_tokens = 0;
};

// First fault in row order: half-filled rows, ranges, then a destination named twice. Moves
// nothing.
Status CheckRows(const Rows& rows, const RowLimits& limits);

// The functions below expect rows that CheckRows accepted.

// Plain blocks into packed rows, all tokens.
void PackRows(const PlainView& from, const PackedView& to, const Rows& rows,
              const ParallelFor& parallel_for);

// Packed rows into plain blocks: the first valid_tokens tokens; other bytes stay.
void UnpackRows(const PackedView& from, const PlainView& to, const Rows& rows,
                const ParallelFor& parallel_for);

// Plain blocks copied to block number = row number of layer 0 of `to`; padding rows become zero.
void GatherRows(const PlainView& from, const PlainView& to, const Rows& rows,
                const ParallelFor& parallel_for);

}  // namespace blockcompact
