// Blocks that transfers beside their caller still read or write, so that other calls keep off them.
#pragma once

#include <cstdint>
#include <memory>

#include "blockcompact/pool.h"
#include "blockcompact/rows.h"
#include "blockcompact/status.h"

namespace blockcompact {

enum class Access { kRead, kWrite };

// Blocks of one pool, a row each; rows of kHole are left out.
struct BlockColumn {
  int64_t num_rows = 0;
  const int32_t* block = nullptr;
  const int32_t* layer = nullptr;  // null: `one_layer` for all rows
  int64_t one_layer = 0;

  int64_t layer_of(int64_t row) const { return layer == nullptr ? one_layer : layer[row]; }
};

// kOpenTransfer and the first row that would read a block being written, or write a block being
// read or written. No row is named where the conflict is with another pool over the same memory.
// Expects checked rows, and the pool's mutex held as the access needs it.
Status CheckNotOpen(const Pool& pool, Access access, const BlockColumn& blocks);

// Keeps the rows' blocks open from construction to destruction: those of `from` for reading, those
// of `to` for writing. Construct it with the mutexes of both pools held as such a call holds them.
class OpenTransfer {
 public:
  OpenTransfer(const Pool& from, const Pool& to, const Rows& rows);
  ~OpenTransfer();
  OpenTransfer(const OpenTransfer&) = delete;
  OpenTransfer& operator=(const OpenTransfer&) = delete;

  struct Side;

 private:
  std::unique_ptr<Side> read_;
  std::unique_ptr<Side> write_;
};

struct OpenCount {
  int64_t num_reads = 0;
  int64_t num_writes = 0;
};

// Open transfers that read from and write to a pool.
OpenCount CountOpen(int64_t pool_id);

}  // namespace blockcompact
