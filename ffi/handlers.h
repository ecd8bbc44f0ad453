// FFI handlers by target name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace blockcompact_ffi {

using HandlerList = std::vector<std::pair<std::string, XLA_FFI_Handler*>>;

// Calls on arrays that JAX owns.
HandlerList ArrayHandlers();

// Calls on registered pools.
HandlerList PoolHandlers();

// Attention over registered pools.
HandlerList AttendHandlers();

// Scores and summaries of blocks.
HandlerList BlockScoreHandlers();

// Ranking, and lists and masks of IDs.
HandlerList RankHandlers();

// Marks of tables, and reference counts.
HandlerList ReferenceHandlers();

}  // namespace blockcompact_ffi
