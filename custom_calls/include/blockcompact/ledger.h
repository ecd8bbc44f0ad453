// One ledger of the commit ledger, changed in place: the same answers and bytes as the Python
// source.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "blockcompact/ledger_tables.h"

namespace blockcompact::ledger {

// A state as dense columns; is_leased is bool, all others are int32.
struct View {
  int64_t num_slots = 0;
  int64_t num_operations = 0;
  int64_t num_requests = 0;
  int32_t num_ranks = 0;
  std::array<int32_t*, static_cast<size_t>(Column::kCount)> columns{};
  uint8_t* is_leased = nullptr;

  int32_t* operator[](Column column) const { return columns[static_cast<size_t>(column)]; }
  int32_t all_ranks() const { return static_cast<int32_t>((uint32_t{1} << num_ranks) - 1); }
};

struct Outcome {
  int32_t code;
  int32_t value;
};

// Judges an event and, where no guard objects, applies it. A refused one changes the counts only.
Outcome Apply(const View& view, const Event& event);

}  // namespace blockcompact::ledger
