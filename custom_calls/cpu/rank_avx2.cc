#include <cstring>

#include "blockcompact/rank_kernels.h"

#if defined(__x86_64__)
#define RANK_TARGET __attribute__((target("avx2")))

namespace blockcompact::avx2 {
namespace {
#include "rank_generic.inc"
}  // namespace

RankKernels RankKernelsOf() { return GenericRankKernels(); }

}  // namespace blockcompact::avx2
#endif
