// Outcome of a call whose faults depend on data: a code and the first faulty row.
#pragma once

#include <cstdint>

namespace blockcompact {

// Mirrored by `KernelCode` in blockcompact_jax/kernels/status.py, which holds the sentences.
enum class StatusCode : int32_t {
  kOk = 0,
  kUnknownPool = 1,
  kWrongPoolKind = 2,
  kShapeMismatch = 3,
  kStaleOrd = 4,
  kReadOnlyPool = 5,
  kOverlappingPools = 6,
  kPartialHole = 7,
  kLayerOutOfRange = 8,
  kFromBlockOutOfRange = 9,
  kToBlockOutOfRange = 10,
  kDuplicateDestination = 11,
  kValidTokensOutOfRange = 12,
  kNumKeysOutOfRange = 13,
  kOpenTransfer = 14,
  kOtherDevice = 15,
};

struct Status {
  StatusCode code = StatusCode::kOk;
  int64_t row = -1;  // -1 where no single row is at fault

  bool ok() const { return code == StatusCode::kOk; }
};

}  // namespace blockcompact
