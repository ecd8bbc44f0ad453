#include "block_scores_host.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "blockcompact/block_scores.h"
#include "blockcompact/device_attend.h"
#include "blockcompact/estimate.h"
#include "host_threads.h"

namespace blockcompact_ffi {
namespace {

namespace py = pybind11;

using blockcompact::AttendType;
using TableArray = py::array_t<int32_t, py::array::c_style>;
using ScoreArray = py::array_t<float, py::array::c_style>;

AttendType TypeOf(py::ssize_t element_bytes) {
  if (element_bytes != 2 && element_bytes != 4) {
    throw std::invalid_argument("elements must have 2 bytes (bfloat16) or 4 (float32)");
  }
  return element_bytes == 2 ? AttendType::kBf16 : AttendType::kF32;
}

// (layer, block table, num_keys)
blockcompact::KeyBlocks KeysOf(int64_t layer, const TableArray& table, int64_t num_keys) {
  blockcompact::KeyBlocks keys;
  keys.layer = layer;
  keys.block_table = table.data();
  keys.num_entries = table.size();
  keys.num_keys = num_keys;
  return keys;
}

py::tuple StatusTuple(const blockcompact::Status& status) {
  return py::make_tuple(static_cast<int32_t>(status.code), status.row);
}

bool IsDense(const py::array& array) { return (array.flags() & py::array::c_style) != 0; }

py::tuple PoolScoreBlocks(int64_t pool, uint32_t ord, int64_t layer, const TableArray& table,
                          int64_t num_keys, const py::array& queries, float scale,
                          int64_t reduction, ScoreArray scores,
                          std::optional<int64_t> num_threads) {
  if (queries.ndim() != 3 || scores.ndim() != 3 || !IsDense(queries)) {
    throw std::invalid_argument("`queries` must be dense [heads, queries, dim]");
  }
  blockcompact::ScoreCall call;
  call.type = TypeOf(queries.itemsize());
  call.num_query_heads = queries.shape(0);
  call.num_queries = queries.shape(1);
  call.head_dim = queries.shape(2);
  call.scale = scale;
  call.queries = {static_cast<const std::byte*>(queries.data()), queries.strides(0),
                  queries.strides(1)};
  call.reduction = static_cast<blockcompact::BlockReduction>(reduction);
  call.scores = scores.mutable_data();
  const blockcompact::ParallelFor parallel_for = HostParallelFor(num_threads);
  blockcompact::Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::PoolScoreBlocks({pool, ord}, KeysOf(layer, table, num_keys), call,
                                           parallel_for);
  }
  return StatusTuple(status);
}

// (address, head stride, query stride), the strides in elements.
blockcompact::RowsAt<const std::byte> RowsOf(const py::handle& rows, int64_t element_bytes) {
  const auto [address, head_stride, query_stride] =
      rows.cast<std::tuple<uintptr_t, int64_t, int64_t>>();
  return {reinterpret_cast<const std::byte*>(address), head_stride * element_bytes,
          query_stride * element_bytes};
}

// Sequences are (block table, num_keys, queries, address of the scores).
py::tuple PoolScoreSequences(int64_t pool, uint32_t ord, int64_t layer, const py::sequence& given,
                             const py::tuple& shape, float scale, int64_t reduction,
                             int64_t row_stride, bool is_on_open_mp, bool is_on_device) {
  blockcompact::ScoreCall call;
  call.num_query_heads = shape[0].cast<int64_t>();
  call.num_queries = shape[1].cast<int64_t>();
  call.head_dim = shape[2].cast<int64_t>();
  const auto element_bytes = shape[3].cast<int64_t>();
  call.type = TypeOf(element_bytes);
  call.scale = scale;
  call.reduction = static_cast<blockcompact::BlockReduction>(reduction);
  call.row_stride = row_stride;
  std::vector<blockcompact::ScoreSequence> sequences;
  for (const py::handle item : given) {
    const auto sequence = item.cast<py::tuple>();
    if (!TableArray::check_(sequence[0])) {
      throw std::invalid_argument("`block_table` must be a dense int32 array");
    }
    const auto table = py::reinterpret_borrow<TableArray>(sequence[0]);
    call.queries = RowsOf(sequence[2], element_bytes);
    call.scores = reinterpret_cast<float*>(sequence[3].cast<uintptr_t>());
    sequences.push_back({KeysOf(layer, table, sequence[1].cast<int64_t>()), call});
  }
  const blockcompact::ParallelFor parallel_for =
      is_on_open_mp ? OpenMpParallelFor() : HostParallelFor(std::nullopt);
  blockcompact::Status status;
  {
    const py::gil_scoped_release unlocked;
    status =
        is_on_device
            ? blockcompact::DevicePoolScoreSequences({pool, ord}, std::move(sequences))
            : blockcompact::PoolScoreSequences({pool, ord}, std::move(sequences), parallel_for);
  }
  return StatusTuple(status);
}

// An address in a row of a table whose rows are `stride` elements apart.
int32_t* RowAt(const py::handle& address, const py::handle& stride, int64_t row) {
  return reinterpret_cast<int32_t*>(address.cast<uintptr_t>()) + stride.cast<int64_t>() * row;
}

[[noreturn]] void Refuse(const std::string& argument, int64_t value, const std::string& expected) {
  throw std::invalid_argument("`" + argument + "` is " + std::to_string(value) + "; expected " +
                              expected);
}

// The counts of one sequence and the range of the blocks that it may write into its table.
void CheckEstimate(const blockcompact::EstimateCall& call,
                   const blockcompact::EstimateSequence& sequence, int64_t num_physical_blocks,
                   int64_t num_blocks) {
  const int64_t num_candidates = sequence.moments.num_keys;
  if (call.num_sinks < 0) Refuse("num_sinks", call.num_sinks, "at least 0");
  if (sequence.num_chosen < call.num_sinks || sequence.num_chosen > num_candidates) {
    Refuse("num_chosen", sequence.num_chosen,
           "`num_sinks` (" + std::to_string(call.num_sinks) + ") to `num_candidates` (" +
               std::to_string(num_candidates) + ")");
  }
  if (num_physical_blocks < num_candidates) {
    Refuse("physical_blocks.size", num_physical_blocks,
           "at least `num_candidates` (" + std::to_string(num_candidates) + ")");
  }
  if (sequence.exact.num_entries < call.num_sinks) {
    Refuse("exact_table.size", sequence.exact.num_entries,
           "at least `num_sinks` (" + std::to_string(call.num_sinks) + ")");
  }
  if (sequence.exact.num_keys <= call.num_sinks * call.block_tokens) {
    Refuse("num_exact_keys", sequence.exact.num_keys,
           "more than the keys of the sinks (" +
               std::to_string(call.num_sinks * call.block_tokens) + ")");
  }
  for (int64_t block = 0; block < num_candidates; ++block) {
    const int32_t physical_block = sequence.physical_blocks[block];
    if (physical_block < 0 || physical_block >= num_blocks) {
      Refuse("physical_blocks[" + std::to_string(block) + "]", physical_block,
             "a block of the pool of keys, 0 to " + std::to_string(num_blocks - 1));
    }
  }
}

// A pool is (ID, ord, layer). Sequences are (table of moments, candidates, exact table, its keys,
// physical blocks, number to choose, address and row stride of the chosen, of the table), and the
// first token of each is given beside them.
py::tuple PoolChooseByEstimate(const std::tuple<int64_t, uint32_t, int64_t>& moments,
                               const std::tuple<int64_t, uint32_t, int64_t>& keys,
                               const py::sequence& given, const std::vector<int64_t>& tokens,
                               int64_t row, const std::tuple<uintptr_t, int64_t, int64_t>& queries,
                               const py::tuple& shape, float scale, bool is_on_open_mp) {
  const auto [moments_id, moments_ord, moments_layer] = moments;
  const auto [keys_id, keys_ord, keys_layer] = keys;
  const auto [address, head_stride, token_stride] = queries;
  blockcompact::EstimateCall call;
  call.num_query_heads = shape[0].cast<int64_t>();
  call.head_dim = shape[1].cast<int64_t>();
  const auto element_bytes = shape[2].cast<int64_t>();
  call.type = TypeOf(element_bytes);
  call.block_tokens = shape[3].cast<int64_t>();
  call.num_sinks = shape[4].cast<int64_t>();
  const auto num_blocks = shape[5].cast<int64_t>();
  call.scale = scale;
  if (tokens.size() != given.size()) throw std::invalid_argument("`tokens` differ in number");
  std::vector<blockcompact::EstimateSequence> sequences;
  for (const py::handle item : given) {
    const auto fields = item.cast<py::tuple>();
    for (const size_t table : {0U, 2U, 4U}) {
      if (!TableArray::check_(fields[table])) {
        throw std::invalid_argument("tables must be dense int32 arrays");
      }
    }
    const auto table_of = [&](size_t place) {
      return py::reinterpret_borrow<TableArray>(fields[place]);
    };
    blockcompact::EstimateSequence sequence;
    sequence.moments = KeysOf(moments_layer, table_of(0), fields[1].cast<int64_t>());
    sequence.exact = KeysOf(keys_layer, table_of(2), fields[3].cast<int64_t>());
    sequence.query = {reinterpret_cast<const std::byte*>(address) +
                          tokens[sequences.size()] * token_stride * element_bytes,
                      head_stride * element_bytes, 0};
    sequence.physical_blocks = table_of(4).data();
    sequence.num_chosen = fields[5].cast<int64_t>();
    CheckEstimate(call, sequence, table_of(4).size(), num_blocks);
    sequence.chosen = RowAt(fields[6], fields[7], row);
    sequence.table = RowAt(fields[8], fields[9], row);
    sequences.push_back(sequence);
  }
  const blockcompact::ParallelFor parallel_for =
      is_on_open_mp ? OpenMpParallelFor() : HostParallelFor(std::nullopt);
  blockcompact::EstimateResult result;
  {
    const py::gil_scoped_release unlocked;
    result = blockcompact::PoolChooseByEstimate({moments_id, moments_ord}, {keys_id, keys_ord},
                                                call, std::move(sequences), parallel_for);
  }
  return py::make_tuple(static_cast<int32_t>(result.status.code), result.status.row,
                        result.sequence, result.block);
}

py::tuple PoolSummarizeBlocks(int64_t pool, uint32_t ord, int64_t layer, const TableArray& table,
                              int64_t num_keys, py::array min_keys, py::array max_keys,
                              std::optional<int64_t> num_threads) {
  if (!IsDense(min_keys) || !IsDense(max_keys) || min_keys.nbytes() != max_keys.nbytes()) {
    throw std::invalid_argument("`min_keys` and `max_keys` must be dense and equally large");
  }
  const blockcompact::SummaryCall call{TypeOf(min_keys.itemsize()),
                                       static_cast<std::byte*>(min_keys.mutable_data()),
                                       static_cast<std::byte*>(max_keys.mutable_data())};
  const blockcompact::ParallelFor parallel_for = HostParallelFor(num_threads);
  blockcompact::Status status;
  {
    const py::gil_scoped_release unlocked;
    status = blockcompact::PoolSummarizeBlocks({pool, ord}, KeysOf(layer, table, num_keys), call,
                                               parallel_for);
  }
  return StatusTuple(status);
}

}  // namespace

void DefineBlockScores(py::module_& module) {
  module.def("pool_score_blocks", &PoolScoreBlocks, py::arg("pool"), py::arg("ord"),
             py::arg("layer"), py::arg("block_table").noconvert(), py::arg("num_keys"),
             py::arg("queries").noconvert(), py::arg("scale"), py::arg("reduction"),
             py::arg("scores").noconvert(), py::arg("num_threads"));
  module.def("pool_score_sequences", &PoolScoreSequences, py::arg("pool"), py::arg("ord"),
             py::arg("layer"), py::arg("sequences"), py::arg("shape"), py::arg("scale"),
             py::arg("reduction"), py::arg("row_stride"), py::arg("is_on_open_mp"),
             py::arg("is_on_device"));
  module.def("pool_choose_by_estimate", &PoolChooseByEstimate, py::arg("moments"), py::arg("keys"),
             py::arg("sequences"), py::arg("tokens"), py::arg("row"), py::arg("queries"),
             py::arg("shape"), py::arg("scale"), py::arg("is_on_open_mp"));
  module.def("pool_summarize_blocks", &PoolSummarizeBlocks, py::arg("pool"), py::arg("ord"),
             py::arg("layer"), py::arg("block_table").noconvert(), py::arg("num_keys"),
             py::arg("min_keys").noconvert(), py::arg("max_keys").noconvert(),
             py::arg("num_threads"));
}

}  // namespace blockcompact_ffi
