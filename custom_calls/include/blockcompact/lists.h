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

// Two columns of equal lists, cut to the places that are kept.
struct KeepCall {
  const uint8_t* is_kept = nullptr;  // [num_rows, num_places]
  const int32_t* first = nullptr;    // [num_rows, num_places]
  const int32_t* second = nullptr;   // [num_rows, num_places]
  int64_t num_rows = 0;
  int64_t num_places = 0;
  int32_t* places = nullptr;       // [num_rows, num_places]: the kept places, ascending
  int32_t* kept_first = nullptr;   // [num_rows, num_places]
  int32_t* kept_second = nullptr;  // [num_rows, num_places]
};

void KeepPlaces(const KeepCall& call, const ParallelFor& parallel_for);

}  // namespace blockcompact
