// Runs the kernels on a device against the CPU kernels and against plain copies. For benchmarks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "blockcompact/layout.h"

namespace blockcompact::cuda {

struct DeviceCheck {
  PackedLayout layout = PackedLayout::kAmx;
  BlockShape shape;
  int64_t num_layers = 1;
  int64_t num_blocks = 1;         // of each layer, in the source and in the pool
  int64_t num_rows = 1;           // at most num_layers * num_blocks
  bool is_source_pinned = true;   // pinned host memory, else device memory
  bool has_partial_rows = false;  // random valid tokens instead of whole blocks
  int64_t num_runs = 1;
};

struct DeviceCheckResult {
  bool is_equal = false;  // to the CPU kernels, all bytes of the pool or of the result
  int64_t num_bytes = 0;  // that the rows move
  std::vector<double> kernel_us;
  std::vector<double> copy_us;  // one cudaMemcpyAsync of as many bytes over the same path
};

// All throw std::runtime_error with a sentence where CUDA fails.
int NumDevices();  // 0 where there is no device or no driver
std::string DeviceName();
DeviceCheckResult CheckReload(const DeviceCheck& check);
DeviceCheckResult CheckGather(const DeviceCheck& check);
DeviceCheckResult CheckMove(const DeviceCheck& check);
// Whether a duplicate destination is refused with its row and moves nothing.
bool CheckRefusal(const DeviceCheck& check);

}  // namespace blockcompact::cuda
