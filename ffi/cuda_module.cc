// Python module `blockcompact_jax._cuda`. Importing it starts no CUDA driver.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "cuda_handlers.h"
#include "device_check.h"
#include "device_memory.h"
#include "device_runtime.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

using blockcompact::BlockShape;
using blockcompact::cuda::DeviceCheck;
using blockcompact::cuda::DeviceCheckResult;

py::dict FfiTargets() {
  py::dict targets;
  for (const auto& [name, handler] : CudaHandlers()) {
    targets[py::str(name)] = py::capsule(reinterpret_cast<void*>(handler));
  }
  return targets;
}

// One of the checks of device_check.h, as (is_equal, num_bytes, kernel_us, copy_us).
template <DeviceCheckResult (*kCheck)(const DeviceCheck&)>
py::tuple Run(const DeviceCheck& check) {
  DeviceCheckResult result;
  {
    const py::gil_scoped_release unlocked;
    result = kCheck(check);
  }
  return py::make_tuple(result.is_equal, result.num_bytes, result.kernel_us, result.copy_us);
}

DeviceCheck MakeCheck(int64_t layout, const std::array<int64_t, 4>& shape, int64_t num_layers,
                      int64_t num_blocks, int64_t num_rows, bool is_source_pinned,
                      bool has_partial_rows, int64_t num_runs) {
  const DeviceCheck check{static_cast<blockcompact::PackedLayout>(layout),
                          BlockShape{shape[0], shape[1], shape[2], shape[3]},
                          num_layers,
                          num_blocks,
                          num_rows,
                          is_source_pinned,
                          has_partial_rows,
                          num_runs};
  const std::string problem = blockcompact::PackedShapeProblem(check.layout, check.shape);
  if (!problem.empty()) throw std::invalid_argument(problem);
  if (num_layers < 1 || num_blocks < 1 || num_rows < 2 || num_rows > num_layers * num_blocks) {
    throw std::invalid_argument(
        "`num_rows` must be in [2, num_layers * num_blocks], and both of these positive");
  }
  return check;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.def("ffi_targets", &FfiTargets);
  module.def("device_runtime", [] { return py::capsule(blockcompact::cuda::Runtime()); });
  DefineDeviceMemory(module);
  module.def("num_devices", &blockcompact::cuda::NumDevices);
  module.def("device_name", &blockcompact::cuda::DeviceName);
  py::class_<DeviceCheck>(module, "DeviceCheck")
      .def(py::init(&MakeCheck), py::kw_only(), py::arg("layout"), py::arg("shape"),
           py::arg("num_layers"), py::arg("num_blocks"), py::arg("num_rows"),
           py::arg("is_source_pinned") = true, py::arg("has_partial_rows") = false,
           py::arg("num_runs") = 1);
  module.def("check_reload", &Run<blockcompact::cuda::CheckReload>);
  module.def("check_gather", &Run<blockcompact::cuda::CheckGather>);
  module.def("check_move", &Run<blockcompact::cuda::CheckMove>);
  module.def("check_refusal", &blockcompact::cuda::CheckRefusal);
}

}  // namespace blockcompact_ffi
