// Calls on registered pools: look up, lock, validate, then move. Nothing moves unless all is valid.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"
#include "blockcompact/status.h"
#include "blockcompact/views.h"

namespace blockcompact {

// A pool and the generation the caller believes it has. A completed write sets the next one.
struct PoolRef {
  int64_t pool_id = 0;
  uint32_t ord = 0;
};

Status PoolPack(const PoolRef& plain, PoolRef* packed, const Rows& rows,
                const ParallelFor& parallel_for);
Status PoolUpload(const PoolRef& packed, PoolRef* plain, const Rows& rows,
                  const ParallelFor& parallel_for);
Status PoolBlockMove(PoolRef* pool, const Rows& rows, const ParallelFor& parallel_for);

// `out` says where block number = row number lies; its shape must equal the pool's.
Status PoolGather(const PoolRef& plain, const PlainView& out, const Rows& rows,
                  const ParallelFor& parallel_for);

}  // namespace blockcompact
