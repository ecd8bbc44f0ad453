// Two pools of a device whose owners work on streams of their own, on an emulated device that lets
// streams overtake each other where nothing forbids it: what waits for what (UPL-4, OWN-1).
#include <cstring>
#include <vector>

#include "blockcompact/block_move.h"
#include "blockcompact/device_calls.h"
#include "blockcompact/emulated_device.h"
#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

constexpr BlockShape kShape{1, 32, 32, 2};
constexpr int64_t kBlockBytes = 2 * 32 * 32 * 2;
constexpr PlainStrides kHnd{kBlockBytes / 2, kBlockBytes, 32 * 32 * 2, 32 * 2};
constexpr int32_t kLayer = 0, kFrom = 1, kTo = 2, kNumBlocks = 4;
constexpr Rows kRows{1, &kLayer, &kFrom, &kTo, nullptr};
using Bytes = std::vector<uint8_t>;

// Never destroyed: what is kept of a device outlives the pools.
EmulatedDevice& Device() {
  static auto* device = new EmulatedDevice;
  SetDeviceRuntime(device);
  return *device;
}

// Which streams run ahead of the others.
struct Order {
  bool is_packed_newer;
  bool is_newest_first;
};

struct World {
  EmulatedDevice& device = Device();
  DeviceStream plain_stream, packed_stream;
  Bytes plain_bytes = RandomBytes(kNumBlocks * kBlockBytes, 1);
  Bytes packed_bytes = RandomBytes(kNumBlocks * kBlockBytes, 2);
  int64_t plain, packed;

  explicit World(const Order& order) {
    device.RunNewestFirst(order.is_newest_first);
    const DeviceStream older = device.MakeStream(0), newer = device.MakeStream(0);
    plain_stream = order.is_packed_newer ? older : newer;
    packed_stream = order.is_packed_newer ? newer : older;
    plain = AddPlainPool(MemoryOf(plain_bytes, plain_stream), kNumBlocks, kShape, kHnd);
    packed = AddPackedPool(MemoryOf(packed_bytes, packed_stream), kNumBlocks, kShape,
                           PackedLayout::kVec, kBlockBytes);
  }
  World(const World&) = delete;
  ~World() {
    device.RunAll();
    CHECK(RemovePool(plain) && RemovePool(packed), "close");
    for (Bytes* bytes : {&plain_bytes, &packed_bytes}) device.RemoveMemory(Begin(*bytes));
  }

  static std::byte* Begin(Bytes& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); }
  PoolMemory MemoryOf(Bytes& bytes, const DeviceStream& stream) {
    std::byte* begin = Begin(bytes);
    const auto size_bytes = static_cast<int64_t>(bytes.size());
    device.AddMemory(begin, size_bytes, 0);
    PoolMemory memory{{begin}, size_bytes, 1, size_bytes, true, nullptr};
    memory.stream = stream;
    return memory;
  }
  // What an owner's kernel does to one block.
  void EnqueueCopy(Bytes& to, int32_t to_block, const Bytes& from, int32_t from_block,
                   const DeviceStream& stream) {
    device.Enqueue(stream, [&to, to_block, &from, from_block] {
      std::memcpy(to.data() + to_block * kBlockBytes, from.data() + from_block * kBlockBytes,
                  kBlockBytes);
    });
  }
};

Bytes BlockOf(const Bytes& bytes, int32_t block) {
  return {bytes.begin() + block * kBlockBytes, bytes.begin() + (block + 1) * kBlockBytes};
}

// `kVec` keeps V as it lies: the second half of a block.
Bytes ValuesOf(const Bytes& block) { return {block.begin() + kBlockBytes / 2, block.end()}; }

void TestPackComesAfterTheOwnersReads(const Order& order) {
  World world(order);
  const Bytes before = BlockOf(world.packed_bytes, kTo);
  Bytes read(kBlockBytes);
  world.EnqueueCopy(read, 0, world.packed_bytes, kTo, world.packed_stream);
  PoolRef ref{world.packed, 0};
  CHECK(PoolPack({world.plain, 0}, &ref, kRows, SerialFor).ok(), "pack");
  CHECK(BlockOf(world.packed_bytes, kTo) != before, "nothing was packed");
  world.device.RunAll();
  CHECK(read == before, "the pack overtook a read that was enqueued before it");
}

void CheckUploaded(const World& world, const Bytes& written) {
  CHECK(ValuesOf(BlockOf(world.plain_bytes, kTo)) == ValuesOf(written),
        "the upload read what was not there in the order of the calls");
}

void TestUploadComesAfterTheOwnersWrites(const Order& order) {
  World world(order);
  const Bytes written = RandomBytes(kBlockBytes, 3);
  world.EnqueueCopy(world.packed_bytes, kFrom, written, 0, world.packed_stream);
  PoolRef ref{world.plain, 0};
  CHECK(PoolUpload({world.packed, 0}, &ref, kRows, SerialFor).ok(), "upload");
  CheckUploaded(world, written);
}

void TestUploadBesideComesAfterTheOwnersWrites(const Order& order) {
  World world(order);
  const Bytes written = RandomBytes(kBlockBytes, 3);
  world.EnqueueCopy(world.packed_bytes, kFrom, written, 0, world.packed_stream);
  PoolRef ref{world.plain, 0};
  BegunUpload upload;
  CHECK(BeginPoolUpload({world.packed, 0}, &ref, kRows, &upload).ok(), "begin");
  upload.enqueued->Wait();
  CheckUploaded(world, written);
}

// After WaitInStream the owner of the packed pool may write the blocks that the upload reads.
void TestOwnerComesAfterTheUploadBeside(const Order& order) {
  World world(order);
  const Bytes before = BlockOf(world.packed_bytes, kFrom), after = RandomBytes(kBlockBytes, 3);
  PoolRef ref{world.plain, 0};
  BegunUpload upload;
  CHECK(BeginPoolUpload({world.packed, 0}, &ref, kRows, &upload).ok(), "begin");
  upload.enqueued->WaitInStream();
  world.EnqueueCopy(world.packed_bytes, kFrom, after, 0, world.packed_stream);
  world.device.RunAll();
  CHECK(BlockOf(world.packed_bytes, kFrom) == after, "the owner's write did not run");
  CheckUploaded(world, before);
}

}  // namespace

int main() {
  for (const Order& order : {Order{false, false}, {false, true}, {true, false}, {true, true}}) {
    TestPackComesAfterTheOwnersReads(order);
    TestUploadComesAfterTheOwnersWrites(order);
    TestUploadBesideComesAfterTheOwnersWrites(order);
    TestOwnerComesAfterTheUploadBeside(order);
  }
  std::printf("ok\n");
  return 0;
}
