#include "blockcompact/device_calls.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "device_columns.h"

namespace blockcompact {
namespace {

GridRows Unchecked(const Rows& rows, int64_t block_tokens) {
  return {rows, {0, 0, 0, block_tokens}, nullptr, nullptr};
}

// Whether the pool's owner uses it on the device, on another stream.
bool HasOtherStream(const Pool& pool, const DeviceStream& stream) {
  return pool.is_on_device() && pool.stream.handle != stream.handle;
}

// Work in `stream` comes after what the pool's owner has enqueued so far.
void ComeAfter(const Pool& pool, const DeviceStream& stream, DeviceRuntime& runtime) {
  if (HasOtherStream(pool, stream)) DeviceEvent(runtime, pool.stream).WaitInStream(stream);
}

// A packed row as plain data: its tokens are no tokens, but as many bytes.
PlainView AsPlain(const PackedView& view) {
  const int64_t region = view.shape.region_bytes();
  return {view.layer_bases,
          view.num_blocks,
          view.shape,
          {region, view.block_bytes, 2 * region, view.shape.token_bytes()}};
}

// Blocks one after the other, the same for every layer.
GridPlain DenseScratch(std::byte* base, const BlockShape& shape) {
  const int64_t region = shape.region_bytes();
  return {base, 0, {region, shape.packed_row_bytes(), 2 * region, shape.token_bytes()}};
}

// Rows that move, apart from those that stay where they are and padding. A source that some row
// overwrites is saved first.
struct MoveParts {
  struct Part {
    std::vector<int32_t> layer, from, to;

    void Add(int32_t its_layer, int32_t its_from, int32_t its_to) {
      layer.push_back(its_layer);
      from.push_back(its_from);
      to.push_back(its_to);
    }
    Rows rows() const {
      return {static_cast<int64_t>(layer.size()), layer.data(), from.data(), to.data(), nullptr};
    }
  };
  Part saved, direct;

  explicit MoveParts(const Rows& rows) {
    std::set<std::pair<int64_t, int32_t>> written;
    const auto moves = [&](int64_t row) {
      return !rows.is_hole(row) && rows.from_block[row] != rows.to_block[row];
    };
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      if (moves(row)) written.insert({rows.layer_of(row), rows.to_block[row]});
    }
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      if (!moves(row)) continue;
      const bool is_overwritten = written.count({rows.layer_of(row), rows.from_block[row]}) > 0;
      (is_overwritten ? saved : direct)
          .Add(static_cast<int32_t>(rows.layer_of(row)), rows.from_block[row], rows.to_block[row]);
    }
  }
};

}  // namespace

bool CanMeet(const Pool& plain, const Pool& packed) {
  if (!plain.is_on_device() || packed.is_on_device()) return plain.device() == packed.device();
  DeviceRuntime& runtime = ContextOf(plain.device()).runtime;
  return std::all_of(packed.spans.begin(), packed.spans.end(), [&](const MemorySpan& span) {
    return runtime.PlaceOf(span.begin).device_address != nullptr;
  });
}

DeviceCall EnqueueUnpack(const Pool& packed, const Pool& plain, const Rows& rows,
                         DeviceOrder order) {
  DeviceContext& context = ContextOf(plain.device());
  const bool is_beside = order == DeviceOrder::kBeside;
  const DeviceStream stream = is_beside ? context.stream : plain.stream;
  // The owners' kernels may still read the blocks that the call writes, or write those it reads.
  if (is_beside) DeviceEvent(context.runtime, plain.stream).WaitInStream(stream);
  ComeAfter(packed, stream, context.runtime);
  const PlainView& to = *plain.plain();
  const PackedView& from = *packed.packed();
  DeviceColumns columns(context, stream, rows.num_rows, to.num_layers());
  const GridPacked grid_from = columns.Put(from);
  const GridPlain grid_to = columns.Put(to);
  const GridRows grid_rows = Unchecked(columns.Put(rows), to.shape.block_tokens);
  columns.Send();
  context.runtime.Unpack(from.layout, grid_from, grid_to, to.shape, grid_rows, stream);
  std::vector<DeviceStream> owners{plain.stream};
  if (HasOtherStream(packed, plain.stream)) owners.push_back(packed.stream);
  return DeviceCall(columns.Finish(), std::move(owners));
}

void DevicePack(const Pool& plain, const Pool& packed, const Rows& rows) {
  DeviceContext& context = ContextOf(plain.device());
  const PlainView& from = *plain.plain();
  const PackedView& to = *packed.packed();
  ComeAfter(packed, plain.stream, context.runtime);
  DeviceColumns columns(context, plain.stream, rows.num_rows, from.num_layers());
  const GridPlain grid_from = columns.Put(from);
  const GridPacked grid_to = columns.Put(to);
  const GridRows grid_rows = Unchecked(columns.Put(rows), from.shape.block_tokens);
  columns.Send();
  context.runtime.Pack(to.layout, grid_from, grid_to, to.shape, grid_rows, plain.stream);
  columns.Finish()->Synchronize();
}

void DeviceMove(const Pool& pool, const Rows& rows) {
  const PlainView view = pool.plain() != nullptr ? *pool.plain() : AsPlain(*pool.packed());
  const BlockShape& shape = view.shape;
  const MoveParts parts(rows);
  DeviceContext& context = ContextOf(pool.device());
  const int64_t num_saved = parts.saved.rows().num_rows;
  DeviceColumns columns(context, pool.stream, rows.num_rows, view.num_layers(),
                        num_saved * shape.packed_row_bytes());
  const GridPlain saved = DenseScratch(columns.scratch(), shape);
  const GridPlain blocks = columns.Put(view);
  const Rows saved_rows = columns.Put(parts.saved.rows());
  const Rows direct_rows = columns.Put(parts.direct.rows());
  columns.Send();
  const auto copy = [&](const GridPlain& from, const GridPlain& to, const Rows& call) {
    context.runtime.CopyBlocks(from, to, shape, Unchecked(call, shape.block_tokens), pool.stream);
  };
  copy(blocks, saved, {num_saved, saved_rows.layer, saved_rows.from_block, nullptr, nullptr});
  copy(blocks, blocks, direct_rows);
  copy(saved, blocks, {num_saved, saved_rows.layer, nullptr, saved_rows.to_block, nullptr});
  columns.Finish()->Synchronize();
}

void DeviceGather(const Pool& plain, const PlainView& out, const Rows& rows) {
  DeviceContext& context = ContextOf(plain.device());
  const PlainView& from = *plain.plain();
  const int64_t num_bytes = rows.num_rows * from.shape.packed_row_bytes();
  DeviceColumns columns(context, plain.stream, rows.num_rows, from.num_layers(), num_bytes);
  const GridPlain grid_from = columns.Put(from);
  const GridRows grid_rows = Unchecked(columns.Put(rows), from.shape.block_tokens);
  columns.Send();
  context.runtime.CopyBlocks(grid_from, {columns.scratch(), 0, out.strides}, from.shape, grid_rows,
                             plain.stream);
  context.runtime.Copy(out.layer_bases[0], columns.scratch(), num_bytes, plain.stream);
  columns.Finish()->Synchronize();
}

}  // namespace blockcompact
