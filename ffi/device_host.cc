#include "device_host.h"

#include <pybind11/stl.h>

#include "blockcompact/device.h"
#include "blockcompact/emulated_device.h"
#include "blockcompact/pool.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

using blockcompact::DeviceRuntime;
using blockcompact::EmulatedDevice;

// Never destroyed: an upload may still wait in it while the process ends.
EmulatedDevice* TheEmulatedDevice() {
  static auto* device = new EmulatedDevice;
  return device;
}

// A capsule with a `DeviceRuntime*` that lives as long as the process, or None for none.
py::object SetDeviceRuntime(const py::object& runtime) {
  DeviceRuntime* before = blockcompact::GetDeviceRuntime();
  blockcompact::SetDeviceRuntime(
      runtime.is_none() ? nullptr : py::cast<py::capsule>(runtime).get_pointer<DeviceRuntime>());
  return before == nullptr ? py::none() : py::object(py::capsule(before));
}

const std::byte* At(uintptr_t address) { return reinterpret_cast<const std::byte*>(address); }

}  // namespace

void DefineDevice(py::module_& module) {
  module.def("set_device_runtime", &SetDeviceRuntime, py::arg("runtime"));
  module.def("pin_pool", &blockcompact::PinPool, py::arg("pool_id"),
             py::call_guard<py::gil_scoped_release>());
  // For tests.
  py::class_<EmulatedDevice, std::unique_ptr<EmulatedDevice, py::nodelete>>(module,
                                                                            "EmulatedDevice")
      .def(py::init(&TheEmulatedDevice))
      .def_property_readonly(
          "runtime",
          [](EmulatedDevice& device) { return py::capsule(static_cast<DeviceRuntime*>(&device)); })
      .def(
          "add_memory",
          [](EmulatedDevice& device, uintptr_t address, int64_t num_bytes, int32_t its_device) {
            device.AddMemory(At(address), num_bytes, its_device);
          },
          py::arg("address"), py::arg("num_bytes"), py::arg("device"))
      .def(
          "remove_memory",
          [](EmulatedDevice& device, uintptr_t address) { device.RemoveMemory(At(address)); },
          py::arg("address"))
      .def("hold", &EmulatedDevice::Hold, py::arg("is_held"))
      .def("fail_next_wait", &EmulatedDevice::FailNextWait, py::arg("fault"))
      .def("run_all", &EmulatedDevice::RunAll, py::call_guard<py::gil_scoped_release>())
      .def("num_pending", &EmulatedDevice::num_pending);
}

}  // namespace blockcompact_ffi
