#include "blockcompact/block_scores.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attend_tiles.h"
#include "blockcompact/attend_kernels.h"
#include "blockcompact/prefetch.h"
#include "key_blocks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

constexpr float kNoKey = -std::numeric_limits<float>::infinity();
constexpr int64_t kBatchRows = 32;    // rows of a KV head that meet a tile while it is at hand
constexpr int64_t kPartTokens = 256;  // scored before they are reduced: at most
constexpr int64_t kScoreRowTokens = kPartTokens + 16;  // no power of two: rows share no cache set
constexpr int64_t kGroupsAhead = 4;  // whose keys are asked for before they are met
static_assert(kPartTokens <= kChunkTokens);

int64_t NumColumns(const KeyBlocks& keys, const ScoreCall& call) {
  const bool is_by_token = call.reduction == BlockReduction::kTokens;
  return keys.num_entries * (is_by_token ? ShapeOf(keys).block_tokens : 1);
}

int64_t RowStride(const KeyBlocks& keys, const ScoreCall& call) {
  return call.row_stride > 0 ? call.row_stride : NumColumns(keys, call);
}

// Of at most kPartTokens scores a row. Each block is a row of a softmax.
void LogSumExps(const AttendKernels& kernels, const BlocksJob& blocks) {
  float maximum[kPartTokens];
  alignas(64) float lanes[kPartTokens * kLanes];
  SoftmaxJob job = {};
  job.num_rows = blocks.num_blocks;
  job.row_tokens = blocks.block_tokens;
  job.end = blocks.block_tokens;
  job.write_end = (job.end + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
  job.scale = 1.0F;
  job.maximum = maximum;
  job.lanes = lanes;
  float* result = blocks.results;
  for (int64_t row = 0; row < blocks.num_rows; ++row) {
    std::fill_n(maximum, job.num_rows, kNoKey);
    std::fill_n(lanes, job.num_rows * kLanes, 0.0F);
    // Nothing is written there: the scores of the next block are read and left out.
    job.scores = const_cast<float*>(blocks.values) + row * blocks.row_tokens;
    kernels.softmax(job);
    kernels.sums({lanes, kLanes, job.num_rows, result});
    for (int64_t block = 0; block < job.num_rows; ++block, ++result) {
      *result = maximum[block] + std::log(*result);
    }
  }
}

// NaN where one is, -inf where both are.
float LogAddExp(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  const float maximum = std::max(a, b);
  if (maximum == kNoKey) return kNoKey;
  return maximum + std::log1p(std::exp(std::min(a, b) - maximum));
}

// Up to kBatchRows rows of one KV head against the entries of one task.
class ScoreTask {
 public:
  ScoreTask(const KeyBlocks& keys, const ScoreCall& call, const AttendKernels& kernels,
            int64_t kv_head, Scratch* scratch)
      : keys_(keys),
        call_(call),
        kernels_(kernels),
        sequence_(SequenceOf(keys)),
        block_tokens_(ShapeOf(keys).block_tokens),
        heads_per_kv_(call.num_query_heads / ShapeOf(keys).num_heads),
        dims_padded_(PaddedDims(call.head_dim)),
        tile_bytes_(kTileTokens * dims_padded_ * static_cast<int64_t>(call.type)),
        kv_head_(kv_head) {
    const int64_t row_bytes = tile_bytes_ / kTileTokens;
    const int64_t num_rows = kBatchRows + kSpareRows;
    scratch->Reset(num_rows * (row_bytes + (kScoreRowTokens + kPartTokens) * 4) +
                       (2 * kGroupTiles + 1) * tile_bytes_,
                   5);
    queries_ = scratch->Take<std::byte>(num_rows * row_bytes);
    scores_ = scratch->Take<float>(num_rows * kScoreRowTokens);
    reduced_ = scratch->Take<float>(num_rows * kPartTokens);
    tiles_ = scratch->Take<std::byte>(2 * kGroupTiles * tile_bytes_);
    rows_ = scratch->Take<std::byte>(tile_bytes_);
  }

  // Rows [first_row, first_row + num_rows) of the KV head: (query, head of its group).
  void Run(int64_t first_row, int64_t num_rows, int64_t first_entry, int64_t last_entry) {
    first_row_ = first_row;
    num_rows_ = num_rows;
    LoadQueries();
    for (int64_t row = 0; row < num_rows; ++row) results_[row] = ScoresOf(row);
    if (kernels_.enter != nullptr) kernels_.enter(num_rows);
    const int64_t end = std::min(keys_.num_keys, last_entry * block_tokens_);
    PlanAhead(first_entry * block_tokens_, end);
    for (int64_t key = first_entry * block_tokens_; key < end;) {
      const int64_t part_end = std::min(end, PartEnd(key));
      ScorePart(key, part_end);
      key = part_end;
    }
    if (kernels_.leave != nullptr) kernels_.leave();
  }

 private:
  int64_t HeadOf(int64_t row) const {
    return kv_head_ * heads_per_kv_ + (first_row_ + row) % heads_per_kv_;
  }
  int64_t QueryOf(int64_t row) const { return (first_row_ + row) / heads_per_kv_; }
  float* ScoresOf(int64_t row) const {
    return call_.scores +
           (HeadOf(row) * call_.num_queries + QueryOf(row)) * RowStride(keys_, call_);
  }

  void LoadQueries() {
    const int64_t row_bytes = tile_bytes_ / kTileTokens;
    const auto used_bytes = static_cast<size_t>(call_.head_dim * static_cast<int64_t>(call_.type));
    for (int64_t row = 0; row < num_rows_; ++row) {
      std::byte* to = queries_ + row * row_bytes;
      std::memset(to, 0, static_cast<size_t>(row_bytes));
      std::memcpy(to, call_.queries.row(HeadOf(row), QueryOf(row)), used_bytes);
    }
  }

  // Whole blocks, or a piece of a block that is longer: where its sums are cut is no matter of the
  // block's place in the table.
  int64_t PartEnd(int64_t key) const {
    if (block_tokens_ <= kPartTokens) return key + kPartTokens / block_tokens_ * block_tokens_;
    return std::min(key / block_tokens_ * block_tokens_ + block_tokens_, key + kPartTokens);
  }

  // Memory is asked for the keys a little before they are met.
  void PlanAhead(int64_t first_key, int64_t end) {
    thread_local PrefetchQueue queue;
    queue.Clear();
    const TileReader reader(sequence_, kernels_, kv_head_, rows_);
    reader.AddTo(&queue, first_key, end, /*has_values=*/false);
    const int64_t num_groups = std::max<int64_t>(1, (end - first_key) / kGroupTokens);
    ahead_ = {&queue, (queue.num_lines() + num_groups - 1) / num_groups};
    queue.Ask(kGroupsAhead * ahead_.num_lines);
  }

  // The tiles of a group are put in order before those of the group before it are multiplied: what
  // was just written is not read at once.
  void ScorePart(int64_t first_key, int64_t end) {
    const TileReader reader(sequence_, kernels_, kv_head_, rows_);
    TilePlaces places;
    reader.FindPlaces(first_key, end - first_key, &places);
    ScoreJob jobs[2];
    const auto read = [&](int64_t key, int64_t i) {
      jobs[i].queries = queries_;
      jobs[i].num_rows = num_rows_;
      jobs[i].dims_padded = dims_padded_;
      jobs[i].scores = scores_ + key - first_key;
      jobs[i].row_tokens = kScoreRowTokens;
      jobs[i].ahead = ahead_;
      reader.ReadKeys(places, key, end, tiles_ + i * kGroupTiles * tile_bytes_, &jobs[i]);
    };
    read(first_key, 0);
    for (int64_t key = first_key, i = 0; key < end; key += kGroupTokens, i = 1 - i) {
      if (key + kGroupTokens < end) read(key + kGroupTokens, 1 - i);
      kernels_.score(jobs[i]);
    }
    if (call_.scale != 1.0F) ScaleRows(end - first_key);
    if (call_.reduction == BlockReduction::kTokens) {
      WriteRows(scores_, kScoreRowTokens, first_key, end - first_key);
    } else {
      ReducePart(first_key, end);
    }
  }

  void ScaleRows(int64_t count) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      float* scores = scores_ + row * kScoreRowTokens;
      for (int64_t i = 0; i < count; ++i) scores[i] *= call_.scale;
    }
  }

  // Of each row `count` values, to the call's columns from `column` on.
  void WriteRows(const float* values, int64_t row_stride, int64_t column, int64_t count) const {
    for (int64_t row = 0; row < num_rows_; ++row) {
      std::copy_n(values + row * row_stride, count, results_[row] + column);
    }
  }

  void ReducePart(int64_t first_key, int64_t end) {
    const int64_t column = first_key / block_tokens_;
    const int64_t count = end - first_key;
    if (block_tokens_ > kPartTokens) {
      ReduceBlocks(0, count, 1);
      for (int64_t row = 0; row < num_rows_; ++row) {
        AddPart(results_[row] + column, reduced_[row], first_key % block_tokens_ == 0);
      }
    } else {
      const int64_t num_whole = count / block_tokens_;
      const int64_t num_left = count % block_tokens_;
      if (num_whole > 0) {
        ReduceBlocks(0, block_tokens_, num_whole);
        WriteRows(reduced_, num_whole, column, num_whole);
      }
      if (num_left > 0) {
        ReduceBlocks(count - num_left, num_left, 1);
        WriteRows(reduced_, 1, column + num_whole, 1);
      }
    }
    if (call_.reduction == BlockReduction::kMean) {
      for (int64_t row = 0; row < num_rows_; ++row) Divide(results_[row] + column, first_key, end);
    }
  }

  // Blocks of all rows from a token of the part on, to reduced_.
  void ReduceBlocks(int64_t first_token, int64_t block_tokens, int64_t num_blocks) const {
    const BlocksJob job = {scores_ + first_token, block_tokens, num_blocks, reduced_, num_rows_,
                           kScoreRowTokens};
    if (call_.reduction == BlockReduction::kLogSumExp) {
      LogSumExps(kernels_, job);
    } else {
      call_.reduction == BlockReduction::kMax ? kernels_.maxima(job) : kernels_.sums(job);
    }
  }

  // A block longer than a part comes in several.
  void AddPart(float* score, float part, bool is_first) const {
    if (is_first) {
      *score = part;
    } else if (call_.reduction == BlockReduction::kLogSumExp) {
      *score = LogAddExp(*score, part);
    } else if (call_.reduction != BlockReduction::kMax) {
      *score += part;
    } else if (std::isnan(part) || part > *score) {
      *score = part;  // a NaN stays: nothing is larger
    }
  }

  // Sums to means, of the blocks whose last key is before `end`.
  void Divide(float* scores, int64_t first_key, int64_t end) const {
    for (int64_t key = first_key / block_tokens_ * block_tokens_; key < end; ++scores) {
      const int64_t block_end = std::min(key + block_tokens_, keys_.num_keys);
      if (block_end <= end) *scores *= 1.0F / static_cast<float>(block_end - key);
      key += block_tokens_;
    }
  }

  const KeyBlocks& keys_;
  const ScoreCall& call_;
  const AttendKernels& kernels_;
  const KeySequence sequence_;
  const int64_t block_tokens_;
  const int64_t heads_per_kv_;
  const int64_t dims_padded_;
  const int64_t tile_bytes_;
  const int64_t kv_head_;
  int64_t first_row_ = 0;
  int64_t num_rows_ = 0;
  std::byte* queries_;          // [row][dims_padded]
  float* scores_;               // [row][kScoreRowTokens]
  float* reduced_;              // [row][blocks of a part]
  float* results_[kBatchRows];  // rows of the call's scores
  std::byte* tiles_;            // two groups
  std::byte* rows_;
  AheadLines ahead_;  // with each group
};

// The status of one sequence of several, whose table begins at entry `first`.
Status AfterEntries(Status status, int64_t first) {
  if (!status.ok() && status.row >= 0) status.row += static_cast<decltype(status.row)>(first);
  return status;
}

Status CheckScore(const ScoreSequence& sequence) {
  const BlockShape& shape = ShapeOf(sequence.keys);
  const ScoreCall& call = sequence.call;
  if (shape.head_dim != call.head_dim || call.num_query_heads <= 0 ||
      call.num_query_heads % shape.num_heads != 0) {
    return {StatusCode::kShapeMismatch, -1};
  }
  return CheckKeys(sequence.keys, call.type);
}

void FillUnused(const KeyBlocks& keys, const ScoreCall& call) {
  const bool is_by_token = call.reduction == BlockReduction::kTokens;
  const int64_t num_used = is_by_token ? keys.num_keys : NumUsedEntries(keys);
  for (int64_t row = 0; row < call.num_query_heads * call.num_queries; ++row) {
    float* scores = call.scores + row * RowStride(keys, call);
    std::fill(scores + num_used, scores + NumColumns(keys, call), kNoKey);
  }
}

int64_t NumTasks(const KeyBlocks& keys) {
  const int64_t entries_per_task = EntriesOfTask(keys);
  const int64_t num_ranges = (NumUsedEntries(keys) + entries_per_task - 1) / entries_per_task;
  return num_ranges * ShapeOf(keys).num_heads;
}

void RunScoreTask(const ScoreSequence& sequence, const AttendKernels& kernels, int64_t task) {
  const auto& [keys, call] = sequence;
  const BlockShape& shape = ShapeOf(keys);
  const int64_t num_rows = call.num_query_heads / shape.num_heads * call.num_queries;
  thread_local Scratch scratch;
  ScoreTask score(keys, call, kernels, task % shape.num_heads, &scratch);
  const int64_t first_entry = task / shape.num_heads * EntriesOfTask(keys);
  const int64_t last_entry = std::min(NumUsedEntries(keys), first_entry + EntriesOfTask(keys));
  for (int64_t row = 0; row < num_rows; row += kBatchRows) {
    score.Run(row, std::min(kBatchRows, num_rows - row), first_entry, last_entry);
  }
}

}  // namespace

Status ScoreSequences(const std::vector<ScoreSequence>& sequences,
                      const ParallelFor& parallel_for) {
  int64_t num_entries = 0;
  std::vector<int64_t> last_tasks;  // of each sequence, running on
  for (const ScoreSequence& sequence : sequences) {
    const Status status = AfterEntries(CheckScore(sequence), num_entries);
    if (!status.ok()) return status;
    num_entries += sequence.keys.num_entries;
    const int64_t num_before = last_tasks.empty() ? 0 : last_tasks.back();
    last_tasks.push_back(num_before + NumTasks(sequence.keys));
  }
  if (sequences.empty()) return {};
  for (const auto& [keys, call] : sequences) FillUnused(keys, call);
  const ScoreCall& call = sequences.front().call;
  const AttendKernels kernels = ChosenAttendKernels(call.type, PaddedDims(call.head_dim));
  parallel_for(last_tasks.back(), [&](int64_t task) {
    const auto found = std::upper_bound(last_tasks.begin(), last_tasks.end(), task);
    const int64_t first = found == last_tasks.begin() ? 0 : *(found - 1);
    RunScoreTask(sequences[static_cast<size_t>(found - last_tasks.begin())], kernels, task - first);
  });
  return {};
}

Status ScoreBlocks(const KeyBlocks& keys, const ScoreCall& call, const ParallelFor& parallel_for) {
  return ScoreSequences({{keys, call}}, parallel_for);
}

Status PoolScoreSequences(const PoolRef& ref, std::vector<ScoreSequence> sequences,
                          const ParallelFor& parallel_for) {
  return OnPool(ref, [&](const Pool& pool) {
    int64_t num_entries = 0;
    for (auto& [keys, call] : sequences) {
      const Status status = AfterEntries(CheckOnPool(pool, call.type, &keys), num_entries);
      if (!status.ok()) return status;
      num_entries += keys.num_entries;
    }
    return ScoreSequences(sequences, parallel_for);
  });
}

Status PoolScoreBlocks(const PoolRef& pool, KeyBlocks keys, const ScoreCall& call,
                       const ParallelFor& parallel_for) {
  return PoolScoreSequences(pool, {{keys, call}}, parallel_for);
}

}  // namespace blockcompact
