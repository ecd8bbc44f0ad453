// Attention and scores of pools of a device. Queries and results lie on the device. The calls are
// enqueued on the stream of the pool's owner and return at once: whoever comes after them there
// sees the results.
#pragma once

#include <vector>

#include "blockcompact/attend.h"
#include "blockcompact/block_scores.h"
#include "blockcompact/pool_calls.h"
#include "blockcompact/status.h"

namespace blockcompact {

// As PoolAttend; one segment.
Status DevicePoolAttend(const AttendCall& call);
// As PoolScoreSequences.
Status DevicePoolScoreSequences(const PoolRef& pool, std::vector<ScoreSequence> sequences);

}  // namespace blockcompact
