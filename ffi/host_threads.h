// Threads of the module for calls that run outside XLA.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"

namespace blockcompact_ffi {

// Threads that share a call, the caller included: BLOCKCOMPACT_NUM_THREADS, else one for each
// processor. Throws std::invalid_argument with a sentence where the variable is no positive number.
int64_t NumHostThreads();

// Sets the number for this process; 0 returns to the default. Throws where it is negative.
void SetNumHostThreads(int64_t num_threads);

// Switches host calls over to the OpenMP threads of this process, or back. False where no OpenMP
// runtime is loaded for all to see: then, too, the calls use threads of the module.
bool UseOpenMpThreads(bool is_used);

// Spreads tasks over threads that are started on first use and sleep between calls. The caller
// works too and never waits for a thread to wake. A forked child starts threads of its own.
void HostParallelFor(int64_t num_tasks, const blockcompact::Task& task);

}  // namespace blockcompact_ffi
