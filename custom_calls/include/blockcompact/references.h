// Which physical blocks tables name, and reference counts that follow a commit.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"

namespace blockcompact {

// Dense batches of tables. IDs outside [0, max_ids) mark nothing.
struct MarkCall {
  const int32_t* ids = nullptr;         // [batch, row, place]
  const int32_t* num_filled = nullptr;  // [batch, row]: places that count
  const int32_t* owner = nullptr;       // [batch, row]: the owner of a row
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_places = 0;
  int64_t num_owners = 0;
  int64_t max_ids = 0;
  uint8_t* is_marked = nullptr;  // [batch, owner, max_ids]
};

void MarkIds(const MarkCall& call, const ParallelFor& parallel_for);

// Dense batches of counts. A block is free where no kind counts a reference.
struct FreeCall {
  const int32_t* references = nullptr;  // [batch, kind, owner, block]
  int64_t num_batches = 0;
  int64_t num_kinds = 0;
  int64_t num_owners = 0;
  int64_t num_blocks = 0;
  int64_t capacity = 0;
  int32_t* blocks = nullptr;    // [batch, owner, capacity]: free ones ascending, kHole padded
  int32_t* num_free = nullptr;  // [batch, owner]
};

void ListFree(const FreeCall& call, const ParallelFor& parallel_for);

// What is refused, in this order; the first faulty block of each is reported.
enum class ReferenceCheck : int32_t {
  kOutOfRange = 0,  // a landed ID other than kHole outside the pool
  kRepeated,        // a block landed twice
  kStale,           // freed since it was reserved
  kNotReserved,     // landed without a transfer reference
  kNotLanded,       // new in the tables, but not landed
  kNotOwned,        // retired without a regular reference
};
inline constexpr int64_t kNumReferenceChecks = 6;

// Landed blocks lose a reference of kind `transfer`, blocks that are new in the tables gain one of
// kind `regular`, blocks that left the tables lose one. What is written holds where no check fails.
struct ReferenceCall {
  const int32_t* references = nullptr;         // [batch, kind, owner, block]
  const int32_t* generation = nullptr;         // [batch, owner, block]
  const int32_t* landed = nullptr;             // [batch, owner, place], kHole padded
  const int32_t* landed_generation = nullptr;  // [batch, owner, place]
  const uint8_t* is_before = nullptr;          // [batch, owner, block]
  const uint8_t* is_after = nullptr;           // [batch, owner, block]
  int64_t num_batches = 0;
  int64_t num_kinds = 0;
  int64_t num_owners = 0;
  int64_t num_blocks = 0;
  int64_t num_places = 0;
  int64_t regular = 0;
  int64_t transfer = 0;
  int32_t* moved = nullptr;        // [batch, kind, owner, block]
  uint8_t* is_released = nullptr;  // [batch, owner, block]: had references, has none now
  int32_t* num_retired = nullptr;  // [batch, owner]
  int32_t* faults = nullptr;       // [batch, owner, check]: the first faulty block, or kHole
};

void MoveReferences(const ReferenceCall& call, const ParallelFor& parallel_for);

}  // namespace blockcompact
