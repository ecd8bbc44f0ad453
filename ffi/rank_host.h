// The planning calls of the Python module on arrays of the host.
#pragma once

#include <pybind11/pybind11.h>

namespace blockcompact_ffi {

void DefineRank(pybind11::module_& module);

}  // namespace blockcompact_ffi
