// The CUDA runtime behind pools of a device, on a fake one that is host memory and does all at
// once: that its calls are put together right. Order and waiting are for device_pools_test.cc.
#include "device_runtime.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>

#include "blockcompact/device_attend.h"
#include "blockcompact/device_calls.h"
#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

constexpr BlockShape kShape{2, 32, 32, 4};
constexpr int64_t kBlockBytes = 2 * 2 * 32 * 32 * 4;
constexpr int32_t kNumLayers = 2, kNumBlocks = 5;
constexpr int64_t kPoolBytes = kNumLayers * kNumBlocks * kBlockBytes;
constexpr PlainStrides kNhd{kBlockBytes / 2, kBlockBytes, 32 * 4, 2 * 32 * 4};

PoolMemory MemoryOf(std::byte* bytes) {
  return {{bytes}, kPoolBytes, kNumLayers, kPoolBytes / kNumLayers, true, nullptr};
}

// Finite floats: attention reads them.
std::vector<float> RandomFloats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random() % 256) / 128 - 1;
  return values;
}

void TestPools(DeviceRuntime& runtime) {
  std::vector<float> plain = RandomFloats(kPoolBytes / 4, 1),
                     store = RandomFloats(kPoolBytes / 4, 2);
  std::byte* on_device = runtime.Allocate(0, kPoolBytes);
  std::memcpy(on_device, plain.data(), kPoolBytes);
  PoolMemory memory = MemoryOf(on_device);
  memory.stream = {0, nullptr};
  auto* host = reinterpret_cast<std::byte*>(plain.data());
  auto* rows_begin = reinterpret_cast<std::byte*>(store.data());
  const int64_t ours = AddPlainPool(memory, kNumBlocks, kShape, kNhd);
  const int64_t expected = AddPlainPool(MemoryOf(host), kNumBlocks, kShape, kNhd);
  const auto add_packed = [&] {
    return AddPackedPool(MemoryOf(rows_begin), kNumBlocks, kShape, PackedLayout::kAmx, kBlockBytes);
  };
  const int64_t pinned = add_packed(), pageable = add_packed();
  const int32_t layer[] = {0, 1, 1}, from[] = {4, 0, 2}, to[] = {1, 3, 0}, valid[] = {32, 7, 32};
  const Rows rows{3, layer, from, to, valid};
  PoolRef ref{ours, 0};
  CHECK(PoolUpload({pinned, 0}, &ref, rows, SerialFor).code == StatusCode::kOtherDevice,
        "pageable");
  CHECK(PinPool(pinned), "pin");
  PoolRef host_ref{expected, 0};
  CHECK(PoolUpload({pageable, 0}, &host_ref, rows, SerialFor).ok(), "on the host");
  {
    BegunUpload upload;
    CHECK(BeginPoolUpload({pinned, 0}, &ref, rows, &upload).ok(), "upload");
    upload.Run(SerialFor);
    upload.enqueued->WaitInStream();
  }
  CHECK(PoolUpload({pinned, 0}, &ref, rows, SerialFor).ok(), "again");
  for (PoolRef* pool : {&ref, &host_ref}) {
    CHECK(PoolBlockMove(pool, {3, layer, from, to, nullptr}, SerialFor).ok(), "move");
  }
  CHECK(std::memcmp(on_device, plain.data(), kPoolBytes) == 0, "the bytes");
  std::vector<float> out[2];
  for (int i = 0; i < 2; ++i) {
    out[i].resize(3 * kBlockBytes / 4);
    const PlainView view{{reinterpret_cast<std::byte*>(out[i].data())}, 3, kShape, kNhd};
    CHECK(PoolGather(i == 0 ? ref : host_ref, view, {3, layer, from, nullptr, nullptr}, SerialFor)
              .ok(),
          "gather");
  }
  CHECK(out[0] == out[1], "gathered");
  const std::vector<float> before = store;
  CHECK(PoolPack(ref, &host_ref, rows, SerialFor).code == StatusCode::kWrongPoolKind, "kind");
  PoolRef packed_ref{pinned, 0};
  CHECK(PoolPack(ref, &packed_ref, {3, layer, from, to, nullptr}, SerialFor).ok(), "pack");
  CHECK(store != before, "nothing was packed");
  for (int64_t pool : {ours, expected, pinned, pageable}) CHECK(RemovePool(pool), "close");
  CHECK(runtime.PlaceOf(rows_begin).device_address == nullptr, "still pinned");
  runtime.Free(0, on_device);
}

void TestAttend(DeviceRuntime& runtime) {
  const std::vector<float> kv = RandomFloats(kPoolBytes / 4, 3);
  std::byte* on_device = runtime.Allocate(0, kPoolBytes);
  std::memcpy(on_device, kv.data(), kPoolBytes);
  PoolMemory memory = MemoryOf(on_device);
  const int64_t host = AddPlainPool(memory, kNumBlocks, kShape, kNhd);
  memory.stream = {0, nullptr};
  const int64_t ours = AddPlainPool(memory, kNumBlocks, kShape, kNhd);
  const std::vector<float> queries = RandomFloats(4 * 32, 4);
  const int32_t table[] = {3, 0, 1};
  std::vector<float> out[2] = {std::vector<float>(4 * 32), std::vector<float>(4 * 32)};
  for (int i = 0; i < 2; ++i) {
    AttendCall call;
    call.type = AttendType::kF32;
    call.num_query_heads = 4;
    call.num_queries = 1;
    call.head_dim = 32;
    call.num_segments = 1;
    call.segments[0] = {{i == 0 ? ours : host, 0}, 1, table, 3, 70};
    call.queries = {reinterpret_cast<const std::byte*>(queries.data()), 128, 128};
    call.out = {reinterpret_cast<std::byte*>(out[i].data()), 128, 128};
    CHECK((i == 0 ? DevicePoolAttend(call) : PoolAttend(call, SerialFor)).ok(), "attend");
  }
  for (size_t i = 0; i < out[0].size(); ++i) {
    const float distance = out[0][i] - out[1][i];
    CHECK(distance * distance < 1e-10F, "%zu: %g, not %g", i, out[0][i], out[1][i]);
  }
  CHECK(RemovePool(ours) && RemovePool(host), "close");
  runtime.Free(0, on_device);
}

void TestOtherDevice(DeviceRuntime& runtime) {
  try {
    runtime.MakeStream(1);
  } catch (const std::runtime_error&) {
    return;
  }
  CHECK(false, "the error of the runtime was lost");
}

}  // namespace

int main() {
  DeviceRuntime& runtime = *cuda::Runtime();
  SetDeviceRuntime(&runtime);
  TestPools(runtime);
  TestAttend(runtime);
  TestOtherDevice(runtime);
  CHECK(fake_num_streams == 1, "%d streams", fake_num_streams);
  CHECK(fake_num_events <= 1, "%d events were left", fake_num_events);  // the slot's last use
  std::printf("ok\n");
  return 0;
}
