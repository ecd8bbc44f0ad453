// Threads of the module for calls that run outside XLA.
#pragma once

#include <cstdint>
#include <optional>

#include "blockcompact/parallel.h"

namespace blockcompact_ffi {

// Threads that share a call that names no number, the caller included: BLOCKCOMPACT_NUM_THREADS,
// else one for each processor. Throws std::invalid_argument with a sentence where the variable is
// no positive number.
int64_t NumHostThreads();

// Switches calls that name no number over to the OpenMP threads of this process, or back. False
// where no OpenMP runtime is loaded for all to see: then, too, the calls use threads of the module.
bool UseOpenMpThreads(bool is_used);

// Spreads the tasks of one call over num_threads threads, the caller included, or over
// NumHostThreads(). Throws std::invalid_argument where the number is not in [1, 1024]. The threads
// are started on first use and sleep between calls; the caller works too and never waits for one to
// wake. A forked child starts threads of its own.
blockcompact::ParallelFor HostParallelFor(std::optional<int64_t> num_threads);

}  // namespace blockcompact_ffi
