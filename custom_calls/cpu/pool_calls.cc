#include "blockcompact/pool_calls.h"

#include <mutex>
#include <shared_mutex>

#include "blockcompact/block_move.h"
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

StatusCode CheckPair(const Pool* from, const Pool* to, const PlainView* plain,
                     const PackedView* packed) {
  if (from == nullptr || to == nullptr) return StatusCode::kUnknownPool;
  if (plain == nullptr || packed == nullptr) return StatusCode::kWrongPoolKind;
  if (plain->shape != packed->shape) return StatusCode::kShapeMismatch;
  if (plain->num_layers() != packed->num_layers()) return StatusCode::kShapeMismatch;
  if (!to->is_writable) return StatusCode::kReadOnlyPool;
  if (Overlap(*from, *to)) return StatusCode::kOverlappingPools;
  return StatusCode::kOk;
}

}  // namespace

Status PoolPack(const PoolRef& plain_ref, PoolRef* packed_ref, const Rows& rows,
                const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> from = FindPool(plain_ref.pool_id);
  const std::shared_ptr<Pool> to = FindPool(packed_ref->pool_id);
  const PlainView* plain = from == nullptr ? nullptr : from->plain();
  const PackedView* packed = to == nullptr ? nullptr : to->packed();
  const StatusCode code = CheckPair(from.get(), to.get(), plain, packed);
  if (code != StatusCode::kOk) return Fail(code);
  const LockedPair lock(*from, *to);
  if (from->generation != plain_ref.ord || to->generation != packed_ref->ord) {
    return Fail(StatusCode::kStaleOrd);
  }
  const Status status = CheckRows(rows, {plain->num_layers(), plain->num_blocks, packed->num_blocks,
                                         plain->shape.block_tokens});
  if (!status.ok()) return status;
  PackRows(*plain, *packed, rows, parallel_for);
  packed_ref->ord = ++to->generation;
  return {};
}

Status PoolUpload(const PoolRef& packed_ref, PoolRef* plain_ref, const Rows& rows,
                  const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> from = FindPool(packed_ref.pool_id);
  const std::shared_ptr<Pool> to = FindPool(plain_ref->pool_id);
  const PackedView* packed = from == nullptr ? nullptr : from->packed();
  const PlainView* plain = to == nullptr ? nullptr : to->plain();
  const StatusCode code = CheckPair(from.get(), to.get(), plain, packed);
  if (code != StatusCode::kOk) return Fail(code);
  const LockedPair lock(*from, *to);
  if (from->generation != packed_ref.ord || to->generation != plain_ref->ord) {
    return Fail(StatusCode::kStaleOrd);
  }
  const Status status = CheckRows(rows, {plain->num_layers(), packed->num_blocks, plain->num_blocks,
                                         plain->shape.block_tokens});
  if (!status.ok()) return status;
  UnpackRows(*packed, *plain, rows, parallel_for);
  plain_ref->ord = ++to->generation;
  return {};
}

Status PoolBlockMove(PoolRef* ref, const Rows& rows, const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> pool = FindPool(ref->pool_id);
  if (pool == nullptr) return Fail(StatusCode::kUnknownPool);
  if (!pool->is_writable) return Fail(StatusCode::kReadOnlyPool);
  const WriteLock lock(pool->mutex);
  if (pool->generation != ref->ord) return Fail(StatusCode::kStaleOrd);
  const auto move = [&](const auto& view) -> Status {
    const Status status = CheckRows(
        rows, {view.num_layers(), view.num_blocks, view.num_blocks, view.shape.block_tokens});
    if (status.ok()) MoveBlocks(BlockSpaceOf(view), rows, parallel_for);
    return status;
  };
  const Status status = pool->plain() != nullptr ? move(*pool->plain()) : move(*pool->packed());
  if (status.ok()) ref->ord = ++pool->generation;
  return status;
}

Status PoolGather(const PoolRef& ref, const PlainView& out, const Rows& rows,
                  const ParallelFor& parallel_for) {
  const std::shared_ptr<Pool> pool = FindPool(ref.pool_id);
  if (pool == nullptr) return Fail(StatusCode::kUnknownPool);
  const PlainView* plain = pool->plain();
  if (plain == nullptr) return Fail(StatusCode::kWrongPoolKind);
  if (plain->shape != out.shape) return Fail(StatusCode::kShapeMismatch);
  const ReadLock lock(pool->mutex);
  if (pool->generation != ref.ord) return Fail(StatusCode::kStaleOrd);
  const Status status =
      CheckRows(rows, {plain->num_layers(), plain->num_blocks, 0, plain->shape.block_tokens});
  if (status.ok()) GatherRows(*plain, out, rows, parallel_for);
  return status;
}

}  // namespace blockcompact
