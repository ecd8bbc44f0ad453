// The block score calls of the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace blockcompact_ffi {

void DefineBlockScores(pybind11::module_& module);

}  // namespace blockcompact_ffi
