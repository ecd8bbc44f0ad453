// The runtime of devices, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace blockcompact_ffi {

void DefineDevice(pybind11::module_& module);

}  // namespace blockcompact_ffi
