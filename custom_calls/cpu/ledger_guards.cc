#include "ledger_guards.h"

#include <cstddef>
#include <iterator>

namespace blockcompact::ledger {
namespace {

using Objection = std::optional<Outcome>;

// The objection of a guard that has one code.
Objection Object(Guard guard, bool is_raised, int32_t value) {
  if (!is_raised) return std::nullopt;
  return Outcome{kGuardCode[static_cast<size_t>(guard)], value};
}

struct Range {
  int32_t value;
  size_t column;
  int32_t lowest;
  int64_t end;
};

constexpr size_t ColumnOf(size_t offset) { return offset / sizeof(int32_t); }

Objection InRange(const Facts& facts) {
  const Event& event = facts.event;
  const View& view = facts.view;
  const int32_t lowest_slot = Is(event.kind, EventKind::kReserve) ? kHole : 0;
  // A side buffer travels with slots only.
  const int64_t end_of_side = event.num_slots == 0 ? 1 : 2;
  const Range ranges[] = {
      {event.request, ColumnOf(offsetof(Event, request)), 0, view.num_requests},
      {event.slot, ColumnOf(offsetof(Event, slot)), lowest_slot, view.num_slots},
      {event.rank, ColumnOf(offsetof(Event, rank)), 0, view.num_ranks},
      {event.condition, ColumnOf(offsetof(Event, condition)), 0, kNumConditions},
      {event.operation_id, ColumnOf(offsetof(Event, operation_id)), 0, INT32_MAX},
      {event.num_slots, ColumnOf(offsetof(Event, num_slots)), 0, view.num_slots + 1},
      {event.has_side_buffer, ColumnOf(offsetof(Event, has_side_buffer)), 0, end_of_side},
  };
  for (const Range& range : ranges) {
    if (kNamed[event.kind][range.column] == 0) continue;
    if (range.value < range.lowest || range.value >= range.end) {
      return Object(Guard::kInRange, true, range.value);
    }
  }
  return std::nullopt;
}

Objection CurrentBasis(const Facts& facts) {
  const Event& event = facts.event;
  const int32_t pairs[][2] = {
      {event.pool_generation, facts.of_request(Column::kRequestsPoolGeneration)},
      {event.map_revision, facts.of_request(Column::kRequestsMapRevision)},
      {event.selection_revision, Plus(facts.of_request(Column::kRequestsSelectionRevision), 1)},
  };
  for (const auto& [given, current] : pairs) {
    if (given != current) return Object(Guard::kCurrentBasis, true, given);
  }
  return std::nullopt;
}

// A rank reaches a condition only after those before it.
Objection InOrder(const Facts& facts) {
  const int32_t before =
      kPrerequisites[facts.event.condition] & facts.of_operation(Column::kOperationsAwaited);
  for (int32_t condition = 0; condition < kNumConditions; ++condition) {
    if (HasBit(before, condition) && !HasBit(facts.reached()[condition], facts.event.rank)) {
      return Outcome{kMissingCode[condition], facts.event.rank};
    }
  }
  return std::nullopt;
}

// A commit names the first missing condition and the lowest rank that lacks it.
Objection AllRanksReady(const Facts& facts) {
  const int32_t awaited = facts.of_operation(Column::kOperationsAwaited);
  for (int32_t condition = 0; condition < kNumConditions; ++condition) {
    const int32_t reached = facts.reached()[condition];
    if (!HasBit(awaited, condition) || reached == facts.view.all_ranks()) continue;
    int32_t rank = 0;
    while (HasBit(reached, rank)) ++rank;
    return Outcome{kMissingCode[condition], rank};
  }
  return std::nullopt;
}

Objection JudgeRequest(const Facts& facts, Guard guard) {
  const Event& event = facts.event;
  const int32_t process_epoch = facts.view[Column::kProcessEpoch][0];
  switch (guard) {
    case Guard::kProcessEpoch:
      return Object(guard, event.process_epoch != process_epoch, event.process_epoch);
    case Guard::kNewProcessEpoch:
      return Object(guard, event.process_epoch <= process_epoch, event.process_epoch);
    case Guard::kNotRunningYet:
    case Guard::kStillRunning: {
      const int32_t next = kRequestNext[facts.of_request(Column::kRequestsState)][event.kind];
      return Object(guard, next == kNoState, facts.of_request(Column::kRequestsRequestEpoch));
    }
    case Guard::kNotOfThePast:
      return Object(guard, event.request_epoch < facts.of_request(Column::kRequestsRequestEpoch),
                    event.request_epoch);
    case Guard::kNotOfTheFuture:
      return Object(guard, event.request_epoch > facts.of_request(Column::kRequestsRequestEpoch),
                    event.request_epoch);
    default:
      return std::nullopt;
  }
}

Objection JudgeOperation(const Facts& facts, Guard guard) {
  const Event& event = facts.event;
  const int32_t id = event.operation_id;
  switch (guard) {
    case Guard::kSameBody:
      return Object(
          guard,
          facts.is_known && event.body_digest != facts.of_operation(Column::kOperationsBodyDigest),
          id);
    case Guard::kStagedOnce:
      return Object(guard, facts.is_known, id);
    case Guard::kRemembered:
      return Object(
          guard, !facts.is_known && id <= facts.of_request(Column::kRequestsLastOperationId), id);
    case Guard::kKnown:
      return Object(guard, !facts.is_known, id);
    case Guard::kSameKey:
      return Object(
          guard,
          event.pool_generation != facts.of_operation(Column::kOperationsPoolGeneration) ||
              event.map_revision != facts.of_operation(Column::kOperationsMapRevision),
          id);
    case Guard::kNoOpenOperation:
    case Guard::kNoPendingOperation: {
      const int32_t found = NewestOperation(facts.view, event.request,
                                            guard == Guard::kNoOpenOperation ? IsOpen : IsPending);
      return Object(guard, found >= 0, found);
    }
    case Guard::kCurrentBasis:
      return CurrentBasis(facts);
    case Guard::kHasPlace:
      return Object(guard, !facts.has_free_place, static_cast<int32_t>(facts.view.num_operations));
    case Guard::kFittingStage: {
      const int32_t code = kOperationCode[facts.of_operation(Column::kOperationsStage)][event.kind];
      if (code == 0) return std::nullopt;
      return Outcome{code, id};
    }
    case Guard::kReservesNoMore:
      return Object(guard, facts.num_reserved >= facts.of_operation(Column::kOperationsNumSlots),
                    id);
    case Guard::kAllReserved:
      return Object(guard, facts.num_reserved < facts.of_operation(Column::kOperationsNumSlots),
                    facts.num_reserved);
    case Guard::kAwaited:
      return Object(guard, !HasBit(facts.of_operation(Column::kOperationsAwaited), event.condition),
                    id);
    case Guard::kReachedOnce:
      return Object(guard, HasBit(facts.reached()[event.condition], event.rank), id);
    case Guard::kInOrder:
      return InOrder(facts);
    case Guard::kAllRanksReady:
      return AllRanksReady(facts);
    default:
      return std::nullopt;
  }
}

Objection JudgeSlot(const Facts& facts, Guard guard) {
  const Event& event = facts.event;
  switch (guard) {
    case Guard::kHasFreeSlot:
      return Object(guard, event.slot < 0 && !facts.has_free_slot,
                    static_cast<int32_t>(facts.view.num_slots));
    case Guard::kFreeSlot:
      return Object(guard,
                    event.slot >= 0 && !Is(facts.of_slot(Column::kSlotsState), SlotState::kFree),
                    event.slot);
    case Guard::kSlotGeneration:
      return Object(guard, event.slot_generation != facts.of_slot(Column::kSlotsGeneration),
                    event.slot);
    case Guard::kOwnSlot:
      return Object(guard,
                    facts.of_slot(Column::kSlotsRequest) != event.request &&
                        !Is(facts.of_slot(Column::kSlotsState), SlotState::kFree),
                    event.slot);
    case Guard::kResidentSlot:
      return Object(guard, !Is(facts.of_slot(Column::kSlotsState), SlotState::kResident),
                    event.slot);
    case Guard::kRetiringSlot:
      return Object(guard, !Is(facts.of_slot(Column::kSlotsState), SlotState::kRetiring),
                    event.slot);
    case Guard::kQuietOnce:
      return Object(guard, HasBit(facts.of_slot(Column::kSlotsQuietRanks), event.rank), event.slot);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<Outcome> Judge(const Facts& facts) {
  for (size_t number = 0; number < std::size(kGuardCode); ++number) {
    if (kGuarded[number][facts.event.kind] == 0) continue;
    const auto guard = static_cast<Guard>(number);
    Objection found = guard == Guard::kInRange ? InRange(facts) : JudgeRequest(facts, guard);
    if (!found) found = JudgeOperation(facts, guard);
    if (!found) found = JudgeSlot(facts, guard);
    if (found) return found;
  }
  return std::nullopt;
}

}  // namespace blockcompact::ledger
