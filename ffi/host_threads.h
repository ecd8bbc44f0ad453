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

// Spreads the tasks of one call over num_threads threads, the caller included, or over
// NumHostThreads(). Throws std::invalid_argument where the number is not in [1, 1024]. The threads
// are started on first use and sleep between calls; the caller works too and never waits for one to
// wake. A forked child starts threads of its own.
blockcompact::ParallelFor HostParallelFor(std::optional<int64_t> num_threads);

// Whether an OpenMP runtime is loaded for all libraries to see. Not in a forked child of a process
// that spread tasks over its threads here: the child's runtime has lost them.
bool HasOpenMpThreads();

// Spreads tasks over the OpenMP threads of this process, as many as OpenMP is set to. Throws
// std::invalid_argument where there are none.
blockcompact::ParallelFor OpenMpParallelFor();

}  // namespace blockcompact_ffi
