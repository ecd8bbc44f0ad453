// Calls on registered pools: look up, lock, validate, then move. Nothing moves unless all is valid.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "blockcompact/open_transfers.h"
#include "blockcompact/parallel.h"
#include "blockcompact/pool.h"
#include "blockcompact/rows.h"
#include "blockcompact/status.h"
#include "blockcompact/views.h"

namespace blockcompact {

class DeviceCall;

// A pool and the generation the caller believes it has. An accepted write sets the next one.
struct PoolRef {
  int64_t pool_id = 0;
  uint32_t ord = 0;
};

Status PoolPack(const PoolRef& plain, PoolRef* packed, const Rows& rows,
                const ParallelFor& parallel_for);
Status PoolUpload(const PoolRef& packed, PoolRef* plain, const Rows& rows,
                  const ParallelFor& parallel_for);

// An upload that PoolUpload would have run, accepted and not yet run. It keeps its own copy of the
// rows, both pools, and the blocks open until it is destroyed. One to a device is enqueued there
// already: running it is waiting for it.
struct BegunUpload {
  std::shared_ptr<Pool> packed;
  std::shared_ptr<Pool> plain;
  std::vector<int32_t> layer, from_block, to_block, valid_tokens;
  std::unique_ptr<OpenTransfer> open;
  std::shared_ptr<const DeviceCall> enqueued;  // on a device

  void Run(const ParallelFor& parallel_for) const;
};

// Refuses what PoolUpload refuses. Afterwards the plain pool has its next generation; calls that
// use it reach all blocks but those of the upload.
Status BeginPoolUpload(const PoolRef& packed, PoolRef* plain, const Rows& rows,
                       BegunUpload* upload);

Status PoolBlockMove(PoolRef* pool, const Rows& rows, const ParallelFor& parallel_for);

// `out` says where block number = row number lies; its shape must equal the pool's.
Status PoolGather(const PoolRef& plain, const PlainView& out, const Rows& rows,
                  const ParallelFor& parallel_for);

}  // namespace blockcompact
