// Python values as the kernels take and give them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "blockcompact/status.h"

namespace blockcompact_ffi {

namespace py = pybind11;

using RowArray = py::array_t<int32_t, py::array::c_style>;

inline py::object StatusArray(const blockcompact::Status& status) {
  py::array_t<int32_t> result(2);
  result.mutable_at(0) = static_cast<int32_t>(status.code);
  result.mutable_at(1) = static_cast<int32_t>(status.row);
  return std::move(result);
}

inline const int32_t* RowData(const RowArray& array, int64_t num_rows) {
  if (array.ndim() != 1 || array.size() != num_rows) {
    throw std::invalid_argument("row arrays must be one-dimensional and equally long");
  }
  return array.data();
}

// The object lives until the last user is gone, whatever thread that is on.
inline std::shared_ptr<void> Keepalive(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* pointer) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    Py_XDECREF(static_cast<PyObject*>(pointer));
  });
}

}  // namespace blockcompact_ffi
