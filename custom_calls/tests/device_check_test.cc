// The device checks themselves, with the kernels on host memory: they have to pass.
#include "device_check.h"

#include "check.h"

using namespace blockcompact::cuda;  // NOLINT: a test program

namespace {

DeviceCheck CheckOf(blockcompact::PackedLayout layout, const blockcompact::BlockShape& shape) {
  DeviceCheck check;
  check.layout = layout;
  check.shape = shape;
  check.num_layers = 3;
  check.num_blocks = 9;
  check.num_rows = 20;
  check.num_runs = 2;
  return check;
}

void TestChecksPass(DeviceCheck check) {
  for (bool has_partial_rows : {false, true}) {
    check.has_partial_rows = has_partial_rows;
    for (const auto run : {&CheckReload, &CheckGather, &CheckMove}) {
      const DeviceCheckResult result = run(check);
      CHECK(result.is_equal, "B=%ld D=%ld", check.shape.block_tokens, check.shape.head_dim);
      CHECK(result.num_bytes == 20 * check.shape.packed_row_bytes(), "%ld", result.num_bytes);
      CHECK(result.kernel_us.size() == 2 && result.copy_us.size() == 2, "samples");
    }
    CHECK(CheckRefusal(check), "refusal");
  }
}

}  // namespace

int main() {
  TestChecksPass(CheckOf(blockcompact::PackedLayout::kAmx, {2, 32, 64, 2}));
  TestChecksPass(CheckOf(blockcompact::PackedLayout::kAmx, {1, 64, 32, 4}));
  TestChecksPass(CheckOf(blockcompact::PackedLayout::kVec, {2, 17, 33, 1}));
  TestChecksPass(CheckOf(blockcompact::PackedLayout::kVec, {1, 16, 80, 2}));
  CHECK(NumDevices() == 1 && DeviceName() == "none: host memory", "the fake device");
  std::printf("ok\n");
  return 0;
}
