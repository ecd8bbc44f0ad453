// Ranking and ID lists: every implementation against a sort.
#include "blockcompact/rank.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "blockcompact/head_kernels.h"
#include "blockcompact/lists.h"
#include "blockcompact/references.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

void OnTwoThreads(int64_t num_tasks, const Task& task) {
  std::thread odd([&] {
    for (int64_t i = 1; i < num_tasks; i += 2) task(i);
  });
  for (int64_t i = 0; i < num_tasks; i += 2) task(i);
  odd.join();
}

std::vector<int32_t> SortedBest(const float* scores, int64_t num_blocks, int64_t num_sinks,
                                int64_t count) {
  std::vector<int32_t> blocks(static_cast<size_t>(num_blocks));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::stable_sort(blocks.begin(), blocks.end(), [&](int32_t a, int32_t b) {
    if (a < num_sinks || b < num_sinks) return a < num_sinks && (b >= num_sinks || a < b);
    return scores[a] > scores[b];
  });
  blocks.resize(static_cast<size_t>(count));
  return blocks;
}

// What a call has just listed is the best of each row; in the second of two batches one block is
// exchanged for the worst.
void TestBest(const RankCall& ranked, int32_t count) {
  const int64_t num_rows = ranked.num_rows / 2;
  std::vector<int32_t> listed(ranked.blocks, ranked.blocks + ranked.num_rows * ranked.capacity);
  std::vector<uint8_t> are_best(2);
  BestCall call;
  call.scores = ranked.scores;
  call.num_candidates = ranked.num_candidates;
  call.listed = listed.data();
  call.num_listed = ranked.count;
  call.num_batches = 2;
  call.num_rows = num_rows;
  call.num_blocks = ranked.num_blocks;
  call.num_places = ranked.capacity;
  call.num_sinks = ranked.num_sinks;
  call.are_best = are_best.data();
  CheckBest(call, OnTwoThreads);
  CHECK((are_best == std::vector<uint8_t>{1, 1}), "best %d of %ld", count,
        static_cast<long>(ranked.num_blocks));
  if (count == 0 || count == ranked.num_blocks) return;
  const int64_t last_row = ranked.num_rows - 1;
  const std::vector<int32_t> order =
      SortedBest(ranked.scores + last_row * ranked.num_blocks, ranked.num_blocks, ranked.num_sinks,
                 ranked.num_blocks);
  listed[static_cast<size_t>(last_row * ranked.capacity)] = order.back();
  CheckBest(call, OnTwoThreads);
  CHECK((are_best == std::vector<uint8_t>{1, 0}), "not the best %d of %ld", count,
        static_cast<long>(ranked.num_blocks));
}

void TestRank(int64_t num_rows, int64_t num_blocks, int64_t count, bool has_ties) {
  std::mt19937 random(static_cast<uint32_t>(num_blocks * 7 + count));
  std::vector<float> scores(static_cast<size_t>(num_rows * num_blocks));
  for (float& score : scores) {
    score = std::ldexp(static_cast<float>(random() % (has_ties ? 5 : 1 << 20)) - 2.0F,
                       static_cast<int>(random() % 20));
  }
  const size_t rows = static_cast<size_t>(num_rows);
  std::vector<int32_t> candidates(rows, static_cast<int32_t>(num_blocks));
  std::vector<int32_t> counts(rows, static_cast<int32_t>(count));
  std::vector<int32_t> blocks(static_cast<size_t>(num_rows * (count + 3))), bad(rows);
  for (Impl impl : AvailableImpls()) {
    ForceImpl(ImplName(impl));
    RankCall call;
    call.scores = scores.data();
    call.num_candidates = candidates.data();
    call.count = counts.data();
    call.num_rows = num_rows;
    call.num_blocks = num_blocks;
    call.num_sinks = 2;
    call.capacity = count + 3;
    call.blocks = blocks.data();
    call.first_non_finite = bad.data();
    RankRows(call, OnTwoThreads);
    for (int64_t row = 0; row < num_rows; ++row) {
      const float* of_row = scores.data() + row * num_blocks;
      std::vector<int32_t> expected = SortedBest(of_row, num_blocks, 2, count);
      expected.resize(static_cast<size_t>(count + 3), kHole);
      CHECK(std::equal(expected.begin(), expected.end(), blocks.data() + row * (count + 3)),
            "%s: row %ld of %ld blocks, best %ld", ImplName(impl), static_cast<long>(row),
            static_cast<long>(num_blocks), static_cast<long>(count));
      CHECK(bad[static_cast<size_t>(row)] == kHole, "%s", ImplName(impl));
    }
    TestBest(call, static_cast<int32_t>(count));
    const float kept = scores.back();
    scores.back() = NAN;
    RankRows(call, SerialFor);
    CHECK(bad.back() == num_blocks - 1 && blocks.back() == kHole, "%s: NaN", ImplName(impl));
    scores.back() = kept;
  }
  ForceImpl("");
}

void TestLists() {
  const std::vector<int32_t> ids = {5, -1, 99, 5, 0, 70, 7}, others = {70, 7, 70, 100};
  const std::vector<uint8_t> is_filled = {1, 0, 1, 1, 1, 1, 0}, is_other_filled = {1, 0, 1, 1};
  std::vector<uint8_t> is_member(ids.size());
  int32_t repeated = 0, outside = 0, repeated_other = 0, outside_other = 0;
  const int32_t bound = 99;
  MembersCall members;
  members.ids = {ids.data(), is_filled.data(), static_cast<int64_t>(ids.size())};
  members.others = {others.data(), is_other_filled.data(), static_cast<int64_t>(others.size())};
  members.num_rows = 1;
  members.bound = &bound;
  members.max_ids = 100;
  members.is_member = is_member.data();
  members.faults = {&repeated, &outside};
  members.other_faults = {&repeated_other, &outside_other};
  FindMembers(members, SerialFor);
  CHECK((is_member == std::vector<uint8_t>{0, 0, 0, 0, 0, 1, 0}), "members");
  CHECK(repeated == 0 && repeated_other == 0, "repeats");
  CHECK(outside == 2 && outside_other == 3, "outside");
  std::vector<int32_t> ascending(6);
  SortIds({members.ids, 1, 100, 6, ascending.data()}, SerialFor);
  CHECK((ascending == std::vector<int32_t>{0, 5, 70, 99, kHole, kHole}), "ascending");
  for (Impl impl : AvailableImpls()) {
    ForceImpl(ImplName(impl));
    const std::vector<int32_t> references = {0, 1, 0, 0, 0, 0, 0, 0,   // one kind, two owners
                                             0, 0, 0, 2, 3, 0, 0, 0};  // another kind
    std::vector<int32_t> free(6), num_free(2);
    ListFree({references.data(), 1, 2, 2, 4, 3, free.data(), num_free.data()}, OnTwoThreads);
    CHECK((free == std::vector<int32_t>{0, 2, kHole, 1, 2, 3}), "%s: free", ImplName(impl));
    CHECK((num_free == std::vector<int32_t>{2, 3}), "%s: free", ImplName(impl));
    const std::vector<uint8_t> is_kept = {0, 1, 1, 0, 1, 0};
    std::vector<int32_t> places(6), first(6), second(6);
    KeepPlaces({is_kept.data(), ids.data(), ascending.data(), 1, 6, places.data(), first.data(),
                second.data()},
               SerialFor);
    CHECK((places == std::vector<int32_t>{1, 2, 4, kHole, kHole, kHole}), "%s", ImplName(impl));
    CHECK((first == std::vector<int32_t>{-1, 99, 0, kHole, kHole, kHole}), "%s", ImplName(impl));
    CHECK((second == std::vector<int32_t>{5, 70, -1, kHole, kHole, kHole}), "%s", ImplName(impl));
  }
  ForceImpl("");
}

// Two owners of four blocks: owner 0 commits block 1 and drops block 2; owner 1 commits what nobody
// reserved.
void TestReferences() {
  const std::vector<int32_t> tables = {2, 3, 1, kHole, 9, 0}, num_filled = {2, 1, 2};
  const std::vector<int32_t> owner = {0, 1, 0};
  std::vector<uint8_t> is_marked(8);
  MarkIds({tables.data(), num_filled.data(), owner.data(), 1, 3, 2, 2, 4, is_marked.data()},
          OnTwoThreads);
  CHECK((is_marked == std::vector<uint8_t>{1, 0, 1, 1, 0, 1, 0, 0}), "marks");

  const std::vector<int32_t> references = {0, 0, 1, 1, 0, 0, 0, 0,   // regular
                                           0, 0, 0, 0, 0, 0, 0, 0,   // prefix
                                           0, 1, 0, 0, 0, 0, 0, 0};  // transfer
  const std::vector<int32_t> generation = {5, 6, 7, 8, 0, 0, 0, 0};
  const std::vector<int32_t> landed = {1, kHole, 3, 4}, landed_generation = {6, kHole, 0, 0};
  const std::vector<uint8_t> is_before = {0, 0, 1, 1, 0, 0, 0, 0};
  const std::vector<uint8_t> is_after = {0, 1, 0, 1, 0, 0, 0, 1};
  std::vector<int32_t> moved(24), num_retired(2), faults(2 * kNumReferenceChecks);
  std::vector<uint8_t> is_released(8);
  ReferenceCall call;
  call.references = references.data();
  call.generation = generation.data();
  call.landed = landed.data();
  call.landed_generation = landed_generation.data();
  call.is_before = is_before.data();
  call.is_after = is_after.data();
  call.num_batches = 1;
  call.num_kinds = 3;
  call.num_owners = 2;
  call.num_blocks = 4;
  call.num_places = 2;
  call.transfer = 2;
  call.moved = moved.data();
  call.is_released = is_released.data();
  call.num_retired = num_retired.data();
  call.faults = faults.data();
  MoveReferences(call, OnTwoThreads);
  CHECK(
      (std::vector<int32_t>(moved.begin(), moved.begin() + 4) == std::vector<int32_t>{0, 1, 0, 1}),
      "regular references");
  CHECK(moved[17] == 0 && num_retired[0] == 1 && is_released[2] == 1, "owner 0");
  CHECK((faults == std::vector<int32_t>{kHole, kHole, kHole, kHole, kHole, kHole,  // owner 0
                                        4, kHole, kHole, 3, kHole, kHole}),
        "faults");
}

}  // namespace

int main() {
  for (bool has_ties : {false, true}) {
    for (int64_t num_blocks : {1, 2, 15, 16, 17, 63, 64, 65, 129, 1000, 4096, 9001}) {
      for (int64_t divisor : {1, 2, 9, 100}) {
        TestRank(40, num_blocks, num_blocks / divisor, has_ties);
      }
    }
  }
  TestLists();
  TestReferences();
  return 0;
}
