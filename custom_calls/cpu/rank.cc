#include "blockcompact/rank.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "blockcompact/rank_kernels.h"
#include "row_tasks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

constexpr int64_t kAllTied = std::numeric_limits<int64_t>::max();
constexpr int64_t kFewKeys = 64;         // up to here counting who is better beats a radix sort
constexpr int64_t kNarrowingKeys = 128;  // up to here counting again beats copying what is left
constexpr int64_t kSampledKeys = 4096;   // from here a sample pays
constexpr int64_t kSampleKeys = 512;
constexpr int64_t kSampleMargin = 32;  // about three standard deviations at the worst place
constexpr int64_t kDigitBits = 8;
constexpr int64_t kNumBuckets = 1 << kDigitBits;

struct RowScratch {
  uint32_t* keys;              // [num_blocks]
  uint32_t* open;              // [num_blocks]
  int32_t* blocks;             // [capacity of the row]
  uint32_t* chosen;            // likewise
  int32_t* in_buckets_blocks;  // likewise
  uint32_t* in_buckets;        // likewise
  int32_t* rank;               // [kFewKeys]
  uint64_t* pairs[2];          // [capacity of the row]
};

RowScratch TakeScratch(int64_t num_blocks, int64_t max_listed) {
  thread_local Scratch scratch;
  const int64_t keys = num_blocks + kRankSpare, listed = max_listed + kRankSpare;
  scratch.Reset(4 * (2 * keys + 4 * listed + kFewKeys + kRankSpare) + 16 * listed, 9);
  RowScratch taken;
  taken.keys = scratch.Take<uint32_t>(keys);
  taken.open = scratch.Take<uint32_t>(keys);
  taken.blocks = scratch.Take<int32_t>(listed);
  taken.chosen = scratch.Take<uint32_t>(listed);
  taken.in_buckets_blocks = scratch.Take<int32_t>(listed);
  taken.in_buckets = scratch.Take<uint32_t>(listed);
  taken.rank = scratch.Take<int32_t>(kFewKeys + kRankSpare);
  taken.pairs[0] = scratch.Take<uint64_t>(listed);
  taken.pairs[1] = scratch.Take<uint64_t>(listed);
  return taken;
}

// The keys that may be the cut's, and how many keys are better than all of them.
struct OpenKeys {
  const uint32_t* keys;
  int64_t num_keys;
  uint32_t low, high;
  int64_t num_above;
};

// Finds the cut above which `count` keys lie by halving the range of keys, 0 < count - num_above <
// num_keys. Whenever most keys are out of the range, the others are copied together.
KeyCut HalveRange(const RankKernels& kernels, OpenKeys open, int64_t count, uint32_t* copy) {
  count -= open.num_above;
  int64_t num_from_low = open.num_keys, num_above_high = 0;
  while (open.low < open.high) {
    const uint32_t middle = open.high - (open.high - open.low) / 2;
    const int64_t num_from_middle = kernels.count_at_least(open.keys, open.num_keys, middle);
    if (num_from_middle == count) return {middle, kAllTied};
    if (num_from_middle > count) {
      open.low = middle;
      num_from_low = num_from_middle;
    } else {
      open.high = middle - 1;
      num_above_high = num_from_middle;
    }
    const int64_t num_open = num_from_low - num_above_high;
    if (open.num_keys <= kNarrowingKeys || 2 * num_open > open.num_keys) continue;
    kernels.keep_within(open.keys, open.num_keys, open.low, open.high, copy);
    open.keys = copy;
    open.num_keys = num_from_low = num_open;
    count -= num_above_high;
    num_above_high = 0;
  }
  return {open.low, count - num_above_high};
}

// Keeps the keys around where a sample has its cut. False where the sample misled.
bool NarrowBySample(const RankKernels& kernels, int64_t count, OpenKeys* open, uint32_t* copy) {
  uint32_t sample[kSampleKeys];
  const int64_t step = open->num_keys / kSampleKeys;
  for (int64_t i = 0; i < kSampleKeys; ++i) sample[i] = open->keys[i * step];
  const int64_t place = count * kSampleKeys / open->num_keys;
  const auto cut_at = [&](int64_t rank) {
    uint32_t halves[kSampleKeys + kRankSpare];
    const OpenKeys all{sample, kSampleKeys, open->low, open->high, 0};
    return HalveRange(kernels, all, rank, halves).threshold;
  };
  uint32_t low = open->low, high = open->high;
  if (place + kSampleMargin < kSampleKeys) low = cut_at(place + kSampleMargin);
  if (place - kSampleMargin > 0) high = cut_at(place - kSampleMargin);
  const int64_t num_above =
      high == UINT32_MAX ? 0 : kernels.count_at_least(open->keys, open->num_keys, high + 1);
  const int64_t num_within = kernels.keep_within(open->keys, open->num_keys, low, high, copy);
  if (num_above >= count || num_above + num_within <= count) return false;
  *open = {copy, num_within, low, high, num_above};
  return true;
}

KeyCut FindCut(const RankKernels& kernels, const uint32_t* keys, int64_t num_keys, int64_t count,
               const KeyRange& range, uint32_t* copy) {
  if (count == num_keys) return {0, kAllTied};
  OpenKeys open{keys, num_keys, range.smallest, range.largest, 0};
  if (num_keys >= kSampledKeys) NarrowBySample(kernels, count, &open, copy);
  return HalveRange(kernels, open, count, copy);
}

// Sorts by the high half, least significant digit first; equal keys stay in block order.
template <int64_t kNumDigits>
const uint64_t* SortByDigits(uint64_t* const pairs[2], int64_t num_pairs) {
  constexpr uint64_t kValues = 1 << kDigitBits;
  const auto value_of = [](uint64_t pair, int64_t digit) {
    return pair >> (32 + digit * kDigitBits) & (kValues - 1);
  };
  uint32_t places[kNumDigits][kValues] = {};
  for (int64_t i = 0; i < num_pairs; ++i) {
    for (int64_t digit = 0; digit < kNumDigits; ++digit) {
      ++places[digit][value_of(pairs[0][i], digit)];
    }
  }
  uint64_t *from = pairs[0], *to = pairs[1];
  for (int64_t digit = 0; digit < kNumDigits; ++digit) {
    uint32_t place = 0;
    for (uint32_t& value : places[digit]) {
      const uint32_t num_here = value;
      value = place;
      place += num_here;
    }
    for (int64_t i = 0; i < num_pairs; ++i) to[places[digit][value_of(from[i], digit)]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

const uint64_t* SortPairs(uint64_t* const pairs[2], int64_t num_pairs, uint32_t largest) {
  if (largest >> kDigitBits == 0) return SortByDigits<1>(pairs, num_pairs);
  if (largest >> 2 * kDigitBits == 0) return SortByDigits<2>(pairs, num_pairs);
  if (largest >> 3 * kDigitBits == 0) return SortByDigits<3>(pairs, num_pairs);
  return SortByDigits<4>(pairs, num_pairs);
}

// Keys with their blocks, ascending; of equal keys the earlier is better.
struct Chosen {
  const uint32_t* keys;
  const int32_t* blocks;
  int64_t count;
};

void WriteFew(const RankKernels& kernels, const Chosen& few, int32_t* rank, int32_t* out) {
  kernels.rank_few(few.keys, few.count, rank);
  for (int64_t i = 0; i < few.count; ++i) out[rank[i]] = few.blocks[i];
}

// The keys lie within [largest - most, largest].
void WriteMany(const Chosen& many, uint64_t* const pairs[2], uint32_t largest, uint32_t most,
               int32_t* out) {
  for (int64_t i = 0; i < many.count; ++i) {
    const uint64_t fall = largest - many.keys[i];
    pairs[0][i] = fall << 32 | static_cast<uint32_t>(many.blocks[i]);
  }
  const uint64_t* sorted = SortPairs(pairs, many.count, most);
  for (int64_t i = 0; i < many.count; ++i) out[i] = static_cast<int32_t>(sorted[i]);
}

// The chosen keys lie within [smallest, largest]. They are spread over buckets by their highest
// bits; in most buckets there are few.
void WriteByScore(const RankKernels& kernels, const RowScratch& scratch, int64_t num_chosen,
                  uint32_t smallest, uint32_t largest, int32_t* out) {
  if (num_chosen <= kFewKeys) {
    return WriteFew(kernels, {scratch.chosen, scratch.blocks, num_chosen}, scratch.rank, out);
  }
  int shift = 0;
  while ((largest - smallest) >> shift >= kNumBuckets) ++shift;
  uint32_t ends[kNumBuckets + 1] = {};  // first where a bucket starts, at last where it ends
  for (int64_t i = 0; i < num_chosen; ++i) ++ends[((largest - scratch.chosen[i]) >> shift) + 1];
  for (int64_t bucket = 0; bucket < kNumBuckets; ++bucket) ends[bucket + 1] += ends[bucket];
  for (int64_t i = 0; i < num_chosen; ++i) {
    const uint32_t key = scratch.chosen[i];
    const uint32_t place = ends[(largest - key) >> shift]++;
    scratch.in_buckets[place] = key;
    scratch.in_buckets_blocks[place] = scratch.blocks[i];
  }
  uint32_t start = 0;
  for (int64_t bucket = 0; bucket < kNumBuckets; start = ends[bucket++]) {
    const Chosen inside{scratch.in_buckets + start, scratch.in_buckets_blocks + start,
                        ends[bucket] - start};
    if (inside.count == 0) continue;
    if (inside.count <= kFewKeys) {
      WriteFew(kernels, inside, scratch.rank, out + start);
    } else {
      const uint32_t largest_here = largest - (static_cast<uint32_t>(bucket) << shift);
      WriteMany(inside, scratch.pairs, largest_here, (uint32_t{1} << shift) - 1, out + start);
    }
  }
}

// Writes the best blocks of [first, num_candidates); returns how many are listed.
int64_t RankRange(const RankCall& call, const RankKernels& kernels, const RowScratch& scratch,
                  const uint8_t* is_excluded, int64_t first, int64_t num_keys, int64_t count,
                  const KeyRange& range, int32_t* out) {
  if (count == 0) return 0;
  const bool is_by_score = call.order == RankOrder::kScore;
  const uint32_t* keys = scratch.keys + first;
  const KeyCut cut = FindCut(kernels, keys, num_keys, count, range, scratch.open);
  const int64_t num_chosen = kernels.list_chosen(
      keys, num_keys, cut, is_excluded == nullptr ? nullptr : is_excluded + first,
      static_cast<int32_t>(first), scratch.blocks, is_by_score ? scratch.chosen : nullptr);
  if (is_by_score) {
    const uint32_t smallest = std::max(cut.threshold, range.smallest);
    WriteByScore(kernels, scratch, num_chosen, smallest, range.largest, out);
  } else {
    std::copy_n(scratch.blocks, num_chosen, out);
  }
  return num_chosen;
}

void RankRow(const RankCall& call, const RankKernels& kernels, const RowScratch& scratch,
             int64_t row) {
  const int64_t num_blocks = std::clamp<int64_t>(call.num_candidates[row], 0, call.num_blocks);
  const int64_t num_sinks = std::min(call.num_sinks, num_blocks);
  const float* scores = call.scores + row * call.num_blocks;
  const uint8_t* is_excluded =
      call.is_excluded == nullptr ? nullptr : call.is_excluded + row * call.num_blocks;
  int32_t* out = call.blocks + row * call.capacity;
  KeyRange sinks{-1, 0, 0}, others{-1, 0, 0};
  if (num_sinks > 0) sinks = kernels.make_keys(scores, num_sinks, scratch.keys);
  if (num_sinks < num_blocks) {
    others =
        kernels.make_keys(scores + num_sinks, num_blocks - num_sinks, scratch.keys + num_sinks);
  }
  int64_t bad = sinks.first_non_finite;
  if (bad < 0 && others.first_non_finite >= 0) bad = num_sinks + others.first_non_finite;
  call.first_non_finite[row] = bad < 0 ? kHole : static_cast<int32_t>(bad);
  int64_t num_listed = 0;
  if (bad < 0) {
    const int64_t count =
        std::clamp<int64_t>(call.count[row], 0, std::min(num_blocks, call.capacity));
    const int64_t num_first = std::min(num_sinks, count);
    for (int64_t block = 0; block < num_first; ++block) {
      if (is_excluded == nullptr || is_excluded[block] == 0) {
        out[num_listed++] = static_cast<int32_t>(block);
      }
    }
    num_listed += RankRange(call, kernels, scratch, is_excluded, num_sinks, num_blocks - num_sinks,
                            count - num_first, others, out + num_listed);
  }
  std::fill(out + num_listed, out + call.capacity, kHole);
}

}  // namespace

RankKernels SelectRankKernels(Impl impl) {
#if defined(__x86_64__)
  if (impl == Impl::kAvx512) return avx512::RankKernelsOf();
  if (impl == Impl::kAvx2) return avx2::RankKernelsOf();
#else
  static_cast<void>(impl);
#endif
  return scalar::RankKernelsOf();
}

void RankRows(const RankCall& call, const ParallelFor& parallel_for) {
  const RankKernels kernels = SelectRankKernels(ChosenImpl());
  const int64_t max_listed = std::min(call.capacity, call.num_blocks);
  ForRows(call.num_rows, call.num_blocks, parallel_for, [&](int64_t begin, int64_t end) {
    const RowScratch scratch = TakeScratch(call.num_blocks, max_listed);
    for (int64_t row = begin; row < end; ++row) RankRow(call, kernels, scratch, row);
  });
}

}  // namespace blockcompact
