// XLA buffers seen as kernel views, with the static checks that need no data.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"
#include "blockcompact/status.h"
#include "blockcompact/views.h"
#include "xla/ffi/api/ffi.h"

namespace blockcompact_ffi {

namespace ffi = xla::ffi;

using Int32Rows = ffi::Buffer<ffi::S32, 1>;
using StatusResult = ffi::ResultBuffer<ffi::S32, 1>;

// Mirrored by the values of `Layout` in blockcompact_jax/kernels/layouts.py.
enum class PlainOrder : int64_t { kNhd = 2, kHnd = 3 };

struct PlainDims {
  int64_t kv, block, head, token;  // strides in elements
};

// Element strides of dense [block, kv, ...] data in the given order.
PlainDims DensePlainDims(const blockcompact::BlockShape& shape, PlainOrder order);

// Element strides of dense [kv, head, block * token, dim] data.
PlainDims TokenContiguousDims(const blockcompact::BlockShape& shape, int64_t num_blocks);

blockcompact::PlainStrides ToBytes(const PlainDims& dims, int64_t element_bytes);

// `buffer` is [num_blocks, 2, B, H, D] (NHD) or [num_blocks, 2, H, B, D] (HND), with a leading
// layer axis where it has rank 6.
ffi::ErrorOr<blockcompact::PlainView> PlainViewOf(const char* name, const ffi::AnyBuffer& buffer,
                                                  int64_t order);

// `buffer` is [num_blocks, H, 2B, D], with a leading layer axis where it has rank 5. Without that
// axis all `num_layers` layers read the same rows.
ffi::ErrorOr<blockcompact::PackedView> PackedViewOf(const char* name, const ffi::AnyBuffer& buffer,
                                                    int64_t layout, int64_t num_layers);

// `out` as the target of a gather of `num_rows` blocks: [num_rows, 2, ...] in `order`, or
// [2, H, num_rows * B, D] where `is_token_contiguous`.
ffi::ErrorOr<blockcompact::PlainView> GatherTarget(const ffi::AnyBuffer& out,
                                                   const blockcompact::BlockShape& shape,
                                                   int64_t num_rows, PlainOrder order,
                                                   bool is_token_contiguous);

// Fails unless the row arrays have equal lengths and the status has two elements.
ffi::Error CheckRowArrays(std::initializer_list<const Int32Rows*> arrays, StatusResult& status);

// Fails unless `in` and `out` are one buffer: the pool was not donated or not aliased.
ffi::Error CheckInPlace(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out);

void WriteStatus(const blockcompact::Status& status, StatusResult& result);

// Spreads tasks over XLA's own threads; the caller works too, so it never waits for a free thread.
blockcompact::ParallelFor OnThreadPool(ffi::ThreadPool& pool);

}  // namespace blockcompact_ffi
