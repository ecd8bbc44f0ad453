#include "blockcompact/attend.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "attend_chunk.h"
#include "attend_tiles.h"
#include "blockcompact/attend_kernels.h"
#include "blockcompact/open_transfers.h"
#include "blockcompact/pool.h"
#include "scratch.h"

namespace blockcompact {
namespace {

constexpr int64_t kBatchRows = 48;          // rows of a KV head that are worked on together
constexpr int64_t kPlacesSharedOut = 16;    // chunks of KV heads, at the end of a call
constexpr int64_t kSerialBytes = 96 << 10;  // below, waking a thread costs more than it saves

std::atomic<const AttendKernels*> forced_kernels{nullptr};

Status Fail(StatusCode code) { return {code, -1}; }

// The pools of a call, locked for reading in pool ID order and each once.
struct ReadPools {
  std::shared_ptr<Pool> pools[kMaxAttendSegments];
  std::shared_lock<std::shared_mutex> locks[kMaxAttendSegments];

  void Lock(int64_t num_segments) {
    if (num_segments == 1 || pools[0] == pools[1]) {
      locks[0] = std::shared_lock(pools[0]->mutex);
      return;
    }
    const bool is_ascending = pools[0]->pool_id < pools[1]->pool_id;
    locks[0] = std::shared_lock(pools[is_ascending ? 0 : 1]->mutex);
    locks[1] = std::shared_lock(pools[is_ascending ? 1 : 0]->mutex);
  }
};

StatusCode CheckShape(const AttendCall& call, const KeySequence& sequence) {
  const BlockShape& shape = sequence.segments[0].shape();
  for (int64_t i = 1; i < sequence.num_segments; ++i) {
    if (sequence.segments[i].shape() != shape) return StatusCode::kShapeMismatch;
  }
  const bool has_shape = shape.head_dim == call.head_dim &&
                         shape.element_bytes == static_cast<int64_t>(call.type) &&
                         call.num_query_heads > 0 && call.num_query_heads % shape.num_heads == 0;
  return has_shape ? StatusCode::kOk : StatusCode::kShapeMismatch;
}

// Everything that the pools' locks guard or that depends on values.
Status CheckValues(const AttendCall& call, const ReadPools& read, const KeySequence& sequence) {
  int64_t first_entry = 0;
  for (int64_t i = 0; i < sequence.num_segments; ++i) {
    if (read.pools[i]->generation != call.segments[i].pool.ord) return Fail(StatusCode::kStaleOrd);
  }
  if (call.num_queries < 1 || sequence.num_keys < call.num_queries || call.window_tokens < 0) {
    return Fail(StatusCode::kNumKeysOutOfRange);
  }
  for (int64_t i = 0; i < sequence.num_segments; ++i) {
    const AttendSegment& segment = call.segments[i];
    const KeySegment& keys = sequence.segments[i];
    const int64_t block_tokens = keys.shape().block_tokens;
    const int64_t num_layers =
        keys.plain != nullptr ? keys.plain->num_layers() : keys.packed->num_layers();
    const int64_t num_blocks =
        keys.plain != nullptr ? keys.plain->num_blocks : keys.packed->num_blocks;
    if (segment.layer < 0 || segment.layer >= num_layers) {
      return Fail(StatusCode::kLayerOutOfRange);
    }
    if (segment.num_keys < 0 || segment.num_keys > segment.num_entries * block_tokens) {
      return Fail(StatusCode::kNumKeysOutOfRange);
    }
    for (int64_t entry = 0; entry * block_tokens < segment.num_keys; ++entry) {
      const int64_t block = segment.block_table[entry];
      if (block < 0 || block >= num_blocks) {
        return {StatusCode::kFromBlockOutOfRange, first_entry + entry};
      }
    }
    const int64_t num_used = (segment.num_keys + block_tokens - 1) / block_tokens;
    const Status open =
        CheckNotOpen(*read.pools[i], Access::kRead,
                     {num_used, segment.block_table, /*layer=*/nullptr, segment.layer});
    if (!open.ok()) return {open.code, open.row < 0 ? open.row : first_entry + open.row};
    first_entry += segment.num_entries;
  }
  return {};
}

KeySequence SequenceOf(const AttendCall& call, const ReadPools& read) {
  KeySequence sequence;
  sequence.num_segments = call.num_segments;
  int64_t first_column = 0;
  for (int64_t i = 0; i < call.num_segments; ++i) {
    const AttendSegment& segment = call.segments[i];
    KeySegment& keys = sequence.segments[i];
    keys.plain = read.pools[i]->plain();
    keys.packed = read.pools[i]->packed();
    keys.layer = segment.layer;
    keys.block_table = segment.block_table;
    keys.first_key = sequence.num_keys;
    keys.num_keys = segment.num_keys;
    keys.first_column = first_column;
    const int64_t block_tokens = keys.shape().block_tokens;
    first_column += (segment.num_keys + block_tokens - 1) / block_tokens;
    sequence.num_keys += segment.num_keys;
  }
  return sequence;
}

AttendBatch BatchOf(const AttendCall& call, const KeySequence& sequence, int64_t first_query) {
  const BlockShape& shape = sequence.segments[0].shape();
  AttendBatch batch;
  batch.call = &call;
  batch.sequence = &sequence;
  batch.num_kv_heads = shape.num_heads;
  batch.heads_per_kv = call.num_query_heads / shape.num_heads;
  batch.dims_padded = PaddedDims(call.head_dim);
  batch.kernels = ChosenAttendKernels(call.type, batch.dims_padded);
  batch.first_query = first_query;
  // All keys are read once for each batch, so batches are few and equal.
  const int64_t num_left = call.num_queries - first_query;
  const int64_t max_queries = std::max<int64_t>(kBatchRows / batch.heads_per_kv, 1);
  const int64_t num_batches = (num_left + max_queries - 1) / max_queries;
  batch.num_queries = (num_left + num_batches - 1) / num_batches;
  const KeyRange seen = batch.SeenByAny();
  batch.first_chunk = seen.begin / kChunkTokens;
  batch.num_chunks = (seen.end + kChunkTokens - 1) / kChunkTokens - batch.first_chunk;
  // Each segment may add a block that is not full and one that starts before the chunk.
  batch.max_chunk_columns = kChunkTokens / shape.block_tokens + 2 * sequence.num_segments + 1;
  return batch;
}

void TakeBuffers(AttendBatch* batch, Scratch* scratch) {
  const int64_t num_rows = batch->num_kv_heads * batch->num_rows();
  const int64_t num_cells = num_rows * batch->num_chunks;
  const bool has_mass = batch->call->block_mass.base != nullptr;
  const int64_t num_mass = has_mass ? num_cells * batch->max_chunk_columns : 0;
  const int64_t query_bytes = (num_rows + kSpareRows) * batch->dims_padded * batch->element_bytes();
  scratch->Reset(query_bytes + 4 * (num_cells * (2 + batch->dims_padded) + num_mass), 5);
  batch->queries = scratch->Take<std::byte>(query_bytes);
  batch->maximum = scratch->Take<float>(num_cells);
  batch->sum = scratch->Take<float>(num_cells);
  batch->sums = scratch->Take<float>(num_cells * batch->dims_padded);
  if (has_mass) batch->mass = scratch->Take<float>(num_mass);
}

void RunBatch(AttendBatch batch, const ParallelFor& parallel_for) {
  thread_local Scratch scratch;
  TakeBuffers(&batch, &scratch);
  LoadQueries(batch);
  std::vector<std::atomic<int64_t>> num_left(static_cast<size_t>(batch.num_kv_heads));
  for (std::atomic<int64_t>& left : num_left) left = batch.num_chunks;
  const int64_t num_tasks = batch.num_kv_heads * batch.num_chunks;
  const auto place_of = [&](int64_t number) {
    return ChunkPlace{number % batch.num_kv_heads, number / batch.num_kv_heads};
  };
  // A thread takes its next place before it works on one, and asks for what comes then; the last
  // places are shared out one by one.
  std::atomic<int64_t> next_number{0};
  const auto work = [&](int64_t) {
    for (int64_t number = next_number.fetch_add(1); number < num_tasks;) {
      const bool takes_next = number + kPlacesSharedOut < num_tasks;
      const int64_t after = takes_next ? next_number.fetch_add(1) : num_tasks;
      const ChunkPlace place = place_of(number);
      const ChunkPlace next_place = place_of(after);
      AttendChunk(batch, place, after < num_tasks ? &next_place : nullptr);
      if (--num_left[static_cast<size_t>(place.kv_head)] == 0) MergeChunks(batch, place.kv_head);
      number = takes_next ? after : next_number.fetch_add(1);
    }
  };
  const KeyRange seen = batch.SeenByAny();
  const int64_t num_bytes =
      (seen.end - seen.begin) * batch.num_kv_heads * 2 * batch.dims_padded * batch.element_bytes();
  if (num_bytes <= kSerialBytes) {
    work(0);
  } else {
    parallel_for(num_tasks, work);
  }
}

}  // namespace

Status PoolAttend(const AttendCall& call, const ParallelFor& parallel_for) {
  if (call.num_segments < 1 || call.num_segments > kMaxAttendSegments) {
    return Fail(StatusCode::kShapeMismatch);
  }
  ReadPools read;
  for (int64_t i = 0; i < call.num_segments; ++i) {
    read.pools[i] = FindPool(call.segments[i].pool.pool_id);
    if (read.pools[i] == nullptr) return Fail(StatusCode::kUnknownPool);
  }
  const KeySequence sequence = SequenceOf(call, read);
  const StatusCode shape = CheckShape(call, sequence);
  if (shape != StatusCode::kOk) return Fail(shape);
  read.Lock(call.num_segments);
  const Status status = CheckValues(call, read, sequence);
  if (!status.ok()) return status;
  for (int64_t query = 0; query < call.num_queries;) {
    const AttendBatch batch = BatchOf(call, sequence, query);
    RunBatch(batch, parallel_for);
    query += batch.num_queries;
  }
  return {};
}

void ForceAttendKernels(const AttendKernels* kernels) {
  forced_kernels.store(kernels, std::memory_order_relaxed);
}

AttendKernels ChosenAttendKernels(AttendType type, int64_t dims_padded) {
  const AttendKernels* forced = forced_kernels.load(std::memory_order_relaxed);
  return forced != nullptr ? *forced : SelectAttendKernels(ChosenImpl(), type, dims_padded);
}

AttendKernels SelectAttendKernels(Impl impl, AttendType type, int64_t dims_padded) {
#if defined(__x86_64__)
  if (impl == Impl::kAvx512) {
    const AttendKernels kernels = avx512::AttendKernelsOf(type, avx512::HasPairProducts());
    const bool has_tiles = type == AttendType::kBf16 && amx::IsAvailable(dims_padded);
    return has_tiles ? amx::WithTiles(kernels) : kernels;
  }
  if (impl == Impl::kAvx2 && avx2::HasFma()) return avx2::AttendKernelsOf(type);
#else
  static_cast<void>(impl);
  static_cast<void>(dims_padded);
#endif
  return scalar::AttendKernelsOf(type);
}

std::vector<NamedAttendKernels> AvailableAttendKernels(AttendType type, int64_t dims_padded) {
  std::vector<NamedAttendKernels> all = {{"scalar", scalar::AttendKernelsOf(type)}};
#if defined(__x86_64__)
  for (Impl impl : AvailableImpls()) {
    if (impl == Impl::kAvx2 && avx2::HasFma()) all.push_back({"avx2", avx2::AttendKernelsOf(type)});
    if (impl != Impl::kAvx512) continue;
    all.push_back({"avx512", avx512::AttendKernelsOf(type, false)});
    if (type != AttendType::kBf16) continue;
    if (avx512::HasPairProducts()) {
      all.push_back({"avx512 pairs", avx512::AttendKernelsOf(type, true)});
    }
    if (amx::IsAvailable(dims_padded)) {
      all.push_back({"amx tiles", amx::WithTiles(avx512::AttendKernelsOf(type, false))});
    }
  }
#else
  static_cast<void>(dims_padded);
#endif
  return all;
}

}  // namespace blockcompact
