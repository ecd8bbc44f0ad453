#include <algorithm>
#include <cstring>

#include "attend_chunk.h"
#include "scratch.h"

namespace blockcompact {
namespace {

// Without a branch: the compiler makes vector code of it.
uint16_t RoundToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40U : rounded);
}

void WriteRow(const AttendCall& call, const float* values, int64_t head, int64_t query) {
  std::byte* out = call.out.row(head, query);
  if (call.type == AttendType::kF32) {
    std::memcpy(out, values, static_cast<size_t>(call.head_dim) * sizeof(float));
    return;
  }
  constexpr int64_t kAtOnce = 32;
  for (int64_t first = 0; first < call.head_dim; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, call.head_dim - first);
    uint16_t rounded[kAtOnce];
    for (int64_t d = 0; d < count; ++d) rounded[d] = RoundToBf16(values[first + d]);
    std::memcpy(out + 2 * first, rounded, static_cast<size_t>(count) * sizeof(rounded[0]));
  }
}

// `columns`: the first of each chunk.
void WriteMass(const AttendBatch& batch, const float* shares, const int64_t* columns,
               int64_t kv_head, int64_t row, int64_t head, int64_t query) {
  const AttendCall& call = *batch.call;
  float* out = reinterpret_cast<float*>(call.block_mass.row(head, query));
  std::fill_n(out, call.max_blocks, 0.0F);
  for (int64_t chunk = 0; chunk < batch.num_chunks; ++chunk) {
    const int64_t column = columns[chunk];
    const int64_t place = (kv_head * batch.num_chunks + chunk) * batch.num_rows() + row;
    const float* mass = batch.mass + place * batch.max_chunk_columns;
    const int64_t count = std::min(batch.max_chunk_columns, call.max_blocks - column);
    for (int64_t i = 0; i < count; ++i) out[column + i] += shares[chunk] * mass[i];
  }
}

}  // namespace

void MergeChunks(const AttendBatch& batch, int64_t kv_head) {
  const AttendCall& call = *batch.call;
  thread_local Scratch scratch;
  scratch.Reset(batch.dims_padded * 4 + batch.num_chunks * 12, 3);
  float* values = scratch.Take<float>(batch.dims_padded);
  float* shares = scratch.Take<float>(batch.num_chunks);
  int64_t* columns = scratch.Take<int64_t>(batch.num_chunks);
  for (int64_t chunk = 0; chunk < batch.num_chunks; ++chunk) {
    const int64_t key = (batch.first_chunk + chunk) * kChunkTokens;
    columns[chunk] = batch.sequence->RunAt(key, key + 1).column();
  }
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
    if (batch.mass != nullptr) WriteMass(batch, shares, columns, kv_head, row, head, query);
  }
}

}  // namespace blockcompact
