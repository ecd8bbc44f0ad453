// FFI handlers for CUDA, by the names of the CPU ones.
#pragma once

#include "handlers.h"

namespace blockcompact_ffi {

HandlerList CudaHandlers();

}  // namespace blockcompact_ffi
