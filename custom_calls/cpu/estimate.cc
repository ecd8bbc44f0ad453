#include "blockcompact/estimate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/rank.h"
#include "key_blocks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

float Widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float widened;
  std::memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

uint16_t Narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>(bits >> 16 | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

// What moments meet: the scaled query and half its square.
void WriteFeatures(const EstimateCall& call, const std::byte* query, std::byte* features) {
  const auto put = [&](int64_t place, float value) {
    if (call.type == AttendType::kF32) {
      std::memcpy(features + 4 * place, &value, sizeof(value));
    } else {
      const uint16_t rounded = Narrow(value);
      std::memcpy(features + 2 * place, &rounded, sizeof(rounded));
    }
  };
  for (int64_t d = 0; d < call.head_dim; ++d) {
    float element;
    if (call.type == AttendType::kF32) {
      std::memcpy(&element, query + 4 * d, sizeof(element));
    } else {
      uint16_t narrow;
      std::memcpy(&narrow, query + 2 * d, sizeof(narrow));
      element = Widen(narrow);
    }
    const float scaled = element * call.scale;
    put(d, scaled);
    put(call.head_dim + d, scaled * scaled * 0.5F);
  }
}

int64_t NumCandidates(const EstimateSequence& sequence) { return sequence.moments.num_keys; }

// Working memory of one call: of each sequence a row of logits a query head.
class Estimation {
 public:
  Estimation(const EstimateCall& call, const std::vector<EstimateSequence>& sequences,
             Scratch* scratch)
      : call_(call), sequences_(sequences) {
    for (const EstimateSequence& sequence : sequences) {
      const int64_t num_tail = sequence.exact.num_entries - call.num_sinks;
      stride_ =
          std::max({stride_, sequence.moments.num_entries * ShapeOf(sequence.moments).block_tokens,
                    NumCandidates(sequence) + num_tail});
      exact_stride_ = std::max(exact_stride_, sequence.exact.num_entries);
      chosen_stride_ = std::max(chosen_stride_, sequence.num_chosen);
    }
    stride_ = (stride_ + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
    const int64_t num_rows = static_cast<int64_t>(sequences.size()) * call.num_query_heads;
    row_bytes_ = 2 * call.head_dim * static_cast<int64_t>(call.type);
    const int64_t num_chosen = static_cast<int64_t>(sequences.size()) * chosen_stride_;
    scratch->Reset(
        num_rows * (row_bytes_ + 4 * (stride_ + exact_stride_ + kLanes + 2)) + 4 * num_chosen, 7);
    features_ = scratch->Take<std::byte>(num_rows * row_bytes_);
    logits_ = scratch->Take<float>(num_rows * stride_);
    exact_ = scratch->Take<float>(num_rows * exact_stride_);
    lanes_ = scratch->Take<float>(num_rows * kLanes);
    maxima_ = scratch->Take<float>(num_rows);
    sums_ = scratch->Take<float>(num_rows);
    chosen_ = scratch->Take<int32_t>(num_chosen);
  }

  // Scores the blocks of one sequence, which are checked, by their moments and by their keys.
  void Score(int64_t place) const {
    const EstimateSequence& sequence = sequences_[static_cast<size_t>(place)];
    const int64_t first_row = place * call_.num_query_heads;
    std::byte* features = features_ + first_row * row_bytes_;
    for (int64_t head = 0; head < call_.num_query_heads; ++head) {
      WriteFeatures(call_, sequence.query.row(head, 0), features + head * row_bytes_);
    }
    ScoreCall of_moments = Job(2 * call_.head_dim, BlockReduction::kTokens);
    of_moments.queries = {features, row_bytes_, 0};
    of_moments.scores = logits_ + first_row * stride_;
    of_moments.row_stride = stride_;
    ScoreBlocks(sequence.moments, of_moments, SerialFor);
    ScoreCall of_keys = Job(call_.head_dim, BlockReduction::kLogSumExp);
    of_keys.scale = call_.scale;
    of_keys.queries = sequence.query;
    of_keys.scores = exact_ + first_row * exact_stride_;
    of_keys.row_stride = exact_stride_;
    ScoreBlocks(sequence.exact, of_keys, SerialFor);
  }

  // Chooses the blocks of one sequence, to be written by Write; its first block that is not
  // finite, or kHole.
  int32_t Choose(int64_t place) const {
    const EstimateSequence& sequence = sequences_[static_cast<size_t>(place)];
    const int64_t first_row = place * call_.num_query_heads;
    float* logits = logits_ + first_row * stride_;
    PutExact(sequence, logits, exact_ + first_row * exact_stride_);
    const int64_t num_candidates = NumCandidates(sequence);
    const int64_t num_columns = num_candidates + NumUsedEntries(sequence.exact) - call_.num_sinks;
    // The sum that all masses are divided by would hide where it is.
    const int32_t first_faulty = FirstNonFinite(logits, num_columns);
    if (first_faulty != kHole) return first_faulty;
    Softmax(first_row, num_columns);
    MeanOverHeads(first_row, num_candidates);
    const auto count = static_cast<int32_t>(sequence.num_chosen);
    const auto candidates = static_cast<int32_t>(num_candidates);
    int32_t first_non_finite = kHole;
    RankCall rank;
    rank.scores = logits;
    rank.num_candidates = &candidates;
    rank.count = &count;
    rank.num_rows = 1;
    rank.num_blocks = num_candidates;
    rank.num_sinks = call_.num_sinks;
    rank.capacity = sequence.num_chosen;
    rank.order = RankOrder::kBlock;
    rank.blocks = chosen_ + place * chosen_stride_;
    rank.first_non_finite = &first_non_finite;
    RankRows(rank, SerialFor);
    return first_non_finite;
  }

  // Writes what was chosen for one sequence.
  void Write(int64_t place) const {
    const EstimateSequence& sequence = sequences_[static_cast<size_t>(place)];
    const int32_t* chosen = chosen_ + place * chosen_stride_;
    for (int64_t i = 0; i < sequence.num_chosen; ++i) {
      sequence.chosen[i] = chosen[i];
      sequence.table[i] = sequence.physical_blocks[chosen[i]];
    }
  }

 private:
  ScoreCall Job(int64_t head_dim, BlockReduction reduction) const {
    ScoreCall score;
    score.type = call_.type;
    score.num_query_heads = call_.num_query_heads;
    score.num_queries = 1;
    score.head_dim = head_dim;
    score.reduction = reduction;
    return score;
  }

  // Of any head; a column is a logical block.
  int32_t FirstNonFinite(const float* logits, int64_t num_columns) const {
    int64_t first = num_columns;
    for (int64_t head = 0; head < call_.num_query_heads; ++head) {
      const float* row = logits + head * stride_;
      first = std::find_if_not(row, row + first, [](float logit) { return std::isfinite(logit); }) -
              row;
    }
    return first == num_columns ? kHole : static_cast<int32_t>(first);
  }

  // A block's estimate lacks its number of keys, which the log-sum-exp of its keys has.
  void PutExact(const EstimateSequence& sequence, float* logits, const float* exact) const {
    const float log_tokens = std::log(static_cast<float>(call_.block_tokens));
    const int64_t num_after = NumCandidates(sequence) - call_.num_sinks;
    for (int64_t head = 0; head < call_.num_query_heads; ++head) {
      for (int64_t entry = 0; entry < NumUsedEntries(sequence.exact); ++entry) {
        const int64_t column = entry < call_.num_sinks ? entry : entry + num_after;
        logits[head * stride_ + column] = exact[head * exact_stride_ + entry] - log_tokens;
      }
    }
  }

  void Softmax(int64_t first_row, int64_t num_columns) const {
    const AttendKernels kernels = ChosenAttendKernels(call_.type, PaddedDims(call_.head_dim));
    SoftmaxJob job = {};
    job.scores = logits_ + first_row * stride_;
    job.row_tokens = stride_;
    job.keeps_weights = true;
    job.num_rows = call_.num_query_heads;
    job.end = num_columns;
    job.write_end = (num_columns + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
    job.scale = 1.0F;
    job.maximum = maxima_ + first_row;
    job.lanes = lanes_ + first_row * kLanes;
    std::fill_n(job.maximum, job.num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(job.lanes, job.num_rows * kLanes, 0.0F);
    kernels.softmax(job);
    kernels.sums({job.lanes, kLanes, job.num_rows, sums_ + first_row});
  }

  // Into the row of the first head.
  void MeanOverHeads(int64_t first_row, int64_t num_candidates) const {
    float* mean = logits_ + first_row * stride_;
    for (int64_t head = 0; head < call_.num_query_heads; ++head) {
      const float* weights = mean + head * stride_;
      const float share =
          1.0F / (sums_[first_row + head] * static_cast<float>(call_.num_query_heads));
      for (int64_t block = 0; block < num_candidates; ++block) {
        const float mass = weights[block] * share;
        mean[block] = head == 0 ? mass : mean[block] + mass;
      }
    }
  }

  const EstimateCall& call_;
  const std::vector<EstimateSequence>& sequences_;
  int64_t stride_ = 0;
  int64_t exact_stride_ = 0;
  int64_t chosen_stride_ = 0;
  int64_t row_bytes_ = 0;
  std::byte* features_;  // [row][2 * head_dim]
  float* logits_;        // [row][stride_]
  float* exact_;         // [row][exact_stride_]
  float* lanes_;         // [row][kLanes]
  float* maxima_;
  float* sums_;
  int32_t* chosen_;  // [sequence][chosen_stride_]
};

// Sets the views of all tables, and checks them.
Status Check(const Pool& moments, const Pool& keys, const EstimateCall& call,
             std::vector<EstimateSequence>* sequences) {
  int64_t num_entries[2] = {0, 0};
  for (EstimateSequence& sequence : *sequences) {
    const auto check = [&](const Pool& pool, KeyBlocks* blocks, int64_t* num_before) {
      Status status = CheckOnPool(pool, call.type, blocks);
      if (!status.ok() && status.row >= 0) status.row += *num_before;
      *num_before += blocks->num_entries;
      return status;
    };
    Status status = check(moments, &sequence.moments, &num_entries[0]);
    if (status.ok()) status = check(keys, &sequence.exact, &num_entries[1]);
    if (!status.ok()) return status;
    const BlockShape &summaries = ShapeOf(sequence.moments), &blocks = ShapeOf(sequence.exact);
    if (blocks.head_dim != call.head_dim || summaries.head_dim != 2 * call.head_dim ||
        blocks.block_tokens != call.block_tokens || blocks.num_heads != summaries.num_heads ||
        call.num_query_heads <= 0 || call.num_query_heads % blocks.num_heads != 0) {
      return {StatusCode::kShapeMismatch, -1};
    }
  }
  return {};
}

// A task a sequence: each is short, and so are its parts.
EstimateResult Choose(const EstimateCall& call, const std::vector<EstimateSequence>& sequences,
                      const ParallelFor& parallel_for) {
  thread_local Scratch scratch;
  const Estimation estimation(call, sequences, &scratch);
  const auto num_sequences = static_cast<int64_t>(sequences.size());
  std::vector<int32_t> faulty(sequences.size(), kHole);
  parallel_for(num_sequences, [&](int64_t place) {
    estimation.Score(place);
    faulty[static_cast<size_t>(place)] = estimation.Choose(place);
  });
  EstimateResult result;
  for (int64_t place = num_sequences - 1; place >= 0; --place) {
    const int32_t block = faulty[static_cast<size_t>(place)];
    if (block != kHole) result = {{}, place, block};
  }
  if (result.sequence >= 0) return result;
  for (int64_t place = 0; place < num_sequences; ++place) estimation.Write(place);
  return result;
}

}  // namespace

EstimateResult PoolChooseByEstimate(const PoolRef& moments, const PoolRef& keys,
                                    const EstimateCall& call,
                                    std::vector<EstimateSequence> sequences,
                                    const ParallelFor& parallel_for) {
  EstimateResult result;
  result.status = OnPool(moments, [&](const Pool& of_moments) {
    return OnPool(keys, [&](const Pool& of_keys) {
      const Status status = Check(of_moments, of_keys, call, &sequences);
      if (status.ok()) result = Choose(call, sequences, parallel_for);
      return status;
    });
  });
  return result;
}

}  // namespace blockcompact
