// Lists and masks of bounded IDs, row by row. Unused places of a list hold kHole.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"

namespace blockcompact {

struct IdRows {
  const int32_t* ids = nullptr;        // [num_rows, num_places]; outside [0, max_ids): no ID
  const uint8_t* is_filled = nullptr;  // [num_rows, num_places]: places that count
  int64_t num_places = 0;
};

// What is wrong with lists, [num_rows]: the first filled place of its kind, or kHole.
struct ListFaults {
  int32_t* repeated = nullptr;  // its ID comes again
  int32_t* outside = nullptr;   // its ID is not in [0, bound)
};

struct MembersCall {
  IdRows ids;
  IdRows others;
  int64_t num_rows = 0;
  const int32_t* bound = nullptr;  // [num_rows]
  int64_t max_ids = 0;
  uint8_t* is_member = nullptr;  // [num_rows, places of ids]: whether `others` has it
  ListFaults faults;
  ListFaults other_faults;
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
