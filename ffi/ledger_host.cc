#include "ledger_host.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "blockcompact/ledger.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;
namespace ledger = blockcompact::ledger;
using ledger::Column;

constexpr size_t kNumColumns = static_cast<size_t>(Column::kCount);
using Row = std::array<int32_t, sizeof(ledger::Event) / sizeof(int32_t)>;

// A column of one ledger: its first axis, the lane, has one entry.
template <typename Element>
Element* ColumnData(const py::array& column) {
  if (!py::isinstance<py::array_t<Element, py::array::c_style>>(column) || !column.writeable() ||
      column.ndim() < 1 || column.shape(0) != 1) {
    throw std::invalid_argument("`columns` are dense writable columns of one ledger");
  }
  return static_cast<Element*>(const_cast<void*>(column.data()));
}

// A ledger whose memory is Python's.
class HostLedger {
 public:
  HostLedger(std::vector<py::array> columns, int32_t num_ranks) : columns_(std::move(columns)) {
    if (columns_.size() != kNumColumns) {
      throw std::invalid_argument("`columns` has " + std::to_string(columns_.size()) +
                                  " entries; expected " + std::to_string(kNumColumns));
    }
    view_.num_ranks = num_ranks;
    view_.num_slots = SizeOf(Column::kSlotsState);
    view_.num_operations = SizeOf(Column::kOperationsStage);
    view_.num_requests = SizeOf(Column::kRequestsState);
    for (size_t place = 0; place < kNumColumns; ++place) {
      if (place == static_cast<size_t>(Column::kOperationsIsLeased)) {
        view_.is_leased = reinterpret_cast<uint8_t*>(ColumnData<bool>(columns_[place]));
      } else {
        view_.columns[place] = ColumnData<int32_t>(columns_[place]);
      }
    }
  }

  // Applies events in order; returns code and value of each.
  std::vector<std::pair<int32_t, int32_t>> Apply(const std::vector<Row>& rows) {
    before_.clear();
    for (const py::array& column : columns_) {
      const auto* data = static_cast<const std::byte*>(column.data());
      before_.insert(before_.end(), data, data + column.nbytes());
    }
    std::vector<std::pair<int32_t, int32_t>> answers;
    for (const Row& row : rows) {
      ledger::Event event;
      std::memcpy(&event, row.data(), sizeof event);
      const ledger::Outcome outcome = ledger::Apply(view_, event);
      answers.emplace_back(outcome.code, outcome.value);
    }
    return answers;
  }

  // Takes the last `Apply` back.
  void Undo() {
    const std::byte* from = before_.data();
    if (before_.empty()) return;
    for (py::array& column : columns_) {
      std::memcpy(column.mutable_data(), from, static_cast<size_t>(column.nbytes()));
      from += column.nbytes();
    }
  }

 private:
  int64_t SizeOf(Column column) const { return columns_[static_cast<size_t>(column)].size(); }

  std::vector<py::array> columns_;
  std::vector<std::byte> before_;
  ledger::View view_;
};

}  // namespace

void DefineLedger(py::module_& module) {
  py::class_<HostLedger>(module, "Ledger")
      .def(py::init<std::vector<py::array>, int32_t>(), py::arg("columns"), py::arg("num_ranks"))
      .def("apply", &HostLedger::Apply, py::arg("rows"))
      .def("undo", &HostLedger::Undo);
}

}  // namespace blockcompact_ffi
