// Uploads beside their caller: completion, leases, refusals, and racing callers (run under TSan).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "blockcompact/pool.h"
#include "check.h"
#include "upload_worker.h"

using namespace blockcompact;      // NOLINT: a test program
using namespace blockcompact_ffi;  // NOLINT: a test program

namespace {

constexpr BlockShape kShape{1, 4, 8, 2};
constexpr int64_t kBlockBytes = 2 * 4 * 8 * 2;
constexpr PlainStrides kHnd{kBlockBytes / 2, kBlockBytes, kBlockBytes / 2, 16};
constexpr int32_t kNumBlocks = 8;

struct Pools {
  std::shared_ptr<std::vector<uint8_t>> plain_bytes, packed_bytes;
  int64_t plain_id, packed_id;

  Pools()
      : plain_bytes(std::make_shared<std::vector<uint8_t>>(kNumBlocks * kBlockBytes)),
        packed_bytes(std::make_shared<std::vector<uint8_t>>(RandomBytes(plain_bytes->size(), 3))) {
    plain_id = AddPlainPool(MemoryOf(plain_bytes), kNumBlocks, kShape, kHnd);
    packed_id =
        AddPackedPool(MemoryOf(packed_bytes), kNumBlocks, kShape, PackedLayout::kVec, kBlockBytes);
  }

  static PoolMemory MemoryOf(const std::shared_ptr<std::vector<uint8_t>>& bytes) {
    return {{reinterpret_cast<std::byte*>(bytes->data())},
            static_cast<int64_t>(bytes->size()),
            1,
            0,
            true,
            bytes};
  }

  // V of `vec` is plain: enough to see which block has arrived.
  bool HasArrived(int32_t source, int32_t target) const {
    const int64_t v = kBlockBytes / 2;
    return std::memcmp(plain_bytes->data() + target * kBlockBytes + v,
                       packed_bytes->data() + source * kBlockBytes + v, v) == 0;
  }
};

struct Started {
  Status status;
  uint32_t next_ord = 0;
  std::shared_ptr<UploadEvent> event;
};

Started Start(const Pools& pools, uint32_t ord, int32_t source, int32_t target,
              std::shared_ptr<void> lease = nullptr) {
  PoolRef plain{pools.plain_id, ord};
  auto upload = std::make_unique<BegunUpload>();
  const Rows rows{1, nullptr, &source, &target, nullptr};
  Started started;
  started.status = BeginPoolUpload({pools.packed_id, 0}, &plain, rows, upload.get());
  started.next_ord = plain.ord;
  if (started.status.ok()) started.event = SubmitUpload(std::move(upload), std::move(lease));
  return started;
}

Status Move(const Pools& pools, uint32_t* ord, int32_t from, int32_t to) {
  PoolRef ref{pools.plain_id, *ord};
  const Status status = PoolBlockMove(&ref, {1, nullptr, &from, &to, nullptr}, SerialFor);
  *ord = ref.ord;
  return status;
}

void Close(const Pools& pools) {
  CHECK(RemovePool(pools.plain_id) && RemovePool(pools.packed_id), "remove");
}

void TestHeldUpload() {
  const Pools pools;
  const auto lease = std::make_shared<int>(0);
  HoldUploads(true, "");
  const Started upload = Start(pools, 0, 5, 2, lease);
  CHECK(upload.status.ok() && upload.next_ord == 1, "start");
  CHECK(!upload.event->Wait(std::chrono::milliseconds(5)) && !upload.event->IsDone(), "held");
  CHECK(!pools.HasArrived(5, 2), "moved while held");
  CHECK(lease.use_count() == 2, "the lease is not held");
  uint32_t ord = upload.next_ord;
  CHECK(Move(pools, &ord, 2, 3).code == StatusCode::kOpenTransfer, "reads the open block");
  CHECK(Move(pools, &ord, 3, 2).code == StatusCode::kOpenTransfer, "writes the open block");
  CHECK(Start(pools, ord, 1, 2).status.code == StatusCode::kOpenTransfer, "uploads to it");
  CHECK(Start(pools, ord - 1, 1, 3).status.code == StatusCode::kStaleOrd, "stale");
  CHECK(CountOpen(pools.packed_id).num_reads == 1 && CountOpen(pools.plain_id).num_writes == 1,
        "a refused call is counted as open");
  CHECK(Move(pools, &ord, 3, 4).ok(), "other blocks");
  HoldUploads(false, "");
  CHECK(upload.event->Wait(std::nullopt) && upload.event->error().empty(), "done");
  CHECK(pools.HasArrived(5, 2), "the bytes");
  CHECK(lease.use_count() == 1, "the lease is still held");
  CHECK(Move(pools, &ord, 2, 3).ok(), "the block is still open");
  Close(pools);
}

void TestFailure() {
  const Pools pools;
  HoldUploads(true, "");
  const Started failing = Start(pools, 0, 0, 1);
  const Started next = Start(pools, failing.next_ord, 0, 2);
  HoldUploads(false, "no bus");
  CHECK(next.event->Wait(std::nullopt) && next.event->error().empty(), "the next upload");
  CHECK(failing.event->error() == "no bus", "%s", failing.event->error().c_str());
  CHECK(!pools.HasArrived(0, 1) && pools.HasArrived(0, 2), "the bytes");
  Close(pools);
}

void TestCloseInFlight() {
  for (int round = 0; round < 50; ++round) {
    Pools pools;
    const std::weak_ptr<std::vector<uint8_t>> memory = pools.plain_bytes;
    std::shared_ptr<UploadEvent> event = Start(pools, 0, 1, 1).event;
    Close(pools);
    pools.plain_bytes.reset();  // only the upload, if it still runs, keeps the memory now
    pools.packed_bytes.reset();
    if (round % 2 == 0) event->Wait(std::nullopt);
    event.reset();  // or dropped in flight
    DrainUploads();
    CHECK(memory.expired(), "the memory is still held");
  }
}

// A block that a running call still reads is no destination yet.
void TestStartWaitsForReaders() {
  const Pools pools;
  std::atomic<bool> is_reading{false}, may_read{false}, is_started{false};
  const std::vector<uint8_t> before(*pools.plain_bytes);
  std::vector<uint8_t> out(kBlockBytes);
  std::thread reader([&] {
    const int32_t block = 2;
    const PlainView to{{reinterpret_cast<std::byte*>(out.data())}, 1, kShape, kHnd};
    const auto slowly = [&](int64_t num_tasks, const Task& task) {
      is_reading = true;
      while (!may_read) std::this_thread::yield();
      SerialFor(num_tasks, task);
    };
    const Rows rows{1, nullptr, &block, nullptr, nullptr};
    CHECK(PoolGather({pools.plain_id, 0}, to, rows, slowly).ok(), "gather");
  });
  while (!is_reading) std::this_thread::yield();
  std::thread starter([&] {
    const Started upload = Start(pools, 0, 5, 2);
    is_started = true;
    CHECK(upload.status.ok() && upload.event->Wait(std::nullopt), "upload");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!is_started, "the upload started while its block was read");
  may_read = true;
  reader.join();
  starter.join();
  CHECK(std::equal(out.begin(), out.end(), before.begin() + 2 * kBlockBytes), "what was read");
  CHECK(pools.HasArrived(5, 2), "the bytes");
  Close(pools);
}

// Each thread owns two blocks and uploads to them while all share the ord and the registry.
void TestRacingCallers() {
  const Pools pools;
  std::atomic<uint32_t> ord{0};
  std::mutex start_mutex;
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 200; ++round) {
        const int32_t source = (t + round) % kNumBlocks;
        Started upload;
        {
          const std::lock_guard<std::mutex> lock(start_mutex);
          upload = Start(pools, ord, source, t);
          CHECK(upload.status.ok(), "code %d", static_cast<int>(upload.status.code));
          ord = upload.next_ord;
        }
        upload.event->Wait(std::nullopt);
        CHECK(pools.HasArrived(source, t), "thread %d round %d", t, round);
        const std::lock_guard<std::mutex> lock(start_mutex);
        uint32_t now = ord;
        CHECK(Move(pools, &now, t, 4 + t).ok(), "move");
        ord = now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Close(pools);
}

}  // namespace

int main() {
  TestHeldUpload();
  TestFailure();
  TestCloseInFlight();
  TestStartWaitsForReaders();
  TestRacingCallers();
  DrainUploads();
  std::printf("ok\n");
  return 0;
}
