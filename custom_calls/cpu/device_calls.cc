#include "blockcompact/device_calls.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "device_staging.h"

namespace blockcompact {
namespace {

std::atomic<DeviceRuntime*> current_runtime{nullptr};

// What we keep of each device: a stream of ours and staging.
struct DeviceContext {
  DeviceContext(DeviceRuntime& its_runtime, int32_t device)
      : runtime(its_runtime),
        stream(its_runtime.MakeStream(device)),
        staging(its_runtime, device) {}

  DeviceRuntime& runtime;
  const DeviceStream stream;
  DeviceStaging staging;
};

// Never destroyed: transfers may still run while the process ends.
DeviceContext& ContextOf(int32_t device) {
  static auto* mutex = new std::mutex;
  static auto* contexts =
      new std::map<std::pair<DeviceRuntime*, int32_t>, std::unique_ptr<DeviceContext>>;
  DeviceRuntime* runtime = GetDeviceRuntime();
  if (runtime == nullptr) throw std::runtime_error("the CUDA component is not there");
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& context = (*contexts)[{runtime, device}];
  if (context == nullptr) context = std::make_unique<DeviceContext>(*runtime, device);
  return *context;
}

// The addresses of a view's layers as the device sees them.
struct LayerPlaces {
  std::byte* base = nullptr;
  std::vector<int64_t> offsets;  // from `base`
  int64_t joined_bits = 0;       // of the offsets

  LayerPlaces(DeviceRuntime& runtime, const std::vector<std::byte*>& layer_bases) {
    for (const std::byte* layer_base : layer_bases) {
      std::byte* seen = runtime.PlaceOf(layer_base).device_address;
      if (base == nullptr) base = seen;
      offsets.push_back(seen - base);
      joined_bits |= offsets.back();
    }
  }
};

// The columns of one call on their way to the device, in one staging slot and one copy. Where the
// call is not enqueued as a whole, the slot waits for what was.
class Columns {
 public:
  Columns(DeviceContext& context, const DeviceStream& stream, int64_t num_rows, int64_t num_layers)
      : context_(context), stream_(stream) {
    constexpr int64_t kMaxColumns = 6, kMaxViews = 2;  // of any call
    const int64_t num_bytes = kMaxColumns * Padded(num_rows * int64_t{sizeof(int32_t)}) +
                              kMaxViews * Padded(num_layers * int64_t{sizeof(int64_t)});
    slot_ = context.staging.Take(num_bytes);
  }
  ~Columns() {
    if (slot_ == nullptr) return;
    try {
      Finish();
    } catch (const std::exception&) {
      context_.staging.Abandon(slot_);
    }
  }
  Columns(const Columns&) = delete;
  Columns& operator=(const Columns&) = delete;

  // Where the device will find a copy; null for null.
  template <typename T>
  const T* Put(const T* column, int64_t count) {
    if (column == nullptr) return nullptr;
    const auto num_bytes = count * static_cast<int64_t>(sizeof(T));
    if (used_ + num_bytes > slot_->capacity_bytes) throw std::logic_error("too many columns");
    if (count > 0) std::memcpy(slot_->pinned + used_, column, static_cast<size_t>(num_bytes));
    const auto* seen = reinterpret_cast<const T*>(slot_->on_device + used_);
    used_ += Padded(num_bytes);
    return seen;
  }
  Rows Put(const Rows& rows) {
    return {rows.num_rows, Put(rows.layer, rows.num_rows), Put(rows.from_block, rows.num_rows),
            Put(rows.to_block, rows.num_rows), Put(rows.valid_tokens, rows.num_rows)};
  }
  GridPlain Put(const PlainView& view) {
    const LayerPlaces places(context_.runtime, view.layer_bases);
    return {places.base, places.joined_bits, view.strides,
            Put(places.offsets.data(), view.num_layers())};
  }
  GridPacked Put(const PackedView& view) {
    const LayerPlaces places(context_.runtime, view.layer_bases);
    return {places.base, places.joined_bits, view.block_bytes,
            Put(places.offsets.data(), view.num_layers())};
  }
  void Send() { context_.runtime.Copy(slot_->on_device, slot_->pinned, used_, stream_); }

  // What comes after the call; the slot may be used again after it.
  std::shared_ptr<const DeviceEvent> Finish() {
    auto done = std::make_shared<const DeviceEvent>(context_.runtime, stream_);
    context_.staging.Return(std::exchange(slot_, nullptr), done);
    return done;
  }

 private:
  static int64_t Padded(int64_t num_bytes) { return (num_bytes + 15) / 16 * 16; }

  DeviceContext& context_;
  const DeviceStream stream_;
  StagingSlot* slot_;
  int64_t used_ = 0;
};

// Device memory for one call.
class Scratch {
 public:
  Scratch(DeviceContext& context, int64_t num_bytes)
      : context_(context),
        data(context.runtime.Allocate(context.stream.device, std::max<int64_t>(num_bytes, 1))) {}
  ~Scratch() { context_.runtime.Free(context_.stream.device, data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  DeviceContext& context_;

 public:
  std::byte* const data;
};

GridRows Unchecked(const Rows& rows, int64_t block_tokens) {
  return {rows, {0, 0, 0, block_tokens}, nullptr, nullptr};
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

void SetDeviceRuntime(DeviceRuntime* runtime) { current_runtime = runtime; }
DeviceRuntime* GetDeviceRuntime() { return current_runtime; }

DeviceEvent::DeviceEvent(DeviceRuntime& runtime, const DeviceStream& stream)
    : runtime_(runtime), event_(runtime.MakeEvent(stream.device)) {
  try {
    runtime_.Record(event_, stream);
  } catch (...) {
    runtime_.DestroyEvent(event_);
    throw;
  }
}

DeviceEvent::~DeviceEvent() { runtime_.DestroyEvent(event_); }

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
  // The owner's kernels may still read the blocks that the call writes.
  if (is_beside) DeviceEvent(context.runtime, plain.stream).WaitInStream(stream);
  const PlainView& to = *plain.plain();
  const PackedView& from = *packed.packed();
  Columns columns(context, stream, rows.num_rows, to.num_layers());
  const GridPacked grid_from = columns.Put(from);
  const GridPlain grid_to = columns.Put(to);
  const GridRows grid_rows = Unchecked(columns.Put(rows), to.shape.block_tokens);
  columns.Send();
  context.runtime.Unpack(from.layout, grid_from, grid_to, to.shape, grid_rows, stream);
  return DeviceCall(columns.Finish(), plain.stream);
}

void DevicePack(const Pool& plain, const Pool& packed, const Rows& rows) {
  DeviceContext& context = ContextOf(plain.device());
  const PlainView& from = *plain.plain();
  const PackedView& to = *packed.packed();
  Columns columns(context, plain.stream, rows.num_rows, from.num_layers());
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
  const Scratch scratch(context, num_saved * shape.packed_row_bytes());
  const GridPlain saved = DenseScratch(scratch.data, shape);
  Columns columns(context, pool.stream, rows.num_rows, view.num_layers());
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
  const Scratch scratch(context, num_bytes);
  Columns columns(context, plain.stream, rows.num_rows, from.num_layers());
  const GridPlain grid_from = columns.Put(from);
  const GridRows grid_rows = Unchecked(columns.Put(rows), from.shape.block_tokens);
  columns.Send();
  context.runtime.CopyBlocks(grid_from, {scratch.data, 0, out.strides}, from.shape, grid_rows,
                             plain.stream);
  context.runtime.Copy(out.layer_bases[0], scratch.data, num_bytes, plain.stream);
  columns.Finish()->Synchronize();
}

}  // namespace blockcompact
