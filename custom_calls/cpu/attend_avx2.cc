#include <cmath>
#include <cstring>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/layout.h"

#if defined(__x86_64__)
#define ATTEND_TARGET __attribute__((target("avx2,fma")))

namespace blockcompact::avx2 {
namespace {
#include "attend_generic.inc"
}  // namespace

bool HasFma() { return __builtin_cpu_supports("fma") != 0; }

AttendKernels AttendKernelsOf(AttendType type) {
  return type == AttendType::kF32 ? GenericKernels<AttendType::kF32, uint32_t>()
                                  : GenericKernels<AttendType::kBf16, uint16_t>();
}

}  // namespace blockcompact::avx2
#endif
