// Any events, sane or not: nothing outside of a ledger is touched, and what is counted adds up.
#include "blockcompact/ledger.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <iterator>
#include <numeric>

#include "check.h"

using namespace blockcompact::ledger;  // NOLINT: a test program

namespace {

constexpr int64_t kNumSlots = 5, kNumOperations = 4, kNumRequests = 3;
constexpr int32_t kNumRanks = 2;

int64_t SizeOf(Column column) {
  if (column == Column::kCounts) return 4;
  if (column >= Column::kProcessEpoch) return 1;
  if (column >= Column::kRequestsState) return kNumRequests;
  if (column == Column::kOperationsReached) return kNumOperations * kNumConditions;
  return column >= Column::kOperationsStage ? kNumOperations : kNumSlots;
}

// An empty ledger, every column an allocation of its own.
struct Ledger {
  Ledger() : columns(static_cast<size_t>(Column::kCount)) {
    for (size_t place = 0; place < columns.size(); ++place) {
      const auto column = static_cast<Column>(place);
      const bool is_hole = column == Column::kSlotsRequest || column == Column::kSlotsOperation ||
                           column == Column::kOperationsRequest ||
                           column == Column::kOperationsOperationId ||
                           column == Column::kRequestsLastOperationId;
      const bool is_one = column == Column::kProcessEpoch || column == Column::kNextRequestEpoch ||
                          column == Column::kNextSequence;
      columns[place].assign(static_cast<size_t>(SizeOf(column)), is_hole ? -1 : is_one ? 1 : 0);
      view.columns[place] = columns[place].data();
    }
    view.num_slots = kNumSlots;
    view.num_operations = kNumOperations;
    view.num_requests = kNumRequests;
    view.num_ranks = kNumRanks;
    view.is_leased = is_leased.data();
  }

  std::vector<std::vector<int32_t>> columns;
  std::vector<uint8_t> is_leased = std::vector<uint8_t>(kNumOperations);
  View view;
};

void CheckWhole(const View& view, int64_t num_events) {
  const int32_t* counts = view[Column::kCounts];
  CHECK(std::accumulate(counts, counts + 4, int64_t{0}) == num_events, "%ld events", num_events);
  for (int64_t slot = 0; slot < kNumSlots; ++slot) {
    const int32_t state = view[Column::kSlotsState][slot];
    CHECK(state >= 0 && state <= 4, "slot %ld is in state %d", slot, state);
    CHECK((state == 0) == (view[Column::kSlotsRequest][slot] == -1), "slot %ld: owner", slot);
    CHECK(state == 4 || view[Column::kSlotsQuietRanks][slot] == 0, "slot %ld: quiet", slot);
  }
}

int64_t TestRandomEvents(uint32_t seed, bool is_wild) {
  std::mt19937 random(seed);
  Ledger ledger;
  const int64_t num_events = 400;
  for (int64_t number = 0; number < num_events; ++number) {
    std::array<int32_t, sizeof(Event) / sizeof(int32_t)> fields;
    for (int32_t& field : fields) field = static_cast<int32_t>(random() % 4);
    const bool is_odd = is_wild && random() % 4 == 0;
    const int32_t extremes[] = {INT_MIN, -2, -1, 14, 31, INT_MAX};
    if (is_odd) fields[random() % fields.size()] = extremes[random() % std::size(extremes)];
    Event event;
    std::memcpy(&event, fields.data(), sizeof event);
    if (!is_odd) {
      event.kind = static_cast<int32_t>(random() % static_cast<int32_t>(EventKind::kNone));
      event.request %= kNumRequests;
      event.process_epoch = ledger.view[Column::kProcessEpoch][0];
      event.request_epoch = ledger.view[Column::kRequestsRequestEpoch][event.request];
      event.selection_revision = 1 + ledger.view[Column::kRequestsSelectionRevision][event.request];
    }
    Apply(ledger.view, event);
    CheckWhole(ledger.view, number + 1);
  }
  return ledger.view[Column::kCounts][0];
}

}  // namespace

int main() {
  int64_t num_applied = 0;
  for (uint32_t seed = 0; seed < 500; ++seed) num_applied += TestRandomEvents(seed, seed % 2 == 1);
  CHECK(num_applied > 10000, "%ld applied", num_applied);
  return 0;
}
