// One batch of queries: chunks of keys for each KV head, and their merge.
#pragma once

#include <atomic>
#include <cstdint>

#include "attend_tiles.h"
#include "blockcompact/attend.h"
#include "blockcompact/attend_kernels.h"

namespace blockcompact {

// What a query sees: keys [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Queries [first_query, first_query + num_queries) of a call. A row is (query, head of its group):
// rows of one query are neighbours. Buffers belong to the caller.
struct AttendBatch {
  const AttendCall* call = nullptr;
  const KeySequence* sequence = nullptr;
  AttendKernels kernels;
  int64_t num_kv_heads = 0;
  int64_t heads_per_kv = 0;
  int64_t dims_padded = 0;
  int64_t first_query = 0;
  int64_t num_queries = 0;
  int64_t first_chunk = 0;
  int64_t num_chunks = 0;
  int64_t max_chunk_columns = 0;  // columns of block mass that one chunk can touch

  std::byte* queries = nullptr;  // [kv head][row][dims_padded]
  float* maximum = nullptr;      // [kv head][row][chunk], of the scaled scores
  float* sum = nullptr;          // [kv head][row][chunk]
  float* sums = nullptr;         // [kv head][chunk][row][dims_padded]
  float* mass = nullptr;         // [kv head][chunk][row][max_chunk_columns]

  int64_t num_rows() const { return num_queries * heads_per_kv; }
  int64_t element_bytes() const { return static_cast<int64_t>(call->type); }
  KeyRange Seen(int64_t query) const;  // query of the batch
  KeyRange SeenByAny() const { return {Seen(0).begin, Seen(num_queries - 1).end}; }
  KeyRange SeenOfChunk(int64_t chunk) const;
};

// One KV head and one chunk.
struct ChunkPlace {
  int64_t kv_head;
  int64_t chunk;
};

// Copies the rows of all queries, padded.
void LoadQueries(const AttendBatch& batch);

// Softmax and weighted sum over one chunk, for all rows of a KV head. Asks for the first keys and
// values of the place that this thread goes on with; null where it goes on with none.
void AttendChunk(const AttendBatch& batch, const ChunkPlace& place, const ChunkPlace* next_place);

// Writes the results of all rows of a KV head whose chunks are done.
void MergeChunks(const AttendBatch& batch, int64_t kv_head);

}  // namespace blockcompact
