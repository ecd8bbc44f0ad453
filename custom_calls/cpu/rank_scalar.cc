#include <cstring>

#include "blockcompact/rank_kernels.h"

#define RANK_TARGET

namespace blockcompact::scalar {
namespace {
#include "rank_generic.inc"
}  // namespace

RankKernels RankKernelsOf() { return GenericRankKernels(); }

}  // namespace blockcompact::scalar
