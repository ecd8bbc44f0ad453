#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "blockcompact/rank.h"
#include "blockcompact/rank_kernels.h"
#include "id_set.h"
#include "row_tasks.h"

namespace blockcompact {
namespace {

constexpr int64_t kChunkScores = 4096;   // counted before looking whether it is worth going on
constexpr uint32_t kNoKey = UINT32_MAX;  // above the key of every finite score

// Counts scores with a key of `threshold` or more down from *num_left. False where they are more,
// or a score is NaN or infinite.
bool CountDown(const RankKernels& kernels, const float* scores, int64_t num_scores,
               uint32_t threshold, int64_t* num_left) {
  for (int64_t begin = 0; begin < num_scores; begin += kChunkScores) {
    const int64_t num_here = std::min(kChunkScores, num_scores - begin);
    const int64_t count = kernels.count_scores(scores + begin, num_here, threshold);
    if (count < 0 || count > *num_left) return false;
    *num_left -= count;
  }
  return true;
}

// Every listed block is at least as good as the worst of them. If as many candidates are that good
// as are listed, no other is, and the listed ones are the best.
bool AreBest(const BestCall& call, const RankKernels& kernels, int64_t row, IdSet set) {
  const int64_t num_blocks = std::clamp<int64_t>(call.num_candidates[row], 0, call.num_blocks);
  const int64_t num_sinks = std::min(call.num_sinks, num_blocks);
  const int64_t num_listed = call.num_listed[row];
  if (num_listed < 0 || num_listed > std::min(call.num_places, num_blocks)) return false;
  const float* scores = call.scores + row * call.num_blocks;
  const int32_t* listed = call.listed + row * call.num_places;
  set.Clear();
  uint32_t worst_key = kNoKey - 1;
  int64_t worst_block = num_sinks - 1, num_listed_sinks = 0;
  for (int64_t place = 0; place < num_listed; ++place) {
    const int64_t block = listed[place];
    if (block < 0 || block >= num_blocks || !set.Add(listed[place])) return false;
    if (block < num_sinks) {
      ++num_listed_sinks;
      continue;
    }
    uint32_t bits;
    std::memcpy(&bits, scores + block, sizeof(bits));
    const uint32_t key = KeyOf(bits);
    if (key > worst_key) continue;
    worst_block = key < worst_key ? block : std::max(worst_block, block);
    worst_key = key;
  }
  const int64_t num_best_sinks = std::min(num_sinks, num_listed);
  if (num_listed_sinks != num_best_sinks) return false;
  for (int32_t sink = 0; sink < num_best_sinks; ++sink) {
    if (!set.Has(sink)) return false;
  }
  int64_t num_left = num_listed - num_best_sinks;
  const int64_t split = worst_block + 1;  // of equal scores the blocks before it are as good
  int64_t none = 0;
  return CountDown(kernels, scores, num_sinks, kNoKey, &none) &&
         CountDown(kernels, scores + num_sinks, split - num_sinks, worst_key, &num_left) &&
         CountDown(kernels, scores + split, num_blocks - split, worst_key + 1, &num_left);
}

}  // namespace

void CheckBest(const BestCall& call, const ParallelFor& parallel_for) {
  const RankKernels kernels = SelectRankKernels(ChosenImpl());
  // One row that differs settles its batch: the others are left out.
  std::vector<std::atomic<bool>> are_best(static_cast<size_t>(call.num_batches));
  for (std::atomic<bool>& is_set : are_best) is_set = true;
  const int64_t row_elements = call.num_blocks + 2 * call.num_places;
  ForRows(call.num_batches * call.num_rows, row_elements, parallel_for,
          [&](int64_t begin, int64_t end) {
            const IdSet set(TakeWords(call.num_blocks), call.num_blocks);
            for (int64_t row = begin; row < end; ++row) {
              std::atomic<bool>& of_batch = are_best[static_cast<size_t>(row / call.num_rows)];
              if (of_batch.load(std::memory_order_relaxed) && !AreBest(call, kernels, row, set)) {
                of_batch.store(false, std::memory_order_relaxed);
              }
            }
          });
  for (size_t batch = 0; batch < are_best.size(); ++batch) call.are_best[batch] = are_best[batch];
}

}  // namespace blockcompact
