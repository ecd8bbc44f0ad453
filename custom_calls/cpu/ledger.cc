#include "blockcompact/ledger.h"

#include <algorithm>
#include <cstddef>
#include <optional>

#include "ledger_facts.h"
#include "ledger_guards.h"

namespace blockcompact::ledger {
namespace {

void FreeWhatIsFree(const View& view, int64_t slot) {
  if (!Is(view[Column::kSlotsState][slot], SlotState::kFree)) return;
  view[Column::kSlotsRequest][slot] = kHole;
  view[Column::kSlotsOperation][slot] = kHole;
  view[Column::kSlotsQuietRanks][slot] = 0;
}

void MoveSlot(const View& view, int64_t slot, SlotEvent happening) {
  int32_t* state = view[Column::kSlotsState] + slot;
  const int32_t next = kSlotNext[*state][static_cast<int32_t>(happening)];
  if (next != kNoState) *state = next;
  FreeWhatIsFree(view, slot);
}

void MoveSlotsOfOperation(const Facts& facts, SlotEvent happening) {
  const View& view = facts.view;
  for (int64_t slot = 0; slot < view.num_slots; ++slot) {
    if (view[Column::kSlotsOperation][slot] != facts.place) continue;
    MoveSlot(view, slot, happening);
    if (happening == SlotEvent::kCommit) view[Column::kSlotsOperation][slot] = kHole;
  }
}

// An operation that drains is aborted as soon as it holds no slot.
void EndDrained(const View& view) {
  const int32_t* operation = view[Column::kSlotsOperation];
  for (int64_t place = 0; place < view.num_operations; ++place) {
    int32_t* stage = view[Column::kOperationsStage] + place;
    if (!Is(*stage, OperationStage::kDraining)) continue;
    if (std::find(operation, operation + view.num_slots, place) != operation + view.num_slots) {
      continue;
    }
    *stage = static_cast<int32_t>(OperationStage::kAborted);
    view.is_leased[place] = 0;
  }
}

// Ends what belongs to a request; all requests where it is kHole.
void EndRequests(const View& view, int32_t request) {
  for (int64_t slot = 0; slot < view.num_slots; ++slot) {
    if (request != kHole && view[Column::kSlotsRequest][slot] != request) continue;
    MoveSlot(view, slot, static_cast<SlotEvent>(kSlotEnd[view[Column::kSlotsState][slot]]));
  }
  for (int64_t place = 0; place < view.num_operations; ++place) {
    if (request != kHole && view[Column::kOperationsRequest][place] != request) continue;
    int32_t* stage = view[Column::kOperationsStage] + place;
    *stage = kOperationEnd[*stage];
  }
  EndDrained(view);
}

// Writes a staged operation over the place of the oldest ended one.
void Stage(const Facts& facts) {
  const View& view = facts.view;
  const Event& event = facts.event;
  const int64_t place = facts.free_place;
  int32_t awaited = kAwaitedAlways;
  if (event.num_slots > 0) awaited |= kAwaitedWithSlots;
  if (event.has_side_buffer != 0) awaited |= kAwaitedWithSideBuffer;
  view[Column::kOperationsStage][place] = static_cast<int32_t>(OperationStage::kStaged);
  view[Column::kOperationsRequest][place] = event.request;
  view[Column::kOperationsRequestEpoch][place] = event.request_epoch;
  view[Column::kOperationsOperationId][place] = event.operation_id;
  view[Column::kOperationsPoolGeneration][place] = event.pool_generation;
  view[Column::kOperationsMapRevision][place] = event.map_revision;
  view[Column::kOperationsSelectionRevision][place] = event.selection_revision;
  view[Column::kOperationsBodyDigest][place] = event.body_digest;
  view[Column::kOperationsNumSlots][place] = event.num_slots;
  view[Column::kOperationsAwaited][place] = awaited;
  std::fill_n(view[Column::kOperationsReached] + place * kNumConditions, kNumConditions, 0);
  view.is_leased[place] = event.num_slots > 0 ? 1 : 0;
  view[Column::kOperationsSequence][place] = view[Column::kNextSequence][0];
  view[Column::kRequestsLastOperationId][event.request] = event.operation_id;
}

void Reserve(const Facts& facts) {
  const View& view = facts.view;
  const int64_t slot = facts.slot;
  MoveSlot(view, slot, SlotEvent::kReserve);
  view[Column::kSlotsRequest][slot] = facts.event.request;
  view[Column::kSlotsOperation][slot] = static_cast<int32_t>(facts.place);
  view[Column::kSlotsGeneration][slot] = Plus(view[Column::kSlotsGeneration][slot], 1);
}

// The source may go when every rank has all that the operation brings.
void Reach(const Facts& facts) {
  const View& view = facts.view;
  int32_t* reached = facts.reached();
  reached[facts.event.condition] |= 1 << facts.event.rank;
  const int32_t all = view.all_ranks();
  const bool has_side =
      reached[static_cast<int32_t>(Condition::kSideLanded)] == all ||
      (facts.of_operation(Column::kOperationsAwaited) & kAwaitedWithSideBuffer) == 0;
  if (reached[static_cast<int32_t>(Condition::kLanded)] == all && has_side) {
    view.is_leased[facts.place] = 0;
  }
}

void Commit(const Facts& facts) {
  const View& view = facts.view;
  const int32_t request = facts.event.request;
  MoveSlotsOfOperation(facts, SlotEvent::kCommit);
  view[Column::kRequestsSelectionRevision][request] =
      facts.of_operation(Column::kOperationsSelectionRevision);
  if (facts.of_operation(Column::kOperationsNumSlots) == 0) return;
  for (Column column : {Column::kRequestsPoolGeneration, Column::kRequestsMapRevision}) {
    view[column][request] = Plus(view[column][request], 1);
  }
}

void Quiesce(const Facts& facts) {
  const View& view = facts.view;
  int32_t* quiet = view[Column::kSlotsQuietRanks] + facts.slot;
  *quiet |= 1 << facts.event.rank;
  if (*quiet == view.all_ranks()) MoveSlot(view, facts.slot, SlotEvent::kQuiesce);
  EndDrained(view);
}

void Change(const Facts& facts) {
  const View& view = facts.view;
  const Event& event = facts.event;
  switch (static_cast<EventKind>(event.kind)) {
    case EventKind::kAdmit:
      view[Column::kRequestsRequestEpoch][event.request] = view[Column::kNextRequestEpoch][0];
      view[Column::kRequestsLastOperationId][event.request] = kHole;
      view[Column::kNextRequestEpoch][0] = Plus(view[Column::kNextRequestEpoch][0], 1);
      break;
    case EventKind::kPreempt:
    case EventKind::kFinish:
      EndRequests(view, event.request);
      break;
    case EventKind::kRestart:
      EndRequests(view, kHole);
      std::fill_n(view[Column::kRequestsState], view.num_requests, 0);
      view[Column::kProcessEpoch][0] = event.process_epoch;
      break;
    case EventKind::kStage:
      Stage(facts);
      view[Column::kNextSequence][0] = Plus(view[Column::kNextSequence][0], 1);
      break;
    case EventKind::kReserve:
      Reserve(facts);
      break;
    case EventKind::kIssue:
      MoveSlotsOfOperation(facts, SlotEvent::kIssue);
      break;
    case EventKind::kReach:
      Reach(facts);
      break;
    case EventKind::kCommit:
      Commit(facts);
      break;
    case EventKind::kAbort:
      MoveSlotsOfOperation(facts, SlotEvent::kAbort);
      break;
    case EventKind::kEvict:
      MoveSlot(view, facts.slot, SlotEvent::kEvict);
      view[Column::kRequestsMapRevision][event.request] =
          Plus(view[Column::kRequestsMapRevision][event.request], 1);
      break;
    case EventKind::kQuiesce:
      Quiesce(facts);
      break;
    case EventKind::kAck:
    case EventKind::kNone:
      break;
  }
}

// Moves the request and the operation that an event names, as the tables say.
void MoveStates(const Facts& facts) {
  const View& view = facts.view;
  const Event& event = facts.event;
  if (kNamed[event.kind][offsetof(Event, request) / sizeof(int32_t)] != 0) {
    int32_t* state = view[Column::kRequestsState] + event.request;
    const int32_t next = kRequestNext[*state][event.kind];
    if (next != kNoState) *state = next;
  }
  if (!facts.is_known || Is(event.kind, EventKind::kStage)) return;
  int32_t* stage = view[Column::kOperationsStage] + facts.place;
  const int32_t next = kOperationNext[*stage][event.kind];
  if (next == kNoState) return;
  *stage = next;
  EndDrained(view);
}

}  // namespace

Outcome Apply(const View& view, const Event& event) {
  if (Is(event.kind, EventKind::kNone)) return {0, kHole};
  int32_t* counts = view[Column::kCounts];
  const auto counted = [&](Outcome outcome) {
    counts[kDisposition[outcome.code]] = Plus(counts[kDisposition[outcome.code]], 1);
    return outcome;
  };
  if (event.kind < 0 || event.kind > static_cast<int32_t>(EventKind::kNone)) {
    return counted({static_cast<int32_t>(ResultCode::kEventOutOfRange), event.kind});
  }
  const Facts facts = GatherFacts(view, event);
  if (const std::optional<Outcome> objection = Judge(facts)) return counted(*objection);
  int32_t value = kHole;
  if (Is(event.kind, EventKind::kAdmit)) value = view[Column::kNextRequestEpoch][0];
  if (Is(event.kind, EventKind::kReserve)) value = facts.slot;
  if (Is(event.kind, EventKind::kStage)) value = static_cast<int32_t>(facts.free_place);
  Change(facts);
  MoveStates(facts);
  return counted({0, value});
}

}  // namespace blockcompact::ledger
