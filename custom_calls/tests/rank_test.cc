// Ranking and ID lists: every implementation against a sort.
#include "blockcompact/rank.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "blockcompact/head_kernels.h"
#include "blockcompact/lists.h"
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
    const float kept = scores.back();
    scores.back() = NAN;
    RankRows(call, SerialFor);
    CHECK(bad.back() == num_blocks - 1 && blocks.back() == kHole, "%s: NaN", ImplName(impl));
    scores.back() = kept;
  }
  ForceImpl("");
}

void TestLists() {
  const std::vector<int32_t> ids = {5, -1, 99, 5, 0, 70}, others = {70, 7, 70, 100};
  std::vector<uint8_t> is_member(ids.size());
  int32_t repeated_id = 0, repeated_other = 0;
  MembersCall members;
  members.ids = {ids.data(), static_cast<int64_t>(ids.size())};
  members.others = {others.data(), static_cast<int64_t>(others.size())};
  members.num_rows = 1;
  members.max_ids = 100;
  members.is_member = is_member.data();
  members.repeated_id = &repeated_id;
  members.repeated_other = &repeated_other;
  FindMembers(members, SerialFor);
  CHECK((is_member == std::vector<uint8_t>{0, 0, 0, 0, 0, 1}), "members");
  CHECK(repeated_id == 0 && repeated_other == 0, "repeats");
  std::vector<int32_t> ascending(6);
  SortIds({members.ids, 1, 100, 6, ascending.data()}, SerialFor);
  CHECK((ascending == std::vector<int32_t>{0, 5, 70, 99, kHole, kHole}), "ascending");
  for (Impl impl : AvailableImpls()) {
    ForceImpl(ImplName(impl));
    const std::vector<uint8_t> is_set = RandomBytes(333, 5);
    std::vector<int32_t> expected, listed(40);
    for (size_t i = 0; i < is_set.size(); ++i) {
      if (is_set[i] != 0) expected.push_back(static_cast<int32_t>(i));
    }
    expected.resize(listed.size());
    ListMasks({is_set.data(), 1, 333, 40, listed.data()}, SerialFor);
    CHECK(listed == expected, "%s: mask", ImplName(impl));
  }
  ForceImpl("");
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
  return 0;
}
