// Asynchronous uploads for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace blockcompact_ffi {

void DefineUploads(pybind11::module_& module);

}  // namespace blockcompact_ffi
