// Lists and masks of bounded IDs, row by row. Unused places of a list hold kHole.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"

namespace blockcompact {

struct IdRows {
  const int32_t* ids = nullptr;  // [num_rows, num_places]; outside [0, max_ids): no ID
  int64_t num_places = 0;
};

struct MembersCall {
  IdRows ids;
  IdRows others;
  int64_t num_rows = 0;
  int64_t max_ids = 0;
  uint8_t* is_member = nullptr;       // [num_rows, places of ids]: whether `others` has it
  int32_t* repeated_id = nullptr;     // [num_rows]: first place whose ID comes again, or kHole
  int32_t* repeated_other = nullptr;  // likewise of `others`
};

void FindMembers(const MembersCall& call, const ParallelFor& parallel_for);

struct AscendingCall {
  IdRows ids;
  int64_t num_rows = 0;
  int64_t max_ids = 0;
  int64_t capacity = 0;
  int32_t* ascending = nullptr;  // [num_rows, capacity]: each ID once; cut or kHole padded
};

void SortIds(const AscendingCall& call, const ParallelFor& parallel_for);

struct MaskCall {
  const uint8_t* is_set = nullptr;  // [num_rows, max_ids]
  int64_t num_rows = 0;
  int64_t max_ids = 0;
  int64_t capacity = 0;
  int32_t* ascending = nullptr;  // [num_rows, capacity], cut or kHole padded
};

void ListMasks(const MaskCall& call, const ParallelFor& parallel_for);

}  // namespace blockcompact
