#include <cmath>
#include <cstring>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/layout.h"

#define ATTEND_TARGET

namespace blockcompact::scalar {
namespace {
#include "attend_generic.inc"
}  // namespace

AttendKernels AttendKernelsOf(AttendType type) {
  return type == AttendType::kF32 ? GenericKernels<AttendType::kF32, uint32_t>()
                                  : GenericKernels<AttendType::kBf16, uint16_t>();
}

}  // namespace blockcompact::scalar
