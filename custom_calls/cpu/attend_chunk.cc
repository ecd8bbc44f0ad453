#include "attend_chunk.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "blockcompact/streaming.h"
#include "scratch.h"

namespace blockcompact {
namespace {

constexpr float kNothingSeen = -__builtin_inff();

uint16_t RoundToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

KeyRange Intersect(KeyRange a, KeyRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Blocks in a row that a chunk has the same number of keys of, from `key` on.
struct BlockRun {
  int64_t column;
  int64_t key;
  int64_t num_blocks;
  int64_t block_tokens;

  KeyRange keys() const { return {key, key + num_blocks * block_tokens}; }
};

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
        tiles_(scratch.Take<std::byte>(2 * kGroupTiles * tile_bytes_)),
        runs_(scratch.Take<BlockRun>(batch.max_chunk_columns)),
        reader_(*batch.sequence, batch.kernels, kv_head, scratch.Take<std::byte>(v_tile_bytes_)) {}

  static int64_t ScratchRows(const AttendBatch& batch) { return batch.num_rows() + kSpareRows; }

  static int64_t ScratchBytes(const AttendBatch& batch) {
    const int64_t tile_bytes = kTileTokens * batch.dims_padded * batch.element_bytes();
    return ScratchRows(batch) * (kRowTokens * 6 + batch.dims_padded * 4) +
           (2 * kGroupTiles + kValueTokens / kTileTokens) * tile_bytes +
           batch.max_chunk_columns * static_cast<int64_t>(sizeof(BlockRun));
  }

  void Run() {
    const KeyRange chunk = {first_key_, first_key_ + kChunkTokens};
    const KeyRange seen = Intersect(batch_.SeenByAny(), chunk);
    reader_.FindPlaces(first_key_, kChunkTokens + kGroupTokens, &places_);
    PlanPrefetch(seen);
    for (int64_t key = GroupOf(seen.begin); key < seen.end; key += kGroupTokens) {
      ScoreGroup(key, seen.end);
    }
    if (batch_.mass != nullptr) FindBlocks(seen);
    for (int64_t query = 0; query < batch_.num_queries; ++query) {
      SoftmaxQuery(query, Intersect(batch_.Seen(query), chunk));
    }
    std::fill_n(sums_, ScratchRows(batch_) * batch_.dims_padded, 0.0F);
    AddValues(seen);
    std::copy_n(sums_, batch_.num_rows() * batch_.dims_padded,
                batch_.sums + PlaceOf(0) * batch_.dims_padded);
  }

 private:
  static int64_t GroupOf(int64_t key) { return key / kGroupTokens * kGroupTokens; }

  int64_t CellOf(int64_t row) const {  // in [kv head][row][chunk]
    return (kv_head_ * batch_.num_rows() + row) * batch_.num_chunks + chunk_;
  }
  int64_t PlaceOf(int64_t row) const {  // in [kv head][chunk][row]
    return (kv_head_ * batch_.num_chunks + chunk_) * batch_.num_rows() + row;
  }
  std::byte* WeightsOf(int64_t row, int64_t key) const {
    const int64_t place = row * kRowTokens + key - first_key_;
    return batch_.call->type == AttendType::kBf16 ? rounded_ + 2 * place
                                                  : reinterpret_cast<std::byte*>(scores_ + place);
  }

  const VTile& VPlaceOf(int64_t key) const { return places_.v[(key - first_key_) / kValueTokens]; }

  void ScoreGroup(int64_t key, int64_t end) {
    const int64_t num_rows = batch_.num_rows();
    ScoreJob job;
    job.queries =
        batch_.queries + kv_head_ * num_rows * batch_.dims_padded * batch_.element_bytes();
    job.num_rows = num_rows;
    job.dims_padded = batch_.dims_padded;
    job.scores = scores_ + key - first_key_;
    reader_.ReadKeys(places_, key, end, tiles_, &job);
    kernels_.score(job);
  }

  // Memory would rest beside the softmax: it is asked for a third of the chunk's values. The
  // weighted sums ask for the others while they work, the scores keep memory busy with keys.
  void PlanPrefetch(KeyRange seen) {
    thread_local PrefetchQueue queue;
    queue.Clear();
    prefetch_ = &queue;
    reader_.AddTo(&queue, seen.begin, seen.begin + (seen.end - seen.begin) / 3, 1);
    const int64_t num_tiles = RoundUp(seen.end - GroupOf(seen.begin), kTileTokens) / kTileTokens;
    lines_per_vector_ = queue.num_lines() / (num_tiles * batch_.num_rows()) + 1;
  }

  void SoftmaxQuery(int64_t query, KeyRange seen) {
    for (int64_t row = query * batch_.heads_per_kv; row < (query + 1) * batch_.heads_per_kv;
         ++row) {
      SoftmaxResult result = {kNothingSeen, 0.0F};
      if (seen.begin < seen.end) {
        SoftmaxJob job;
        job.scores = scores_ + row * kRowTokens;
        job.weights =
            batch_.call->type == AttendType::kBf16 ? rounded_ + row * kRowTokens * 2 : nullptr;
        job.begin = seen.begin - first_key_;
        job.end = seen.end - first_key_;
        job.write_begin = GroupOf(job.begin);
        job.write_end = RoundUp(job.end, kGroupTokens);
        job.scale = batch_.call->scale;
        job.prefetch = prefetch_;
        job.lines_per_vector = lines_per_vector_;
        result = kernels_.softmax(job);
      }
      batch_.maximum[CellOf(row)] = result.maximum;
      batch_.sum[CellOf(row)] = result.sum;
      if (batch_.mass != nullptr) SumBlocks(row, seen);
    }
  }

  // The blocks that the chunk touches and that mass is wanted of.
  void FindBlocks(KeyRange seen) {
    num_runs_ = 0;
    for (int64_t key = seen.begin; key < seen.end;) {
      const TokenRun run = batch_.sequence->RunAt(key, seen.end);
      if (run.column() >= batch_.call->max_blocks) return;
      if (num_runs_ > 0 && runs_[num_runs_ - 1].block_tokens == run.num_tokens) {
        ++runs_[num_runs_ - 1].num_blocks;
      } else {
        runs_[num_runs_++] = {run.column(), key, 1, run.num_tokens};
      }
      key += run.num_tokens;
    }
  }

  // Weights of each of these blocks, from the first column of the chunk on.
  void SumBlocks(int64_t row, KeyRange seen) const {
    float* mass = batch_.mass + PlaceOf(row) * batch_.max_chunk_columns;
    std::fill_n(mass, batch_.max_chunk_columns, 0.0F);
    mass -= batch_.sequence->RunAt(first_key_, first_key_ + 1).column();
    const float* weights = scores_ + row * kRowTokens - first_key_;
    for (int64_t i = 0; i < num_runs_; ++i) {
      const BlockRun& run = runs_[i];
      const KeyRange keys = run.keys();
      if (seen.begin <= keys.begin && keys.end <= seen.end) {
        kernels_.sums({weights + run.key, run.block_tokens, run.num_blocks, mass + run.column});
        continue;
      }
      for (int64_t block = 0; block < run.num_blocks; ++block) {
        const int64_t key = run.key + block * run.block_tokens;
        const KeyRange part = Intersect({key, key + run.block_tokens}, seen);
        if (part.begin >= part.end) continue;
        kernels_.sums({weights + part.begin, part.end - part.begin, 1, mass + run.column + block});
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
  std::byte* const tiles_;    // a group read, a group of V with unseen keys taken out
  BlockRun* const runs_;      // [max_chunk_columns]
  const TileReader reader_;
  TilePlaces places_;
  int64_t num_runs_ = 0;
  PrefetchQueue* prefetch_ = nullptr;
  int64_t lines_per_vector_ = 0;  // asked for with 16 weights of a row
};

void WriteRow(const AttendCall& call, const float* values, int64_t head, int64_t query) {
  std::byte* out = call.out.row(head, query);
  if (call.type == AttendType::kF32) {
    std::memcpy(out, values, static_cast<size_t>(call.head_dim) * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < call.head_dim; ++d) {
    const uint16_t rounded = RoundToBf16(values[d]);
    std::memcpy(out + 2 * d, &rounded, sizeof(rounded));
  }
}

void WriteMass(const AttendBatch& batch, const float* shares, int64_t kv_head, int64_t row,
               int64_t head, int64_t query) {
  const AttendCall& call = *batch.call;
  float* out = reinterpret_cast<float*>(call.block_mass.row(head, query));
  std::fill_n(out, call.max_blocks, 0.0F);
  for (int64_t chunk = 0; chunk < batch.num_chunks; ++chunk) {
    const int64_t key = (batch.first_chunk + chunk) * kChunkTokens;
    const int64_t column = batch.sequence->RunAt(key, key + 1).column();
    const int64_t place = (kv_head * batch.num_chunks + chunk) * batch.num_rows() + row;
    const float* mass = batch.mass + place * batch.max_chunk_columns;
    const int64_t count = std::min(batch.max_chunk_columns, call.max_blocks - column);
    for (int64_t i = 0; i < count; ++i) out[column + i] += shares[chunk] * mass[i];
  }
}

}  // namespace

KeyRange AttendBatch::Seen(int64_t query) const {
  const int64_t end = sequence->num_keys - call->num_queries + first_query + query + 1;
  const int64_t begin = call->window_tokens > 0 ? end - call->window_tokens : 0;
  return {std::max<int64_t>(begin, 0), end};
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

void AttendChunk(const AttendBatch& batch, int64_t kv_head, int64_t chunk) {
  thread_local Scratch scratch;
  scratch.Reset(ChunkTask::ScratchBytes(batch), 6);
  if (batch.kernels.enter != nullptr) batch.kernels.enter(batch.num_rows());
  ChunkTask(batch, kv_head, chunk, scratch).Run();
  if (batch.kernels.leave != nullptr) batch.kernels.leave();
}

void MergeChunks(const AttendBatch& batch, int64_t kv_head) {
  const AttendCall& call = *batch.call;
  thread_local Scratch scratch;
  scratch.Reset((batch.dims_padded + batch.num_chunks) * 4, 2);
  float* values = scratch.Take<float>(batch.dims_padded);
  float* shares = scratch.Take<float>(batch.num_chunks);
  for (int64_t row = 0; row < batch.num_rows(); ++row) {
    const int64_t head = kv_head * batch.heads_per_kv + row % batch.heads_per_kv;
    const int64_t query = batch.first_query + row / batch.heads_per_kv;
    const int64_t cell = (kv_head * batch.num_rows() + row) * batch.num_chunks;
    const int64_t place = kv_head * batch.num_chunks * batch.num_rows() + row;
    const float log_sum_exp = batch.kernels.merge(
        {batch.maximum + cell, batch.sum + cell, batch.sums + place * batch.dims_padded,
         batch.num_rows() * batch.dims_padded, batch.num_chunks, batch.dims_padded, values,
         shares});
    WriteRow(call, values, head, query);
    if (call.log_sum_exp != nullptr)
      call.log_sum_exp[head * call.num_queries + query] = log_sum_exp;
    if (batch.mass != nullptr) WriteMass(batch, shares, kv_head, row, head, query);
  }
}

}  // namespace blockcompact
