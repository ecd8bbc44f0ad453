#include "rank_host.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "blockcompact/rank.h"
#include "host_threads.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

// A view of an array's own memory, if it is dense, in a CPU's memory and of that element type; else
// an empty one. Nothing is copied or cast. Waits for an array that is still being computed.
template <typename T>
class HostView {
 public:
  HostView(py::handle array, int num_axes) {
    constexpr int kFlags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
    if (PyObject_GetBuffer(array.ptr(), &buffer_, kFlags) != 0) {
      // What has no buffer to view, such as an array of another device, or no dense one.
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 &&
          PyErr_ExceptionMatches(PyExc_BufferError) == 0 &&
          PyErr_ExceptionMatches(PyExc_ValueError) == 0) {
        throw py::error_already_set();
      }
      PyErr_Clear();
      return;
    }
    is_right_ = buffer_.ndim == num_axes && buffer_.itemsize == sizeof(T) && HasFormat();
  }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
  ~HostView() { PyBuffer_Release(&buffer_); }

  explicit operator bool() const { return is_right_; }
  const T* data() const { return static_cast<const T*>(buffer_.buf); }
  int64_t dim(int axis) const { return buffer_.shape[axis]; }

 private:
  bool HasFormat() const {
    const char* format = buffer_.format;
    if (format == nullptr) return false;
    if (format[0] == '=' || format[0] == '@')
      ++format;  // native order: JAX says so, NumPy does not
    if (format[0] == '\0' || format[1] != '\0') return false;
    if constexpr (std::is_floating_point_v<T>) return format[0] == 'f';
    return format[0] == 'i' || format[0] == 'l';  // by size, checked above
  }

  Py_buffer buffer_{};
  bool is_right_ = false;
};

// None where an array is no dense one of the host, or has another dtype or shape.
std::optional<bool> AreBest(const py::handle& scores, int32_t num_candidates,
                            const py::handle& listed, const py::handle& num_listed,
                            const py::handle& num_wanted, int64_t num_sinks) {
  const HostView<int32_t> wanted(num_wanted, 1), counts(num_listed, 1), of_listed(listed, 2);
  const HostView<float> of_scores(scores, 2);
  if (!wanted || !counts || !of_listed || !of_scores) return std::nullopt;
  const int64_t num_rows = wanted.dim(0), num_blocks = of_scores.dim(1);
  if (counts.dim(0) != num_rows || of_listed.dim(0) != num_rows || of_scores.dim(0) != num_rows) {
    return std::nullopt;
  }
  if (num_candidates > num_blocks ||
      !std::equal(counts.data(), counts.data() + num_rows, wanted.data())) {
    return false;
  }
  const std::vector<int32_t> candidates(static_cast<size_t>(num_rows), num_candidates);
  uint8_t are_best = 0;
  blockcompact::BestCall call;
  call.scores = of_scores.data();
  call.num_candidates = candidates.data();
  call.listed = of_listed.data();
  call.num_listed = counts.data();
  call.num_batches = 1;
  call.num_rows = num_rows;
  call.num_blocks = num_blocks;
  call.num_places = of_listed.dim(1);
  call.num_sinks = num_sinks;
  call.are_best = &are_best;
  const blockcompact::ParallelFor parallel_for = HostParallelFor(std::nullopt);
  {
    const py::gil_scoped_release unlocked;
    blockcompact::CheckBest(call, parallel_for);
  }
  return are_best != 0;
}

}  // namespace

void DefineRank(py::module_& module) {
  module.def("are_best", &AreBest, py::arg("scores"), py::arg("num_candidates"), py::arg("listed"),
             py::arg("num_listed"), py::arg("num_wanted"), py::arg("num_sinks"));
}

}  // namespace blockcompact_ffi
