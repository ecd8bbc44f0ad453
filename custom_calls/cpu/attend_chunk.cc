#include "attend_chunk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "scratch.h"

namespace blockcompact {
namespace {

constexpr float kNothingSeen = -__builtin_inff();
// Scores are weighed from here on: no finite one is lower, and minus infinity weighs 0.
constexpr float kLowestMaximum = std::numeric_limits<float>::lowest();

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool operator==(KeyRange a, KeyRange b) { return a.begin == b.begin && a.end == b.end; }

KeyRange Intersect(KeyRange a, KeyRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// One KV head and one chunk. Keys count from the start of the sequence.
class ChunkTask {
 public:
  ChunkTask(const AttendBatch& batch, int64_t kv_head, int64_t chunk, Scratch& scratch)
      : batch_(batch),
        kernels_(batch.kernels),
        kv_head_(kv_head),
        chunk_(chunk),
        first_key_((batch.first_chunk + chunk) * kChunkTokens),
        tile_bytes_(kTileTokens * batch.dims_padded * batch.element_bytes()),
        v_tile_bytes_(kValueTokens * batch.dims_padded * batch.element_bytes()),
        scores_(scratch.Take<float>(ScratchRows(batch) * kRowTokens)),
        rounded_(scratch.Take<std::byte>(ScratchRows(batch) * kRowTokens * 2)),
        sums_(scratch.Take<float>(ScratchRows(batch) * batch.dims_padded)),
        maximum_(scratch.Take<float>(batch.num_rows())),
        lanes_(scratch.Take<float>(batch.num_rows() * kLanes)),
        step_mass_(scratch.Take<float>(batch.num_rows() * kStepTokens)),
        tiles_(scratch.Take<std::byte>(2 * kGroupTiles * tile_bytes_)),
        reader_(*batch.sequence, batch.kernels, kv_head, scratch.Take<std::byte>(v_tile_bytes_)) {}

  static constexpr int64_t kNumPieces = 8;  // of scratch

  static int64_t ScratchRows(const AttendBatch& batch) { return batch.num_rows() + kSpareRows; }

  static int64_t ScratchBytes(const AttendBatch& batch) {
    const int64_t tile_bytes = kTileTokens * batch.dims_padded * batch.element_bytes();
    return ScratchRows(batch) * (kRowTokens * 6 + batch.dims_padded * 4) +
           batch.num_rows() * (1 + kLanes + kStepTokens) * 4 +
           (2 * kGroupTiles + kValueTokens / kTileTokens) * tile_bytes;
  }

  void Run(const ChunkPlace* next_place) {
    const KeyRange seen = batch_.SeenOfChunk(chunk_);
    const int64_t num_rows = batch_.num_rows();
    reader_.FindPlaces(first_key_, kChunkTokens, &places_);
    std::fill_n(maximum_, num_rows, kLowestMaximum);
    std::fill_n(lanes_, num_rows * kLanes, 0.0F);
    std::fill_n(sums_, ScratchRows(batch_) * batch_.dims_padded, 0.0F);
    std::fill_n(MassOf(0), num_rows * num_mass(), 0.0F);
    thread_local PrefetchQueue queue;
    queue.Clear();
    queue_ = &queue;
    for (step_ = StepOf(seen.begin); step_ < seen.end; step_ += kStepTokens) {
      PlanAhead(seen, next_place);
      RunStep(Intersect(seen, {step_, step_ + kStepTokens}));
    }
    float* row_sums = step_mass_;
    kernels_.sums({lanes_, kLanes, num_rows, row_sums});
    for (int64_t row = 0; row < num_rows; ++row) {
      batch_.maximum[CellOf(row)] = ScaledMaximum(maximum_[row], row_sums[row]);
      batch_.sum[CellOf(row)] = row_sums[row];
    }
    std::copy_n(sums_, num_rows * batch_.dims_padded,
                batch_.sums + PlaceOf(0) * batch_.dims_padded);
  }

 private:
  static int64_t GroupOf(int64_t key) { return key / kGroupTokens * kGroupTokens; }
  static int64_t StepOf(int64_t key) { return key / kStepTokens * kStepTokens; }

  // The largest score weighs 1, so a sum of 0 has seen nothing. NaN is no maximum, but the sum is
  // NaN where a score is: the merge must not take the chunk for one that has seen nothing.
  float ScaledMaximum(float maximum, float sum) const {
    if (std::isnan(sum)) return sum;
    return sum != 0.0F ? maximum * std::fabs(batch_.call->scale) : kNothingSeen;
  }

  int64_t CellOf(int64_t row) const {  // in [kv head][row][chunk]
    return (kv_head_ * batch_.num_rows() + row) * batch_.num_chunks + chunk_;
  }
  int64_t PlaceOf(int64_t row) const {  // in [kv head][chunk][row]
    return (kv_head_ * batch_.num_chunks + chunk_) * batch_.num_rows() + row;
  }
  bool has_mass() const { return batch_.mass != nullptr; }
  int64_t num_mass() const { return has_mass() ? batch_.max_chunk_columns : 0; }
  float* MassOf(int64_t row) const {
    return has_mass() ? batch_.mass + PlaceOf(row) * num_mass() : nullptr;
  }
  bool is_bf16() const { return batch_.call->type == AttendType::kBf16; }
  std::byte* WeightsOf(int64_t row, int64_t key) const {
    const int64_t place = row * kRowTokens + key - step_;
    return is_bf16() ? rounded_ + 2 * place : reinterpret_cast<std::byte*>(scores_ + place);
  }

  const VTile& VPlaceOf(int64_t key) const { return places_.v[(key - first_key_) / kValueTokens]; }

  // Memory is asked for what the next step reads while this one is worked on, in about equal parts
  // of time.
  void PlanAhead(KeyRange seen, const ChunkPlace* next_place) {
    const int64_t num_before = queue_->num_lines();
    const int64_t next_step = step_ + kStepTokens;
    if (next_step < seen.end) {
      const KeyRange keys = Intersect(seen, {next_step, next_step + kStepTokens});
      reader_.AddTo(queue_, keys.begin, keys.end, /*has_values=*/true);
    } else if (next_place != nullptr) {
      const TileReader reader(*batch_.sequence, kernels_, next_place->kv_head, nullptr);
      const KeyRange keys = batch_.SeenOfChunk(next_place->chunk);
      const int64_t end = std::min(keys.end, StepOf(keys.begin) + kStepTokens);
      reader.AddTo(queue_, keys.begin, end, /*has_values=*/true);
    }
    constexpr int64_t kRowsOfTiles = 24;  // whose softmax takes as long as the products
    const int64_t num_lines = queue_->num_lines() - num_before;
    softmax_lines_ = num_lines * batch_.num_rows() / (batch_.num_rows() + kRowsOfTiles);
    tile_lines_ = (num_lines - softmax_lines_ + 1) / 2;
  }

  void RunStep(KeyRange seen) {
    for (int64_t key = GroupOf(seen.begin); key < seen.end; key += kGroupTokens) {
      ScoreGroup(key, seen.end);
    }
    for (int64_t query = 0; query < batch_.num_queries;) query = SoftmaxQueries(query, seen);
    AddValues(seen);
  }

  void ScoreGroup(int64_t key, int64_t end) {
    const int64_t num_rows = batch_.num_rows();
    ScoreJob job;
    job.queries =
        batch_.queries + kv_head_ * num_rows * batch_.dims_padded * batch_.element_bytes();
    job.num_rows = num_rows;
    job.dims_padded = batch_.dims_padded;
    job.scores = scores_ + key - step_;
    job.ahead = {queue_, tile_lines_ * kGroupTokens / kStepTokens};
    reader_.ReadKeys(places_, key, end, tiles_, &job);
    kernels_.score(job);
  }

  // The queries from `query` on that see the same keys of the step; returns the one after them.
  int64_t SoftmaxQueries(int64_t query, KeyRange step) {
    const KeyRange seen = Intersect(batch_.Seen(query), step);
    int64_t end = query + 1;
    while (end < batch_.num_queries && Intersect(batch_.Seen(end), step) == seen) ++end;
    if (seen.begin >= seen.end) return end;
    const int64_t row = query * batch_.heads_per_kv;
    SoftmaxJob job;
    job.scores = scores_ + row * kRowTokens;
    job.row_tokens = kRowTokens;
    job.weights = is_bf16() ? rounded_ + 2 * row * kRowTokens : nullptr;
    job.keeps_weights = has_mass() || !is_bf16();
    job.num_rows = (end - query) * batch_.heads_per_kv;
    job.begin = seen.begin - step_;
    job.end = seen.end - step_;
    job.write_begin = GroupOf(job.begin);
    job.write_end = RoundUp(job.end, kGroupTokens);
    job.scale = batch_.call->scale;
    job.maximum = maximum_ + row;
    job.lanes = lanes_ + row * kLanes;
    job.sums = sums_ + row * batch_.dims_padded;
    job.num_sums = batch_.dims_padded;
    job.mass = MassOf(row);
    job.num_mass = num_mass();
    job.ahead = {queue_, softmax_lines_ * job.num_rows / batch_.num_rows()};
    kernels_.softmax(job);
    if (has_mass()) AddMass(row, job.num_rows, seen);
    return end;
  }

  // Adds the weights of each block of these keys, for rows that see them all.
  void AddMass(int64_t first_row, int64_t num_rows, KeyRange seen) {
    const KeySequence& sequence = *batch_.sequence;
    const int64_t first_column = sequence.RunAt(first_key_, first_key_ + 1).column();
    TokenRun run = sequence.RunAt(seen.begin, seen.end);
    for (int64_t key = seen.begin; key < seen.end;) {
      const int64_t column = run.column();
      const int64_t max_blocks = batch_.call->max_blocks - column;
      if (max_blocks <= 0) return;
      BlocksJob job = {scores_ + first_row * kRowTokens + key - step_,
                       run.num_tokens,
                       0,
                       step_mass_,
                       num_rows,
                       kRowTokens};
      for (bool is_next = true; is_next;) {
        ++job.num_blocks;
        key += run.num_tokens;
        if (key >= seen.end) break;
        run = sequence.RunAfter(run, key, seen.end);
        is_next = run.num_tokens == job.block_tokens && job.num_blocks < max_blocks;
      }
      kernels_.sums(job);
      const float* sums = step_mass_;
      float* mass = MassOf(first_row) + column - first_column;
      for (int64_t row = 0; row < num_rows; ++row, sums += job.num_blocks, mass += num_mass()) {
        for (int64_t i = 0; i < job.num_blocks; ++i) mass[i] += sums[i];
      }
    }
  }

  // Sums stay in registers for as many groups in a row as lie in place and all queries see.
  void AddValues(KeyRange seen) {
    const KeyRange seen_by_all = {batch_.Seen(batch_.num_queries - 1).begin, batch_.Seen(0).end};
    ValueJob job;
    job.num_rows = batch_.num_rows();
    job.dims_padded = batch_.dims_padded;
    job.sums = sums_;
    for (int64_t key = GroupOf(seen.begin); key < seen.end;) {
      const bool is_whole = seen_by_all.begin <= key && key + kGroupTokens <= seen_by_all.end;
      if (!is_whole) {
        ReadGroup(key, seen.end, &job);
        for (int64_t query = 0; query < batch_.num_queries; ++query) ValueQuery(query, key, job);
        key += kGroupTokens;
        continue;
      }
      job.weights = WeightsOf(0, key);
      job.num_tiles = 0;
      while (key + kGroupTokens <= std::min(seen.end, seen_by_all.end) && AddInPlace(key, &job)) {
        key += kGroupTokens;
      }
      if (job.num_tiles == 0) {
        ReadGroup(key, seen.end, &job);
        key += kGroupTokens;
      }
      job.ahead = {queue_, tile_lines_ * job.num_tiles / kStepVTiles};
      kernels_.value(job);
    }
  }

  // Adds the tiles of a group if they all lie in place.
  bool AddInPlace(int64_t key, ValueJob* job) const {
    for (int64_t i = 0; i < kGroupVTiles; ++i) {
      const VTile& place = VPlaceOf(key + i * kValueTokens);
      if (place.base == nullptr) return false;
      job->v_tiles[job->num_tiles + i] = place;
    }
    job->num_tiles += kGroupVTiles;
    return true;
  }

  void ReadGroup(int64_t key, int64_t end, ValueJob* job) {
    job->num_tiles = std::min(kGroupVTiles, RoundUp(end - key, kValueTokens) / kValueTokens);
    for (int64_t i = 0; i < job->num_tiles; ++i) {
      const int64_t tile_key = key + i * kValueTokens;
      const VTile& place = VPlaceOf(tile_key);
      job->v_tiles[i] =
          place.base != nullptr ? place : reader_.V(tile_key, tiles_ + i * v_tile_bytes_);
      reader_.PrefetchRows(tile_key + kGroupTokens, 1);
      reader_.PrefetchRows(tile_key + kGroupTokens + kTileTokens, 1);
    }
  }

  // A group that not all queries see in full: values of unseen keys, whatever they are, are not
  // multiplied by a weight of zero but taken out.
  void ValueQuery(int64_t query, int64_t key, const ValueJob& group) {
    const KeyRange seen = Intersect(batch_.Seen(query), {key, key + kGroupTokens});
    if (seen.begin >= seen.end) return;
    ValueJob job = group;
    job.ahead = {};
    for (int64_t i = 0; i < job.num_tiles; ++i) {
      const int64_t tile_key = key + i * kValueTokens;
      const bool is_whole = seen.begin <= tile_key && tile_key + kValueTokens <= seen.end;
      if (is_whole) continue;
      job.v_tiles[i] =
          CopySeen(group.v_tiles[i], seen.begin - tile_key, seen.end - tile_key, batch_.dims_padded,
                   batch_.call->type, tiles_ + (kGroupVTiles + i) * v_tile_bytes_);
    }
    const int64_t first_row = query * batch_.heads_per_kv;
    job.num_rows = batch_.heads_per_kv;
    job.weights = WeightsOf(first_row, key);
    job.has_spare_rows = false;
    job.sums = sums_ + first_row * batch_.dims_padded;
    kernels_.value(job);
  }

  const AttendBatch& batch_;
  const AttendKernels& kernels_;
  const int64_t kv_head_;
  const int64_t chunk_;
  const int64_t first_key_;
  const int64_t tile_bytes_;
  const int64_t v_tile_bytes_;
  float* const scores_;       // [row][kRowTokens]
  std::byte* const rounded_;  // [row][kRowTokens] weights in bf16
  float* const sums_;         // [row][dims_padded] weighted values
  float* const maximum_;      // [row]
  float* const lanes_;        // [row][kLanes]
  float* const step_mass_;    // [row][blocks of a step]
  std::byte* const tiles_;    // a group read, a group of V with unseen keys taken out
  const TileReader reader_;
  TilePlaces places_;
  int64_t step_ = 0;  // its first key
  PrefetchQueue* queue_ = nullptr;
  int64_t softmax_lines_ = 0;  // asked for beside the softmax of a step
  int64_t tile_lines_ = 0;     // beside its scores, and as many beside its weighted sums
};

}  // namespace

KeyRange AttendBatch::Seen(int64_t query) const {
  const int64_t end = sequence->num_keys - call->num_queries + first_query + query + 1;
  const int64_t begin = call->window_tokens > 0 ? end - call->window_tokens : 0;
  return {std::max<int64_t>(begin, 0), end};
}

KeyRange AttendBatch::SeenOfChunk(int64_t chunk) const {
  const int64_t first_key = (first_chunk + chunk) * kChunkTokens;
  return Intersect(SeenByAny(), {first_key, first_key + kChunkTokens});
}

void LoadQueries(const AttendBatch& batch) {
  const int64_t row_bytes = batch.dims_padded * batch.element_bytes();
  const int64_t used_bytes = batch.call->head_dim * batch.element_bytes();
  std::byte* row = batch.queries;
  for (int64_t kv_head = 0; kv_head < batch.num_kv_heads; ++kv_head) {
    for (int64_t query = 0; query < batch.num_queries; ++query) {
      for (int64_t i = 0; i < batch.heads_per_kv; ++i, row += row_bytes) {
        const int64_t head = kv_head * batch.heads_per_kv + i;
        const std::byte* from = batch.call->queries.row(head, batch.first_query + query);
        std::memcpy(row, from, static_cast<size_t>(used_bytes));
        std::memset(row + used_bytes, 0, static_cast<size_t>(row_bytes - used_bytes));
      }
    }
  }
}

void AttendChunk(const AttendBatch& batch, const ChunkPlace& place, const ChunkPlace* next_place) {
  thread_local Scratch scratch;
  scratch.Reset(ChunkTask::ScratchBytes(batch), ChunkTask::kNumPieces);
  if (batch.kernels.enter != nullptr) batch.kernels.enter(batch.num_rows());
  ChunkTask(batch, place.kv_head, place.chunk, scratch).Run(next_place);
  if (batch.kernels.leave != nullptr) batch.kernels.leave();
}

}  // namespace blockcompact
