#include "buffers.h"

#include <algorithm>
#include <memory>

#include "shared_tasks.h"

namespace blockcompact_ffi {

using blockcompact::BlockShape;
using blockcompact::PackedLayout;
using blockcompact::PackedView;
using blockcompact::PlainView;

namespace {

ffi::Unexpected<ffi::Error> Invalid(const std::string& message) {
  return ffi::Unexpected<ffi::Error>(ffi::Error::InvalidArgument(message));
}

std::vector<std::byte*> LayerBases(const ffi::AnyBuffer& buffer, int64_t num_layers,
                                   int64_t layer_bytes) {
  std::vector<std::byte*> bases;
  auto* base = static_cast<std::byte*>(buffer.untyped_data());
  for (int64_t layer = 0; layer < num_layers; ++layer) bases.push_back(base + layer * layer_bytes);
  return bases;
}

}  // namespace

PlainDims DensePlainDims(const BlockShape& shape, PlainOrder order) {
  const int64_t head_dim = shape.head_dim;
  const int64_t kv = shape.num_heads * shape.block_tokens * head_dim;
  if (order == PlainOrder::kNhd) {
    return {kv, 2 * kv, head_dim, shape.num_heads * head_dim};
  }
  return {kv, 2 * kv, shape.block_tokens * head_dim, head_dim};
}

PlainDims TokenContiguousDims(const BlockShape& shape, int64_t num_blocks) {
  const int64_t block = shape.block_tokens * shape.head_dim;
  return {shape.num_heads * num_blocks * block, block, num_blocks * block, shape.head_dim};
}

blockcompact::PlainStrides ToBytes(const PlainDims& dims, int64_t element_bytes) {
  return {dims.kv * element_bytes, dims.block * element_bytes, dims.head * element_bytes,
          dims.token * element_bytes};
}

ffi::ErrorOr<PlainView> PlainViewOf(const char* name, const ffi::AnyBuffer& buffer, int64_t order) {
  const auto dims = buffer.dimensions();
  const size_t rank = dims.size();
  if (rank != 5 && rank != 6) {
    return Invalid(std::string("`") + name + "` has rank " + std::to_string(rank) +
                   "; expected 5, or 6 with a leading layer axis");
  }
  const size_t first = rank - 5;
  if (dims[first + 1] != 2) return Invalid(std::string("`") + name + "` has no K/V axis of 2");
  const bool is_nhd = order == static_cast<int64_t>(PlainOrder::kNhd);
  PlainView view;
  view.num_blocks = dims[first];
  view.shape = {is_nhd ? dims[first + 3] : dims[first + 2],
                is_nhd ? dims[first + 2] : dims[first + 3], dims[first + 4],
                static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()))};
  const std::string problem = blockcompact::PlainShapeProblem(view.shape);
  if (!problem.empty()) return Invalid(std::string("`") + name + "`: " + problem);
  view.strides =
      ToBytes(DensePlainDims(view.shape, static_cast<PlainOrder>(order)), view.shape.element_bytes);
  view.layer_bases =
      LayerBases(buffer, first == 0 ? 1 : dims[0], view.num_blocks * view.strides.block_bytes);
  return view;
}

ffi::ErrorOr<PackedView> PackedViewOf(const char* name, const ffi::AnyBuffer& buffer,
                                      int64_t layout, int64_t num_layers) {
  const auto dims = buffer.dimensions();
  const size_t rank = dims.size();
  if (rank != 4 && rank != 5) {
    return Invalid(std::string("`") + name + "` has rank " + std::to_string(rank) +
                   "; expected 4, or 5 with a leading layer axis");
  }
  const size_t first = rank - 4;
  if (first == 1 && dims[0] != num_layers) {
    return Invalid(std::string("`") + name + "` has " + std::to_string(dims[0]) +
                   " layers; expected " + std::to_string(num_layers));
  }
  if (dims[first + 2] % 2 != 0) {
    return Invalid(std::string("`") + name + "` has an odd third axis; expected 2 * block_tokens");
  }
  PackedView view;
  view.num_blocks = dims[first];
  view.shape = {dims[first + 1], dims[first + 2] / 2, dims[first + 3],
                static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()))};
  view.layout = static_cast<PackedLayout>(layout);
  const std::string problem = blockcompact::PackedShapeProblem(view.layout, view.shape);
  if (!problem.empty()) return Invalid(std::string("`") + name + "`: " + problem);
  view.block_bytes = view.shape.packed_row_bytes();
  view.layer_bases =
      LayerBases(buffer, num_layers, first == 0 ? 0 : view.num_blocks * view.block_bytes);
  return view;
}

ffi::ErrorOr<PlainView> GatherTarget(const ffi::AnyBuffer& out, const BlockShape& shape,
                                     int64_t num_rows, PlainOrder order, bool is_token_contiguous) {
  const int64_t element_bytes = static_cast<int64_t>(ffi::ByteWidth(out.element_type()));
  const int64_t num_bytes = num_rows * shape.packed_row_bytes();
  if (element_bytes != shape.element_bytes || static_cast<int64_t>(out.size_bytes()) != num_bytes) {
    return Invalid("the gathered result has " + std::to_string(out.size_bytes()) +
                   " bytes; expected " + std::to_string(num_bytes) + " in elements of " +
                   std::to_string(shape.element_bytes) + " bytes");
  }
  const PlainDims dims =
      is_token_contiguous ? TokenContiguousDims(shape, num_rows) : DensePlainDims(shape, order);
  return PlainView{LayerBases(out, 1, 0), num_rows, shape, ToBytes(dims, element_bytes)};
}

ffi::Error CheckRowArrays(std::initializer_list<const Int32Rows*> arrays, StatusResult& status) {
  const size_t num_rows = (*arrays.begin())->element_count();
  for (const Int32Rows* array : arrays) {
    if (array->element_count() != num_rows) {
      return ffi::Error::InvalidArgument(
          "row arrays differ in length: " + std::to_string(array->element_count()) + " and " +
          std::to_string(num_rows));
    }
  }
  if (status->element_count() != 2) {
    return ffi::Error::InvalidArgument("the status result must have 2 elements");
  }
  return ffi::Error::Success();
}

ffi::Error CheckInPlace(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  if (in.untyped_data() == out.untyped_data()) return ffi::Error::Success();
  return ffi::Error::Internal(
      "the pool operand and result are different buffers; the call was "
      "lowered without input_output_aliases");
}

void WriteStatus(const blockcompact::Status& status, StatusResult& result) {
  result->typed_data()[0] = static_cast<int32_t>(status.code);
  result->typed_data()[1] = static_cast<int32_t>(status.row);
}

blockcompact::ParallelFor OnThreadPool(ffi::ThreadPool& pool) {
  return [&pool](int64_t num_tasks, const blockcompact::Task& task) {
    const int64_t num_helpers = std::min(pool.num_threads(), num_tasks) - 1;
    if (num_helpers <= 0) return blockcompact::SerialFor(num_tasks, task);
    const auto tasks = std::make_shared<SharedTasks>(num_tasks, task);
    for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([tasks] { tasks->Work(); });
    tasks->Work();
    tasks->Wait();
  };
}

}  // namespace blockcompact_ffi
