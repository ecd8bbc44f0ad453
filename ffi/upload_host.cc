#include "upload_host.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <shared_mutex>

#include "blockcompact/open_transfers.h"
#include "blockcompact/pool_calls.h"
#include "python_values.h"
#include "upload_worker.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::BegunUpload;
using blockcompact::PoolRef;
using blockcompact::Rows;
using blockcompact::Status;

// (next ord of the plain pool, status, event or None).
py::tuple StartPoolUpload(int64_t packed_pool, uint32_t ord_packed, int64_t plain_pool,
                          uint32_t ord_plain, const RowArray& layer, const RowArray& source_block,
                          const RowArray& physical_block, const RowArray& valid_tokens,
                          py::object lease) {
  const int64_t num_rows = layer.size();
  const Rows rows{num_rows, RowData(layer, num_rows), RowData(source_block, num_rows),
                  RowData(physical_block, num_rows), RowData(valid_tokens, num_rows)};
  PoolRef plain{plain_pool, ord_plain};
  auto upload = std::make_unique<BegunUpload>();
  std::shared_ptr<void> held = Keepalive(std::move(lease));
  std::shared_ptr<UploadEvent> event;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::BeginPoolUpload({packed_pool, ord_packed}, &plain, rows, upload.get());
    if (status.ok()) event = SubmitUpload(std::move(upload), std::move(held));
  }
  return py::make_tuple(plain.ord, StatusArray(status), event);
}

bool Wait(const UploadEvent& event, std::optional<double> timeout_s) {
  std::optional<std::chrono::nanoseconds> timeout;
  if (timeout_s) {
    timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(*timeout_s));
  }
  const py::gil_scoped_release unlocked;  // the worker lets go of Python objects before it is done
  return event.Wait(timeout);
}

// For owners that touch the memory themselves: the status a call of ours would get.
py::object CheckNotOpenOf(int64_t pool_id, bool is_write, const RowArray& layer,
                          const RowArray& block) {
  const int64_t num_rows = layer.size();
  const blockcompact::BlockColumn column{num_rows, RowData(block, num_rows),
                                         RowData(layer, num_rows)};
  const std::shared_ptr<blockcompact::Pool> pool = blockcompact::FindAnyPool(pool_id);
  if (pool == nullptr) return StatusArray({blockcompact::StatusCode::kUnknownPool, -1});
  Status status;
  {
    const py::gil_scoped_release unlocked;
    const std::shared_lock<std::shared_mutex> lock(pool->mutex);
    status = blockcompact::CheckNotOpen(
        *pool, is_write ? blockcompact::Access::kWrite : blockcompact::Access::kRead, column);
  }
  return StatusArray(status);
}

py::tuple NumOpenTransfers(int64_t pool_id) {
  const blockcompact::OpenCount count = blockcompact::CountOpen(pool_id);
  return py::make_tuple(count.num_reads, count.num_writes);
}

}  // namespace

void DefineUploads(py::module_& module) {
  py::class_<UploadEvent, std::shared_ptr<UploadEvent>>(module, "UploadEvent")
      .def("is_done", &UploadEvent::IsDone)
      .def("wait", &Wait, py::arg("timeout_s"))
      .def("wait_in_stream", &UploadEvent::WaitInStream, py::call_guard<py::gil_scoped_release>())
      .def("error", &UploadEvent::error);
  module.def("start_pool_upload", &StartPoolUpload, py::arg("packed_pool"), py::arg("ord_packed"),
             py::arg("plain_pool"), py::arg("ord_plain"), py::arg("layer").noconvert(),
             py::arg("source_block").noconvert(), py::arg("physical_block").noconvert(),
             py::arg("valid_tokens").noconvert(), py::arg("lease"));
  module.def("num_open_transfers", &NumOpenTransfers, py::arg("pool_id"));
  module.def("check_not_open", &CheckNotOpenOf, py::arg("pool_id"), py::arg("is_write"),
             py::arg("layer").noconvert(), py::arg("block").noconvert());
  module.def("hold_uploads", &HoldUploads, py::arg("is_held"), py::arg("fault") = "");
  // While Python still stands: uploads in flight hold Python objects.
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&DrainUploads, py::call_guard<py::gil_scoped_release>()));
}

}  // namespace blockcompact_ffi
