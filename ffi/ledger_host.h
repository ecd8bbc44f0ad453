// The ledger call of the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace blockcompact_ffi {

void DefineLedger(pybind11::module_& module);

}  // namespace blockcompact_ffi
