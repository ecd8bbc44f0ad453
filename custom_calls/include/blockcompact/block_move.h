// Moves within one pool, as if every block were read before any is written.
#pragma once

#include <cstdint>
#include <vector>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"
#include "blockcompact/strided_copy.h"
#include "blockcompact/views.h"

namespace blockcompact {

inline constexpr int32_t kScratchBlock = -2;

struct BlockMove {
  int32_t from_block;
  int32_t to_block;
};

// Orders moves so that running them one after another equals running them at once. Destinations
// must be distinct. Chains need no scratch; each cycle saves one block in kScratchBlock.
std::vector<BlockMove> OrderMoves(const std::vector<BlockMove>& moves);

// A pool seen as blocks of equal internal strides.
struct BlockSpace {
  std::vector<std::byte*> layer_bases;
  int64_t block_stride_bytes = 0;
  int64_t block_bytes = 0;  // bytes of one block without gaps
  StridedCopy in_pool;      // pool block -> pool block
  StridedCopy to_scratch;   // pool block -> dense scratch
  StridedCopy from_scratch;
};

BlockSpace BlockSpaceOf(const PlainView& view);
BlockSpace BlockSpaceOf(const PackedView& view);
// Blocks that are contiguous bytes.
BlockSpace DenseBlockSpace(std::vector<std::byte*> layer_bases, int64_t block_bytes);

// Expects rows that CheckRows accepted.
void MoveBlocks(const BlockSpace& space, const Rows& rows, const ParallelFor& parallel_for);

}  // namespace blockcompact
