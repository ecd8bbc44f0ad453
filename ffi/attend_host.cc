#include "attend_host.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "blockcompact/attend.h"
#include "blockcompact/device_attend.h"
#include "host_threads.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

using blockcompact::AttendCall;
using blockcompact::AttendType;
using blockcompact::RowsAt;
using TableArray = py::array_t<int32_t, py::array::c_style>;

// (address, head stride, query stride), the strides in elements.
template <typename Byte>
RowsAt<Byte> RowsOf(const py::tuple& rows, int64_t element_bytes) {
  return {reinterpret_cast<Byte*>(rows[0].cast<uintptr_t>()),
          rows[1].cast<int64_t>() * element_bytes, rows[2].cast<int64_t>() * element_bytes};
}

// (pool ID, ord, layer, block table, num_keys)
blockcompact::AttendSegment SegmentOf(const py::tuple& segment) {
  if (!TableArray::check_(segment[3])) {
    throw std::invalid_argument("`block_table` must be a dense int32 array");
  }
  const auto table = py::reinterpret_borrow<TableArray>(segment[3]);
  return {{segment[0].cast<int64_t>(), segment[1].cast<uint32_t>()},
          segment[2].cast<int64_t>(),
          table.data(),
          table.size(),
          segment[4].cast<int64_t>()};
}

py::tuple PoolAttend(const py::tuple& segments, const py::tuple& shape, float scale,
                     int64_t window_tokens, const py::tuple& queries, const py::tuple& out,
                     const py::object& block_mass, int64_t max_blocks, uintptr_t log_sum_exp,
                     std::optional<int64_t> num_threads, bool is_on_open_mp, bool is_on_device) {
  if (segments.empty() || segments.size() > blockcompact::kMaxAttendSegments) {
    throw std::invalid_argument("`segments` must have 1 or 2 entries");
  }
  AttendCall call;
  call.num_query_heads = shape[0].cast<int64_t>();
  call.num_queries = shape[1].cast<int64_t>();
  call.head_dim = shape[2].cast<int64_t>();
  const auto element_bytes = shape[3].cast<int64_t>();
  if (element_bytes != 2 && element_bytes != 4) {
    throw std::invalid_argument("elements must have 2 bytes (bfloat16) or 4 (float32)");
  }
  call.type = element_bytes == 2 ? AttendType::kBf16 : AttendType::kF32;
  call.scale = scale;
  call.window_tokens = window_tokens;
  for (const py::handle segment : segments) {
    call.segments[call.num_segments++] = SegmentOf(py::reinterpret_borrow<py::tuple>(segment));
  }
  call.queries = RowsOf<const std::byte>(queries, element_bytes);
  call.out = RowsOf<std::byte>(out, element_bytes);
  if (!block_mass.is_none()) {
    call.block_mass = RowsOf<std::byte>(py::reinterpret_borrow<py::tuple>(block_mass), 4);
    call.max_blocks = max_blocks;
  }
  call.log_sum_exp = reinterpret_cast<float*>(log_sum_exp);
  if (is_on_open_mp && num_threads.has_value()) {
    throw std::invalid_argument("`num_threads` is " + std::to_string(*num_threads) +
                                " and `is_on_open_mp` is True; expected one of the two");
  }
  const blockcompact::ParallelFor parallel_for =
      is_on_open_mp ? OpenMpParallelFor() : HostParallelFor(num_threads);
  blockcompact::Status status;
  {
    const py::gil_scoped_release unlocked;
    status = is_on_device ? blockcompact::DevicePoolAttend(call)
                          : blockcompact::PoolAttend(call, parallel_for);
  }
  return py::make_tuple(static_cast<int32_t>(status.code), status.row);
}

}  // namespace

void DefineAttend(py::module_& module) {
  module.def("pool_attend", &PoolAttend, py::arg("segments"), py::arg("shape"), py::arg("scale"),
             py::arg("window_tokens"), py::arg("queries"), py::arg("out"), py::arg("block_mass"),
             py::arg("max_blocks"), py::arg("log_sum_exp"), py::arg("num_threads"),
             py::arg("is_on_open_mp"), py::arg("is_on_device"));
  // numpy's own ways to the address build a description of the dtype first.
  module.def(
      "address_of",
      [](const py::array& array) { return reinterpret_cast<uintptr_t>(array.data()); },
      py::arg("array").noconvert());
  module.def("num_threads", &NumHostThreads);
  module.def("has_open_mp_threads", &HasOpenMpThreads);
}

}  // namespace blockcompact_ffi
