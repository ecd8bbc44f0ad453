#include "blockcompact/open_transfers.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace blockcompact {

// What one transfer does to one pool.
struct OpenTransfer::Side {
  int64_t pool_id;
  Access access;
  int64_t num_blocks;
  std::vector<MemorySpan> spans;
  std::vector<int64_t> cells;  // layer * num_blocks + block, ascending

  bool Holds(int64_t layer, int64_t block) const {
    return std::binary_search(cells.begin(), cells.end(), layer * num_blocks + block);
  }
};

namespace {

using Side = OpenTransfer::Side;

struct Table {
  std::mutex mutex;
  std::vector<const Side*> sides;
  std::atomic<size_t> num_sides{0};  // lets calls pass without the mutex where nothing is open
};

// Never destroyed: transfers may still run while the process ends.
Table& GetTable() {
  static Table* table = new Table;
  return *table;
}

std::unique_ptr<Side> MakeSide(const Pool& pool, Access access, const Rows& rows,
                               const int32_t* blocks) {
  const int64_t num_blocks =
      pool.plain() != nullptr ? pool.plain()->num_blocks : pool.packed()->num_blocks;
  auto side = std::make_unique<Side>(Side{pool.pool_id, access, num_blocks, pool.spans, {}});
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    if (!rows.is_hole(row)) side->cells.push_back(rows.layer_of(row) * num_blocks + blocks[row]);
  }
  std::sort(side->cells.begin(), side->cells.end());
  return side;
}

bool Overlap(const Pool& pool, const Side& side) {
  for (const MemorySpan& x : pool.spans) {
    for (const MemorySpan& y : side.spans) {
      if (x.begin < y.end && y.begin < x.end) return true;
    }
  }
  return false;
}

Status CheckAgainst(const Side& side, const Pool& pool, const BlockColumn& blocks) {
  if (side.cells.empty()) return {};
  if (side.pool_id != pool.pool_id) {
    return Overlap(pool, side) ? Status{StatusCode::kOpenTransfer, -1} : Status{};
  }
  for (int64_t row = 0; row < blocks.num_rows; ++row) {
    if (blocks.block[row] != kHole && side.Holds(blocks.layer_of(row), blocks.block[row])) {
      return {StatusCode::kOpenTransfer, row};
    }
  }
  return {};
}

}  // namespace

Status CheckNotOpen(const Pool& pool, Access access, const BlockColumn& blocks) {
  Table& table = GetTable();
  if (table.num_sides.load(std::memory_order_acquire) == 0) return {};
  const std::lock_guard<std::mutex> lock(table.mutex);
  for (const Side* side : table.sides) {
    if (access == Access::kRead && side->access == Access::kRead) continue;
    const Status status = CheckAgainst(*side, pool, blocks);
    if (!status.ok()) return status;
  }
  return {};
}

OpenTransfer::OpenTransfer(const Pool& from, const Pool& to, const Rows& rows)
    : read_(MakeSide(from, Access::kRead, rows, rows.from_block)),
      write_(MakeSide(to, Access::kWrite, rows, rows.to_block)) {
  Table& table = GetTable();
  const std::lock_guard<std::mutex> lock(table.mutex);
  table.sides.insert(table.sides.end(), {read_.get(), write_.get()});
  table.num_sides.store(table.sides.size(), std::memory_order_release);
}

OpenTransfer::~OpenTransfer() {
  Table& table = GetTable();
  const std::lock_guard<std::mutex> lock(table.mutex);
  for (const Side* side : {read_.get(), write_.get()}) {
    table.sides.erase(std::find(table.sides.begin(), table.sides.end(), side));
  }
  // Released: a call that sees zero also sees the bytes that the transfer has written.
  table.num_sides.store(table.sides.size(), std::memory_order_release);
}

OpenCount CountOpen(int64_t pool_id) {
  OpenCount count;
  Table& table = GetTable();
  const std::lock_guard<std::mutex> lock(table.mutex);
  for (const Side* side : table.sides) {
    if (side->pool_id != pool_id) continue;
    ++(side->access == Access::kRead ? count.num_reads : count.num_writes);
  }
  return count;
}

}  // namespace blockcompact
