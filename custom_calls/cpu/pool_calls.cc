#include "blockcompact/pool_calls.h"

#include <mutex>
#include <shared_mutex>

#include "blockcompact/block_move.h"
#include "blockcompact/device_calls.h"
#include "blockcompact/open_transfers.h"
#include "blockcompact/pool.h"

namespace blockcompact {
namespace {

using ReadLock = std::shared_lock<std::shared_mutex>;
using WriteLock = std::unique_lock<std::shared_mutex>;

Status Fail(StatusCode code) { return {code, -1}; }

bool Overlap(const Pool& a, const Pool& b) {
  for (const MemorySpan& x : a.spans) {
    for (const MemorySpan& y : b.spans) {
      if (x.begin < y.end && y.begin < x.end) return true;
    }
  }
  return false;
}

// A reader and a writer pool, locked in pool ID order so that two calls cannot wait on each other.
struct LockedPair {
  LockedPair(const Pool& from, Pool& to) {
    if (from.pool_id < to.pool_id) {
      read = ReadLock(from.mutex);
      write = WriteLock(to.mutex);
    } else {
      write = WriteLock(to.mutex);
      read = ReadLock(from.mutex);
    }
  }
  ReadLock read;
  WriteLock write;
};

const PlainView* PlainOf(const Pool* pool) { return pool == nullptr ? nullptr : pool->plain(); }
const PackedView* PackedOf(const Pool* pool) { return pool == nullptr ? nullptr : pool->packed(); }

StatusCode CheckPair(const Pool* from, const Pool* to, const Pool* plain_pool,
                     const Pool* packed_pool) {
  if (from == nullptr || to == nullptr) return StatusCode::kUnknownPool;
  const PlainView* plain = PlainOf(plain_pool);
  const PackedView* packed = PackedOf(packed_pool);
  if (plain == nullptr || packed == nullptr) return StatusCode::kWrongPoolKind;
  if (plain->shape != packed->shape) return StatusCode::kShapeMismatch;
  if (plain->num_layers() != packed->num_layers()) return StatusCode::kShapeMismatch;
  if (!to->is_writable) return StatusCode::kReadOnlyPool;
  if (Overlap(*from, *to)) return StatusCode::kOverlappingPools;
  return CanMeet(*plain_pool, *packed_pool) ? StatusCode::kOk : StatusCode::kOtherDevice;
}

Status CheckFromNotOpen(const Pool& pool, const Rows& rows) {
  return CheckNotOpen(pool, Access::kRead, {rows.num_rows, rows.from_block, rows.layer});
}

Status CheckToNotOpen(const Pool& pool, const Rows& rows) {
  return CheckNotOpen(pool, Access::kWrite, {rows.num_rows, rows.to_block, rows.layer});
}

Status CheckNotOpen(const Pool& from, const Pool& to, const Rows& rows) {
  const Status status = CheckFromNotOpen(from, rows);
  return status.ok() ? CheckToNotOpen(to, rows) : status;
}

// Runs `upload(packed, plain)` under both locks where the call is valid.
template <typename UploadFunction>
Status UploadWith(const PoolRef& packed_ref, PoolRef* plain_ref, const Rows& rows,
                  const UploadFunction& upload) {
  const std::shared_ptr<Pool> from = FindAnyPool(packed_ref.pool_id);
  const std::shared_ptr<Pool> to = FindAnyPool(plain_ref->pool_id);
  const PackedView* packed = PackedOf(from.get());
  const PlainView* plain = PlainOf(to.get());
  const StatusCode code = CheckPair(from.get(), to.get(), to.get(), from.get());
  if (code != StatusCode::kOk) return Fail(code);
  const LockedPair lock(*from, *to);
  if (from->generation != packed_ref.ord || to->generation != plain_ref->ord) {
    return Fail(StatusCode::kStaleOrd);
  }
  Status status = CheckRows(rows, {plain->num_layers(), packed->num_blocks, plain->num_blocks,
                                   plain->shape.block_tokens});
  if (status.ok()) status = CheckNotOpen(*from, *to, rows);
  if (!status.ok()) return status;
  upload(from, to);
  plain_ref->ord = ++to->generation;
  return {};
}

std::vector<int32_t> Copy(const int32_t* column, int64_t num_rows, int32_t missing) {
  if (column == nullptr) return std::vector<int32_t>(static_cast<size_t>(num_rows), missing);
  return {column, column + num_rows};
}

}  // namespace

Status PoolPack(const PoolRef& plain_ref, PoolRef* packed_ref, const Rows& rows,
                const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> from = FindAnyPool(plain_ref.pool_id);
  const std::shared_ptr<Pool> to = FindAnyPool(packed_ref->pool_id);
  const PlainView* plain = PlainOf(from.get());
  const PackedView* packed = PackedOf(to.get());
  const StatusCode code = CheckPair(from.get(), to.get(), from.get(), to.get());
  if (code != StatusCode::kOk) return Fail(code);
  const LockedPair lock(*from, *to);
  if (from->generation != plain_ref.ord || to->generation != packed_ref->ord) {
    return Fail(StatusCode::kStaleOrd);
  }
  Status status = CheckRows(rows, {plain->num_layers(), plain->num_blocks, packed->num_blocks,
                                   plain->shape.block_tokens});
  if (status.ok()) status = CheckNotOpen(*from, *to, rows);
  if (!status.ok()) return status;
  if (from->is_on_device()) {
    DevicePack(*from, *to, rows);
  } else {
    PackRows(*plain, *packed, rows, parallel_for);
  }
  packed_ref->ord = ++to->generation;
  return {};
}

Status PoolUpload(const PoolRef& packed_ref, PoolRef* plain_ref, const Rows& rows,
                  const ParallelFor& parallel_for) {
  return UploadWith(packed_ref, plain_ref, rows, [&](const auto& packed, const auto& plain) {
    if (plain->is_on_device()) {
      EnqueueUnpack(*packed, *plain, rows, DeviceOrder::kInStream).Wait();
    } else {
      UnpackRows(*packed->packed(), *plain->plain(), rows, parallel_for);
    }
  });
}

Status BeginPoolUpload(const PoolRef& packed_ref, PoolRef* plain_ref, const Rows& rows,
                       BegunUpload* upload) {
  return UploadWith(packed_ref, plain_ref, rows, [&](const auto& packed, const auto& plain) {
    auto open = std::make_unique<OpenTransfer>(*packed, *plain, rows);
    if (plain->is_on_device()) {
      auto enqueued = std::make_shared<const DeviceCall>(
          EnqueueUnpack(*packed, *plain, rows, DeviceOrder::kBeside));
      *upload = BegunUpload{packed, plain, {}, {}, {}, {}, std::move(open), std::move(enqueued)};
      return;
    }
    const int32_t block_tokens = static_cast<int32_t>(plain->plain()->shape.block_tokens);
    *upload = BegunUpload{packed,
                          plain,
                          Copy(rows.layer, rows.num_rows, 0),
                          Copy(rows.from_block, rows.num_rows, kHole),
                          Copy(rows.to_block, rows.num_rows, kHole),
                          Copy(rows.valid_tokens, rows.num_rows, block_tokens),
                          std::move(open),
                          nullptr};
  });
}

void BegunUpload::Run(const ParallelFor& parallel_for) const {
  if (enqueued != nullptr) return enqueued->Wait();
  const Rows rows{static_cast<int64_t>(layer.size()), layer.data(), from_block.data(),
                  to_block.data(), valid_tokens.data()};
  UnpackRows(*packed->packed(), *plain->plain(), rows, parallel_for);
}

Status PoolBlockMove(PoolRef* ref, const Rows& rows, const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> pool = FindAnyPool(ref->pool_id);
  if (pool == nullptr) return Fail(StatusCode::kUnknownPool);
  if (!pool->is_writable) return Fail(StatusCode::kReadOnlyPool);
  const WriteLock lock(pool->mutex);
  if (pool->generation != ref->ord) return Fail(StatusCode::kStaleOrd);
  const auto move = [&](const auto& view) -> Status {
    Status status = CheckRows(
        rows, {view.num_layers(), view.num_blocks, view.num_blocks, view.shape.block_tokens});
    if (status.ok()) status = CheckNotOpen(*pool, *pool, rows);
    if (!status.ok()) return status;
    if (pool->is_on_device()) {
      DeviceMove(*pool, rows);
    } else {
      MoveBlocks(BlockSpaceOf(view), rows, parallel_for);
    }
    return {};
  };
  const Status status = pool->plain() != nullptr ? move(*pool->plain()) : move(*pool->packed());
  if (status.ok()) ref->ord = ++pool->generation;
  return status;
}

Status PoolGather(const PoolRef& ref, const PlainView& out, const Rows& rows,
                  const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> pool = FindAnyPool(ref.pool_id);
  if (pool == nullptr) return Fail(StatusCode::kUnknownPool);
  const PlainView* plain = pool->plain();
  if (plain == nullptr) return Fail(StatusCode::kWrongPoolKind);
  if (plain->shape != out.shape) return Fail(StatusCode::kShapeMismatch);
  const ReadLock lock(pool->mutex);
  if (pool->generation != ref.ord) return Fail(StatusCode::kStaleOrd);
  Status status =
      CheckRows(rows, {plain->num_layers(), plain->num_blocks, 0, plain->shape.block_tokens});
  if (status.ok()) status = CheckFromNotOpen(*pool, rows);
  if (!status.ok()) return status;
  if (pool->is_on_device()) {
    DeviceGather(*pool, out, rows);
  } else {
    GatherRows(*plain, out, rows, parallel_for);
  }
  return {};
}

}  // namespace blockcompact
