// Registered pools: refusals, stale ords, closing during use, and offsets past 2^31.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

constexpr BlockShape kShape{2, 32, 32, 2};
constexpr int64_t kBlockBytes = 2 * 2 * 32 * 32 * 2;
constexpr PlainStrides kHnd{kBlockBytes / 2, kBlockBytes, 32 * 32 * 2, 32 * 2};

PoolMemory MemoryOf(std::vector<uint8_t>& bytes, int64_t num_layers) {
  return {{reinterpret_cast<std::byte*>(bytes.data())},
          static_cast<int64_t>(bytes.size()),
          num_layers,
          static_cast<int64_t>(bytes.size()) / num_layers,
          true,
          nullptr};
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

void TestRegistration() {
  std::vector<uint8_t> bytes(3 * kBlockBytes);
  const PoolMemory memory = MemoryOf(bytes, 1);
  CheckRefused("size_bytes", [&] { AddPlainPool(memory, 4, kShape, kHnd); });
  CheckRefused("size_bytes",
               [&] { AddPackedPool(memory, 4, kShape, PackedLayout::kAmx, kBlockBytes); });
  PlainStrides folded = kHnd;
  folded.head_bytes = 64;
  CheckRefused("overlap", [&] { AddPlainPool(memory, 3, kShape, folded); });
  PlainStrides far = kHnd;
  far.block_bytes = INT64_MAX / 2;
  CheckRefused("2^63", [&] { AddPlainPool(memory, 4, kShape, far); });
  CheckRefused("block_tokens",
               [&] { AddPackedPool(memory, 1, {2, 16, 32, 2}, PackedLayout::kAmx, kBlockBytes); });
  CheckRefused("head_dim",
               [&] { AddPackedPool(memory, 1, {1, 32, 80, 2}, PackedLayout::kAmx, kBlockBytes); });
  PoolMemory odd = memory;
  odd.allocations[0] += 1;
  CheckRefused("aligned", [&] { AddPlainPool(odd, 1, kShape, kHnd); });
  odd.allocations[0] = nullptr;
  CheckRefused("null", [&] { AddPlainPool(odd, 1, kShape, kHnd); });
  CHECK(NumPools() == 0, "a refused pool was registered");
}

void TestFarLayers() {
  const int64_t layer_bytes = int64_t{5} << 30;  // 2 layers: the second starts past 2^32
  const int64_t size_bytes = 2 * layer_bytes;
  void* region = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(region != MAP_FAILED, "mmap");
  auto* base = static_cast<std::byte*>(region);
  const int64_t num_blocks = layer_bytes / kBlockBytes;
  const int64_t plain_id =
      AddPlainPool({{base}, size_bytes, 2, layer_bytes, true, nullptr}, num_blocks, kShape, kHnd);
  std::vector<uint8_t> packed = RandomBytes(2 * kBlockBytes, 5);
  const int64_t packed_id =
      AddPackedPool(MemoryOf(packed, 2), 1, kShape, PackedLayout::kVec, kBlockBytes);
  const int32_t last = static_cast<int32_t>(num_blocks - 1);
  const int32_t layer[] = {1}, source[] = {0}, target[] = {last}, valid[] = {32};
  PoolRef plain{plain_id, 0};
  const Status status =
      PoolUpload({packed_id, 0}, &plain, {1, layer, source, target, valid}, SerialFor);
  CHECK(status.ok() && plain.ord == 1, "code %d", static_cast<int>(status.code));
  // V of `vec` is plain, so the last head's V stands at the very end of the region.
  CHECK(std::memcmp(base + size_bytes - 2048, packed.data() + 2 * kBlockBytes - 2048, 2048) == 0,
        "the last bytes of the region");
  CHECK(RemovePool(plain_id) && RemovePool(packed_id), "remove");
  munmap(region, static_cast<size_t>(size_bytes));
}

void TestOrdAndClose() {
  std::vector<uint8_t> bytes = RandomBytes(4 * kBlockBytes, 9);
  auto keepalive = std::make_shared<int>(0);
  PoolMemory memory = MemoryOf(bytes, 1);
  memory.keepalive = keepalive;
  const int64_t pool_id = AddPlainPool(memory, 4, kShape, kHnd);
  memory.keepalive.reset();
  const int32_t from[] = {0}, to[] = {1};
  const Rows rows{1, nullptr, from, to, nullptr};
  PoolRef fresh{pool_id, 0};
  CHECK(PoolBlockMove(&fresh, rows, SerialFor).ok() && fresh.ord == 1, "first move");
  const std::vector<uint8_t> before = bytes;
  PoolRef stale{pool_id, 0};
  CHECK(PoolBlockMove(&stale, rows, SerialFor).code == StatusCode::kStaleOrd, "stale");
  CHECK(bytes == before && stale.ord == 0, "a refused call moved bytes");
  CHECK(keepalive.use_count() == 2, "keepalive is not held");
  CHECK(RemovePool(pool_id) && !RemovePool(pool_id), "remove twice");
  CHECK(keepalive.use_count() == 1, "keepalive is still held");
  CHECK(PoolBlockMove(&fresh, rows, SerialFor).code == StatusCode::kUnknownPool, "closed");
}

void TestCloseDuringCalls() {
  for (int round = 0; round < 50; ++round) {
    auto owner = std::make_shared<std::vector<uint8_t>>(8 * kBlockBytes);
    PoolMemory memory = MemoryOf(*owner, 1);
    memory.keepalive = owner;
    const int64_t pool_id = AddPlainPool(memory, 8, kShape, kHnd);
    memory.keepalive.reset();
    owner.reset();  // only the registry keeps the memory now
    std::atomic<bool> is_closed{false};
    std::thread mover([&] {
      const int32_t from[] = {0, 1, 2, 3}, to[] = {1, 2, 3, 0};
      PoolRef ref{pool_id, 0};
      Status status;
      while (status.ok()) {
        status = PoolBlockMove(&ref, {4, nullptr, from, to, nullptr}, SerialFor);
      }
      CHECK(status.code == StatusCode::kUnknownPool && is_closed, "code %d",
            static_cast<int>(status.code));
    });
    is_closed = true;
    RemovePool(pool_id);
    mover.join();
  }
}

}  // namespace

int main() {
  TestRegistration();
  TestFarLayers();
  TestOrdAndClose();
  TestCloseDuringCalls();
  std::printf("ok\n");
  return 0;
}
