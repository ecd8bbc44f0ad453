#include "device_memory.h"

#include <pybind11/numpy.h>

#include <stdexcept>

#include "blockcompact/device.h"
#include "device_runtime.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

using blockcompact::DeviceEvent;
using blockcompact::DeviceRuntime;
using blockcompact::DeviceStream;
using Array = py::array_t<uint8_t, py::array::c_style>;

constexpr DeviceStream kDefaultStream{0, nullptr};

// Of device 0. Copies run on the default stream and return when they are done.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t num_bytes)
      : runtime_(*blockcompact::cuda::Runtime()),
        num_bytes_(num_bytes),
        data_(runtime_.Allocate(0, num_bytes)) {}
  ~DeviceMemory() { runtime_.Free(0, data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_); }
  void Write(const Array& from) {
    Copy(data_, reinterpret_cast<const std::byte*>(from.data()), from.nbytes());
  }
  void Read(Array to) const {
    Copy(reinterpret_cast<std::byte*>(to.mutable_data()), data_, to.nbytes());
  }

 private:
  void Copy(std::byte* to, const std::byte* from, int64_t num_bytes) const {
    if (num_bytes > num_bytes_) {
      throw std::invalid_argument("the array has " + std::to_string(num_bytes) +
                                  " bytes and the device memory " + std::to_string(num_bytes_));
    }
    const py::gil_scoped_release unlocked;
    runtime_.Copy(to, from, num_bytes, kDefaultStream);
    DeviceEvent(runtime_, kDefaultStream).Synchronize();
  }

  DeviceRuntime& runtime_;
  const int64_t num_bytes_;
  std::byte* const data_;
};

}  // namespace

void DefineDeviceMemory(py::module_& module) {
  py::class_<DeviceMemory>(module, "DeviceMemory")
      .def(py::init<int64_t>(), py::arg("num_bytes"))
      .def_property_readonly("address", &DeviceMemory::address)
      .def("write", &DeviceMemory::Write, py::arg("array").noconvert())
      .def("read", &DeviceMemory::Read, py::arg("array").noconvert());
}

}  // namespace blockcompact_ffi
