#include "rank_host.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "blockcompact/rank.h"
#include "host_threads.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

// A dense array; nothing is copied or cast.
template <typename T>
class HostArray {
 public:
  HostArray(const char* name, const py::buffer& array, py::ssize_t num_axes)
      : info_(array.request()) {
    py::ssize_t stride = sizeof(T);
    bool is_dense = info_.item_type_is_equivalent_to<T>() && info_.ndim == num_axes;
    for (py::ssize_t axis = info_.ndim; is_dense && axis-- > 0; stride *= dim(axis)) {
      is_dense = info_.size == 0 || dim(axis) == 1 || info_.strides[Place(axis)] == stride;
    }
    if (!is_dense) {
      throw std::invalid_argument("`" + std::string(name) +
                                  "` has the wrong dtype or shape, or is not dense");
    }
  }

  const T* data() const { return static_cast<const T*>(info_.ptr); }
  py::ssize_t dim(py::ssize_t axis) const { return info_.shape[Place(axis)]; }

 private:
  static size_t Place(py::ssize_t axis) { return static_cast<size_t>(axis); }

  py::buffer_info info_;
};

bool AreBest(const py::buffer& scores, int32_t num_candidates, const py::buffer& listed,
             const py::buffer& num_listed, const py::buffer& num_wanted, int64_t num_sinks) {
  const HostArray<float> of_scores("scores", scores, 2);
  const HostArray<int32_t> of_listed("listed", listed, 2);
  const HostArray<int32_t> counts("num_listed", num_listed, 1), wanted("num_wanted", num_wanted, 1);
  const py::ssize_t num_rows = of_scores.dim(0);
  if (of_listed.dim(0) != num_rows || counts.dim(0) != num_rows || wanted.dim(0) != num_rows) {
    throw std::invalid_argument("the arrays differ in rows");
  }
  if (!std::equal(counts.data(), counts.data() + num_rows, wanted.data())) return false;
  const std::vector<int32_t> candidates(static_cast<size_t>(num_rows), num_candidates);
  uint8_t are_best = 0;
  blockcompact::BestCall call;
  call.scores = of_scores.data();
  call.num_candidates = candidates.data();
  call.listed = of_listed.data();
  call.num_listed = counts.data();
  call.num_batches = 1;
  call.num_rows = num_rows;
  call.num_blocks = of_scores.dim(1);
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
