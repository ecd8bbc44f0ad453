// What a ledger knows about the request, operation and slot that an event names.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blockcompact/ledger.h"
#include "blockcompact/rows.h"

namespace blockcompact::ledger {

template <typename Enum>
constexpr bool Is(int32_t value, Enum kind) {
  return value == static_cast<int32_t>(kind);
}

// int32 that wraps, as arrays do.
inline int32_t Plus(int32_t value, int32_t step) {
  return static_cast<int32_t>(static_cast<uint32_t>(value) + static_cast<uint32_t>(step));
}

inline bool HasBit(int32_t bits, int32_t place) { return (bits >> place & 1) != 0; }

struct Facts {
  const View& view;
  const Event& event;
  int64_t place = 0;  // of the operation; 0 where it is not known
  bool is_known = false;
  int32_t num_reserved = 0;  // slots that the operation holds
  int64_t free_place = 0;    // of an unused or ended operation, the oldest
  bool has_free_place = false;
  int32_t slot = 0;  // the slot it names; for RESERVE of any the lowest free one
  bool has_free_slot = false;

  int32_t of_request(Column column) const { return view[column][event.request]; }
  int32_t of_operation(Column column) const { return view[column][place]; }
  int32_t of_slot(Column column) const { return view[column][slot]; }
  int32_t* reached() const { return view[Column::kOperationsReached] + place * kNumConditions; }
};

inline bool IsUnused(int32_t stage) {
  return Is(stage, OperationStage::kEmpty) || Is(stage, OperationStage::kClosed) ||
         Is(stage, OperationStage::kAborted);
}

inline bool IsPending(int32_t stage) {
  return Is(stage, OperationStage::kStaged) || Is(stage, OperationStage::kIssued);
}

inline bool IsOpen(int32_t stage) {
  return IsPending(stage) || Is(stage, OperationStage::kCommitted);
}

// The largest ID of the request's operations in a stage, or kHole.
template <typename IsStage>
int32_t NewestOperation(const View& view, int32_t request, const IsStage& is_stage) {
  int32_t newest = kHole;
  for (int64_t place = 0; place < view.num_operations; ++place) {
    if (view[Column::kOperationsRequest][place] == request &&
        is_stage(view[Column::kOperationsStage][place])) {
      newest = std::max(newest, view[Column::kOperationsOperationId][place]);
    }
  }
  return newest;
}

inline Facts GatherFacts(const View& view, const Event& event) {
  Facts facts{view, event};
  int32_t oldest = INT32_MAX;
  for (int64_t place = 0; place < view.num_operations; ++place) {
    if (!facts.is_known && view[Column::kOperationsRequest][place] == event.request &&
        view[Column::kOperationsRequestEpoch][place] == event.request_epoch &&
        view[Column::kOperationsOperationId][place] == event.operation_id) {
      facts.is_known = true;
      facts.place = place;
    }
    const bool is_unused = IsUnused(view[Column::kOperationsStage][place]);
    const int32_t sequence = view[Column::kOperationsSequence][place];
    if (is_unused && (!facts.has_free_place || sequence < oldest)) {
      facts.has_free_place = true;
      facts.free_place = place;
      oldest = sequence;
    }
  }
  const bool is_any = Is(event.kind, EventKind::kReserve) && event.slot < 0;
  facts.slot = is_any ? 0 : event.slot;
  for (int64_t slot = 0; slot < view.num_slots; ++slot) {
    if (facts.is_known && view[Column::kSlotsOperation][slot] == facts.place) ++facts.num_reserved;
    if (!facts.has_free_slot && Is(view[Column::kSlotsState][slot], SlotState::kFree)) {
      facts.has_free_slot = true;
      if (is_any) facts.slot = static_cast<int32_t>(slot);
    }
  }
  return facts;
}

}  // namespace blockcompact::ledger
