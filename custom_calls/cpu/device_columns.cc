#include "device_columns.h"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace blockcompact {
namespace {

std::atomic<DeviceRuntime*> current_runtime{nullptr};

int64_t Padded(int64_t num_bytes) { return (num_bytes + 15) / 16 * 16; }

int64_t ColumnsBytes(int64_t num_rows, int64_t num_layers) {
  constexpr int64_t kMaxColumns = 6, kMaxNumbers = 3, kMaxViews = 2;
  const int64_t num_bytes = kMaxColumns * Padded(num_rows * int64_t{sizeof(int32_t)}) +
                            kMaxNumbers * Padded(sizeof(int32_t)) +
                            kMaxViews * Padded(num_layers * int64_t{sizeof(int64_t)});
  return (num_bytes + 255) / 256 * 256;
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

DeviceColumns::DeviceColumns(DeviceContext& context, const DeviceStream& stream, int64_t num_rows,
                             int64_t num_layers, int64_t scratch_bytes)
    : context_(context),
      stream_(stream),
      columns_bytes_(ColumnsBytes(num_rows, num_layers)),
      slot_(context.staging.Take(columns_bytes_, columns_bytes_ + scratch_bytes)) {}

DeviceColumns::~DeviceColumns() {
  if (slot_ == nullptr) return;
  try {
    Finish();
  } catch (const std::exception&) {
    context_.staging.Abandon(slot_);
  }
}

template <typename T>
const T* DeviceColumns::PutBytes(const T* column, int64_t count) {
  if (column == nullptr) return nullptr;
  const auto num_bytes = count * static_cast<int64_t>(sizeof(T));
  if (used_ + num_bytes > columns_bytes_) throw std::logic_error("too many columns");
  if (count > 0) std::memcpy(slot_->pinned + used_, column, static_cast<size_t>(num_bytes));
  const auto* seen = reinterpret_cast<const T*>(slot_->on_device + used_);
  used_ += Padded(num_bytes);
  return seen;
}
template const int32_t* DeviceColumns::PutBytes(const int32_t*, int64_t);
template const int64_t* DeviceColumns::PutBytes(const int64_t*, int64_t);

Rows DeviceColumns::Put(const Rows& rows) {
  return {rows.num_rows, Put(rows.layer, rows.num_rows), Put(rows.from_block, rows.num_rows),
          Put(rows.to_block, rows.num_rows), Put(rows.valid_tokens, rows.num_rows)};
}

GridPlain DeviceColumns::Put(const PlainView& view) {
  const LayerPlaces places(context_.runtime, view.layer_bases);
  return {places.base, places.joined_bits, view.strides,
          Put(places.offsets.data(), view.num_layers())};
}

GridPacked DeviceColumns::Put(const PackedView& view) {
  const LayerPlaces places(context_.runtime, view.layer_bases);
  return {places.base, places.joined_bits, view.block_bytes,
          Put(places.offsets.data(), view.num_layers())};
}

std::shared_ptr<const DeviceEvent> DeviceColumns::Finish() {
  auto done = std::make_shared<const DeviceEvent>(context_.runtime, stream_);
  context_.staging.Return(std::exchange(slot_, nullptr), done);
  return done;
}

}  // namespace blockcompact
