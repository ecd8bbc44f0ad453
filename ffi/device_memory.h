// Memory of a device for checks and benchmarks, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace blockcompact_ffi {

void DefineDeviceMemory(pybind11::module_& module);

}  // namespace blockcompact_ffi
