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

constexpr int64_t kChunkScores = 4096;       // seen before looking whether it is worth going on
constexpr uint32_t kNoKey = UINT32_MAX;      // above the key of every finite score
constexpr uint32_t kInfinity = 0xFF000000U;  // exponent bits, the sign shifted out

uint32_t BitsOf(const float* score) {
  uint32_t bits;
  std::memcpy(&bits, score, sizeof(bits));
  return bits;
}

// Splits the scores by whether they are listed; sinks compete with nobody. False where one is NaN
// or infinite, or what was seen so far settles that an unlisted block is better than a listed one.
bool SplitRow(const RankKernels& kernels, const float* scores, int64_t num_blocks,
              int64_t num_sinks, const IdSet& set, uint32_t* worst_in, uint32_t* best_out) {
  // The first words, in which sinks and others meet, one by one.
  const int64_t num_words = IdSet::NumWords(num_sinks);
  const int64_t head = std::min(num_blocks, num_words * IdSet::kWordBits);
  for (int64_t block = 0; block < head; ++block) {
    const uint32_t bits = BitsOf(scores + block), key = KeyOf(bits);
    if (bits << 1 >= kInfinity) return false;
    if (block < num_sinks) continue;
    if (set.Has(static_cast<int32_t>(block))) {
      *worst_in = std::min(*worst_in, key);
    } else {
      *best_out = std::max(*best_out, key);
    }
  }
  for (int64_t begin = head; begin < num_blocks; begin += kChunkScores) {
    const int64_t num_here = std::min(kChunkScores, num_blocks - begin);
    const uint64_t* is_in = set.words() + begin / IdSet::kWordBits;
    if (!kernels.split_scores(scores + begin, num_here, is_in, worst_in, best_out)) return false;
    if (*best_out > *worst_in) return false;
  }
  return *best_out <= *worst_in;
}

// Whether no unlisted block with the key of the worst listed one comes before a listed one with it.
// The unlisted blocks have no larger key.
bool AreFirstOfTied(const RankKernels& kernels, const float* scores, int64_t num_blocks,
                    int64_t num_sinks, const int32_t* listed, int64_t num_listed, uint32_t key) {
  int64_t last = num_sinks - 1, num_listed_sinks = 0;
  for (int64_t place = 0; place < num_listed; ++place) {
    const int64_t block = listed[place];
    num_listed_sinks += block < num_sinks ? 1 : 0;
    if (KeyOf(BitsOf(scores + block)) == key) last = std::max(last, block);
  }
  const int64_t split = last + 1;  // of equal scores the blocks before it are as good
  return kernels.count_scores(scores + num_sinks, split - num_sinks, key) +
             kernels.count_scores(scores + split, num_blocks - split, key + 1) ==
         num_listed - num_listed_sinks;
}

// One pass over the scores: the worst listed block has to be better than the best of the others.
bool AreBest(const BestCall& call, const RankKernels& kernels, int64_t row, IdSet set) {
  const int64_t num_blocks = std::clamp<int64_t>(call.num_candidates[row], 0, call.num_blocks);
  const int64_t num_sinks = std::min(call.num_sinks, num_blocks);
  const int64_t num_listed = call.num_listed[row];
  if (num_listed < 0 || num_listed > std::min(call.num_places, num_blocks)) return false;
  const float* scores = call.scores + row * call.num_blocks;
  const int32_t* listed = call.listed + row * call.num_places;
  set.Clear();
  for (int64_t place = 0; place < num_listed; ++place) {
    const int64_t block = listed[place];
    if (block < 0 || block >= num_blocks || !set.Add(listed[place])) return false;
  }
  for (int32_t sink = 0; sink < num_sinks; ++sink) {
    if (set.Has(sink) != (sink < num_listed)) return false;
  }
  uint32_t worst_in = kNoKey, best_out = 0;
  if (!SplitRow(kernels, scores, num_blocks, num_sinks, set, &worst_in, &best_out)) return false;
  return best_out < worst_in ||
         AreFirstOfTied(kernels, scores, num_blocks, num_sinks, listed, num_listed, worst_in);
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
