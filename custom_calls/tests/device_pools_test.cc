// Pools of a device, on an emulated one that does nothing until it is waited for: the bytes, what
// waits for what (UPL-4, OWN-1), and refusals.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "../cpu/device_staging.h"
#include "blockcompact/block_move.h"
#include "blockcompact/emulated_device.h"
#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "check.h"
#include "upload_worker.h"

using namespace blockcompact;      // NOLINT: a test program
using namespace blockcompact_ffi;  // NOLINT: a test program

namespace {

constexpr BlockShape kShape{2, 32, 32, 2};
constexpr int64_t kBlockBytes = 2 * 2 * 32 * 32 * 2;
constexpr int32_t kNumLayers = 3, kNumBlocks = 6;
constexpr int64_t kLayerBytes = kNumBlocks * kBlockBytes;
constexpr PlainStrides kNhd{kBlockBytes / 2, kBlockBytes, 32 * 2, 2 * 32 * 2};
using Bytes = std::vector<uint8_t>;

EmulatedDevice& Device() {
  static auto* device = new EmulatedDevice;
  SetDeviceRuntime(device);
  return *device;
}

std::byte* Data(Bytes& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); }

// `bytes` as `num_layers` layers in one allocation.
PoolMemory MemoryOf(Bytes& bytes, int64_t num_layers) {
  const auto size_bytes = static_cast<int64_t>(bytes.size());
  return {{Data(bytes)}, size_bytes, num_layers, size_bytes / num_layers, true, nullptr};
}

// A pool of the device, an allocation for each layer at no even distance, the n-th skewed by n
// times `skew_bytes`, and a pinned packed pool; and the same on the host, for what the CPU calls
// leave.
struct World {
  EmulatedDevice& device = Device();
  DeviceStream owner = device.MakeStream(0);
  std::vector<Bytes> layers;
  Bytes store = RandomBytes(kNumLayers * kNumBlocks * kBlockBytes, 7);
  Bytes host_layers, host_store = store;
  int64_t plain, packed, host_plain, host_packed;
  uint32_t ord = 0, packed_ord = 0;

  const int64_t skew_bytes;

  explicit World(bool is_pinned = true, int64_t its_skew_bytes = 0) : skew_bytes(its_skew_bytes) {
    std::vector<std::byte*> allocations;
    for (int32_t layer = 0; layer < kNumLayers; ++layer) {
      layers.push_back(RandomBytes(kLayerBytes + layer * skew_bytes, static_cast<uint32_t>(layer)));
    }
    for (int32_t layer = 0; layer < kNumLayers; ++layer) {
      allocations.push_back(reinterpret_cast<std::byte*>(block(layer, 0)));
      device.AddMemory(allocations.back(), kLayerBytes, 0);
    }
    host_layers = pool();
    PoolMemory memory{allocations, kLayerBytes, kNumLayers, 0, true, nullptr};
    memory.stream = owner;
    plain = AddPlainPool(memory, kNumBlocks, kShape, kNhd);
    packed = AddPackedPool(MemoryOf(store, kNumLayers), kNumBlocks, kShape, PackedLayout::kAmx,
                           kBlockBytes);
    if (is_pinned) CHECK(PinPool(packed), "pin");
    host_plain = AddPlainPool(MemoryOf(host_layers, kNumLayers), kNumBlocks, kShape, kNhd);
    host_packed = AddPackedPool(MemoryOf(host_store, kNumLayers), kNumBlocks, kShape,
                                PackedLayout::kAmx, kBlockBytes);
  }
  World(const World&) = delete;
  ~World() {
    DrainUploads();
    for (int64_t pool : {plain, packed, host_plain, host_packed}) CHECK(RemovePool(pool), "close");
    for (int32_t layer = 0; layer < kNumLayers; ++layer) {
      device.RemoveMemory(reinterpret_cast<std::byte*>(block(layer, 0)));
    }
  }

  Bytes pool() {
    Bytes joined;
    for (int32_t layer = 0; layer < kNumLayers; ++layer) {
      joined.insert(joined.end(), block(layer, 0), block(layer, 0) + kLayerBytes);
    }
    return joined;
  }
  uint8_t* block(int32_t layer, int32_t number) {
    return layers[static_cast<size_t>(layer)].data() + layer * skew_bytes + number * kBlockBytes;
  }
  std::shared_ptr<UploadEvent> Start(const Rows& rows) {
    PoolRef ref{plain, ord};
    auto upload = std::make_unique<BegunUpload>();
    const Status status = BeginPoolUpload({packed, packed_ord}, &ref, rows, upload.get());
    CHECK(status.ok(), "start: code %d row %ld", static_cast<int>(status.code), status.row);
    ord = ref.ord;
    return SubmitUpload(std::move(upload), nullptr);
  }
  void UploadOnHost(const Rows& rows) {
    PoolRef ref{host_plain, HostOrd(host_plain)};
    CHECK(PoolUpload({host_packed, HostOrd(host_packed)}, &ref, rows, SerialFor).ok(), "host");
  }
  static uint32_t HostOrd(int64_t pool) { return FindPool(pool)->generation; }
};

struct Columns {
  std::vector<int32_t> layer, from, to, valid;
  Rows rows(bool has_valid = true) const {
    return {static_cast<int64_t>(layer.size()), layer.data(), from.data(), to.data(),
            has_valid ? valid.data() : nullptr};
  }
};

const Columns kUpload{{0, 2, 9, 1, 2}, {5, 0, kHole, 3, 1}, {1, 5, kHole, 0, 2}, {32, 7, 1, 0, 32}};

void TestUploadInStream(int64_t skew_bytes) {
  World world(/*is_pinned=*/true, skew_bytes);
  PoolRef ref{world.plain, 0};
  CHECK(PoolUpload({world.packed, 0}, &ref, kUpload.rows(), SerialFor).ok() && ref.ord == 1, "ok");
  world.UploadOnHost(kUpload.rows());
  CHECK(world.pool() == world.host_layers, "the bytes");
}

// The owner's kernel, enqueued before the upload, still reads what the upload overwrites.
void TestUploadComesAfterTheOwnersReads(bool is_newest_first) {
  World world;
  world.device.RunNewestFirst(is_newest_first);
  world.device.Hold(true);
  Bytes read(kBlockBytes);
  const Bytes before(world.block(0, 1), world.block(0, 1) + kBlockBytes);
  world.device.Enqueue(world.owner,
                       [&] { std::memcpy(read.data(), world.block(0, 1), kBlockBytes); });
  const auto event = world.Start(kUpload.rows());
  world.UploadOnHost(kUpload.rows());
  CHECK(!event->IsDone() && world.pool() != world.host_layers, "moved while held");
  world.device.Hold(false);
  CHECK(event->Wait(std::nullopt) && event->error().empty(), "%s", event->error().c_str());
  CHECK(world.pool() == world.host_layers, "the bytes");
  CHECK(read == before, "the upload overtook a read that was enqueued before it");
}

// The owner's kernel, enqueued after WaitInStream, sees the bytes though the host never waited.
void TestOwnerComesAfterTheUpload(bool is_newest_first) {
  World world;
  world.device.RunNewestFirst(is_newest_first);
  world.device.Hold(true);
  const auto event = world.Start(kUpload.rows());
  CHECK(event->WaitInStream(), "wait in stream");
  Bytes read(kBlockBytes);
  world.device.Enqueue(world.owner,
                       [&] { std::memcpy(read.data(), world.block(0, 1), kBlockBytes); });
  const DeviceEvent after(world.device, world.owner);
  world.device.Hold(false);
  after.Synchronize();
  world.UploadOnHost(kUpload.rows());
  CHECK(std::equal(read.begin(), read.end(), world.host_layers.begin() + kBlockBytes), "bytes");
  CHECK(event->Wait(std::nullopt), "done");
}

// More uploads than there is staging: no slot is filled again before its event.
void TestStagingIsNotReusedEarly() {
  World world;
  world.device.RunNewestFirst(false);
  std::vector<std::shared_ptr<UploadEvent>> events;
  for (int32_t i = 0; i < 40; ++i) {
    const int32_t layer = i % kNumLayers, from = (i * 5 + 1) % kNumBlocks, to = i % kNumBlocks;
    const Columns one{{layer}, {from}, {to}, {}};
    PoolRef ref{world.plain, world.ord};
    auto upload = std::make_unique<BegunUpload>();
    Status status = BeginPoolUpload({world.packed, 0}, &ref, one.rows(false), upload.get());
    CHECK(status.ok(), "upload %d: code %d", i, static_cast<int>(status.code));
    world.ord = ref.ord;
    world.UploadOnHost(one.rows(false));
    upload->open.reset();  // nobody waits for it: only staging can
  }
  const DeviceEvent after(world.device, world.owner);
  world.Start(kUpload.rows())->Wait(std::nullopt);
  world.UploadOnHost(kUpload.rows());
  CHECK(world.pool() == world.host_layers, "columns were overwritten before they were read");
}

void TestStaging() {
  EmulatedDevice& device = Device();
  const DeviceStream stream = device.MakeStream(0);
  DeviceStaging staging(device, 0, 2);
  StagingSlot* first = staging.Take(100, 100);
  StagingSlot* second = staging.Take(100, 1 << 20);
  CHECK(first != second && second->device_bytes >= 1 << 20 && second->pinned_bytes < 1 << 20,
        "slots");
  bool has_run[2] = {false, false};
  for (int i = 0; i < 2; ++i) {
    device.Enqueue(stream, [&has_run, i] { has_run[i] = true; });
    staging.Return(i == 0 ? first : second, std::make_shared<const DeviceEvent>(device, stream));
  }
  CHECK(!has_run[0], "ran though nobody waited");
  CHECK(staging.Take(1, 1) == first && has_run[0] && !has_run[1], "the one used longest ago");
  CHECK(staging.Take(1, 1) == second && has_run[1], "the other");
  staging.Abandon(first);
  CHECK(staging.Take(1, 1) != second, "a slot that is being filled was given out");
}

void TestStagingGrowsByDoubling() {
  DeviceStaging staging(Device(), 0, 1);
  int64_t device_bytes = 0, num_growths = 0;
  for (int64_t num_bytes = 1; num_bytes <= 8 << 20; num_bytes += 4 << 10) {
    StagingSlot* slot = staging.Take(1, num_bytes);
    CHECK(slot->device_bytes >= num_bytes, "too small");
    num_growths += slot->device_bytes != std::exchange(device_bytes, slot->device_bytes) ? 1 : 0;
    staging.Return(slot, nullptr);
  }
  CHECK(num_growths <= 8, "%ld growths from 64 KiB to 8 MiB", num_growths);
}

void TestOpenBlocksAndFailure() {
  World world;
  world.device.Hold(true);
  const auto event = world.Start(kUpload.rows());
  const int32_t layer = 0, open = 1, other = 4;
  const auto move = [&](int32_t from, int32_t to) {
    PoolRef ref{world.plain, world.ord};
    return PoolBlockMove(&ref, {1, &layer, &from, &to, nullptr}, SerialFor).code;
  };
  CHECK(move(open, other) == StatusCode::kOpenTransfer, "reads an open block");
  CHECK(move(other, open) == StatusCode::kOpenTransfer, "writes an open block");
  CHECK(CountOpen(world.packed).num_reads == 1, "the source is free");
  world.device.FailNextWait("the bus is gone");
  world.device.Hold(false);
  CHECK(event->Wait(std::nullopt) && event->error() == "the bus is gone", "%s",
        event->error().c_str());
  CHECK(move(open, other) == StatusCode::kOk, "still open");
}

void TestMoves() {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    World world;
    Columns columns;
    std::vector<std::pair<int32_t, int32_t>> cells;
    for (int32_t layer = 0; layer < kNumLayers; ++layer) {
      for (int32_t block = 0; block < kNumBlocks; ++block) cells.push_back({layer, block});
    }
    std::shuffle(cells.begin(), cells.end(), random);
    cells.resize(random() % (cells.size() + 1));
    for (const auto& [layer, block] : cells) {
      const bool is_hole = random() % 8 == 0;
      columns.layer.push_back(layer);
      columns.from.push_back(is_hole ? kHole : static_cast<int32_t>(random() % kNumBlocks));
      columns.to.push_back(is_hole ? kHole : block);
    }
    const Rows rows = columns.rows(false);
    const bool is_plain = round % 3 != 0;
    const auto run = [&](int64_t pool) {
      PoolRef ref{pool, 0};
      CHECK(PoolBlockMove(&ref, rows, SerialFor).ok(), "move");
    };
    if (is_plain) {
      run(world.plain);
      run(world.host_plain);
      CHECK(world.pool() == world.host_layers, "round %d", round);
      continue;
    }
    Bytes bytes = world.store;  // packed rows of the device
    world.device.AddMemory(Data(bytes), static_cast<int64_t>(bytes.size()), 0);
    PoolMemory memory = MemoryOf(bytes, kNumLayers);
    memory.stream = world.owner;
    const int64_t on_device =
        AddPackedPool(memory, kNumBlocks, kShape, PackedLayout::kAmx, kBlockBytes);
    run(on_device);
    run(world.host_packed);
    CHECK(bytes == world.host_store, "round %d", round);
    CHECK(RemovePool(on_device), "close");
    world.device.RemoveMemory(Data(bytes));
  }
}

void TestPackAndGather() {
  World world;
  const Columns columns{{2, 0, 5, 1}, {0, 5, kHole, 2}, {4, 1, kHole, 0}, {}};
  const auto pack = [&](int64_t plain, int64_t packed) {
    PoolRef ref{packed, 0};
    CHECK(PoolPack({plain, 0}, &ref, columns.rows(false), SerialFor).ok(), "pack");
  };
  pack(world.plain, world.packed);
  pack(world.host_plain, world.host_packed);
  CHECK(world.store == world.host_store, "packed");
  const Rows rows{4, columns.layer.data(), columns.from.data(), nullptr, nullptr};
  const auto gather = [&](int64_t pool) {
    Bytes out = RandomBytes(4 * kBlockBytes, 1);
    CHECK(PoolGather({pool, 0}, {{Data(out)}, 4, kShape, kNhd}, rows, SerialFor).ok(), "gather");
    return out;
  };
  CHECK(gather(world.plain) == gather(world.host_plain), "gathered");
}

template <typename Call>
void CheckRefused(const char* expected, Call call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find(expected) != std::string::npos, "%s", error.what());
    return;
  }
  CHECK(false, "not refused: %s", expected);
}

void TestRefusals() {
  World world(/*is_pinned=*/false);
  PoolRef ref{world.plain, 0};
  const Bytes before = world.pool();
  const auto code = [&] {
    return PoolUpload({world.packed, 0}, &ref, kUpload.rows(), SerialFor).code;
  };
  CHECK(code() == StatusCode::kOtherDevice, "the device cannot read pageable memory");
  PoolRef host{world.host_packed, 0};
  CHECK(PoolPack({world.plain, 0}, &host, kUpload.rows(false), SerialFor).code ==
            StatusCode::kOtherDevice,
        "nor write it");
  CHECK(world.pool() == before && ref.ord == 0, "something moved");
  CHECK(PinPool(world.packed) && code() == StatusCode::kOk, "pinned");
  CheckRefused("pinned already", [&] { PinPool(world.packed); });
  CheckRefused("device's", [&] { PinPool(world.plain); });
  CHECK(FindPool(world.plain) == nullptr, "a call of the CPU found the device's memory");
  PoolMemory memory = MemoryOf(world.layers[0], 1);
  const auto add = [&] { AddPlainPool(memory, kNumBlocks, kShape, kNhd); };
  memory.stream = {1, nullptr};
  CheckRefused("memory of device 0, not of `device` 1", add);
  memory.stream = {0, nullptr};
  memory.allocations = {Data(world.store)};
  CheckRefused("memory of the host", add);
  SetDeviceRuntime(nullptr);
  CheckRefused("BLOCKCOMPACT_CUDA=ON", add);
  SetDeviceRuntime(&world.device);
}

}  // namespace

int main() {
  TestStaging();
  TestStagingGrowsByDoubling();
  for (int64_t skew_bytes : {0, 2, 8}) TestUploadInStream(skew_bytes);
  for (bool is_newest_first : {false, true}) {
    TestUploadComesAfterTheOwnersReads(is_newest_first);
    TestOwnerComesAfterTheUpload(is_newest_first);
  }
  TestStagingIsNotReusedEarly();
  TestOpenBlocksAndFailure();
  TestMoves();
  TestPackAndGather();
  TestRefusals();
  std::printf("ok\n");
  return 0;
}
