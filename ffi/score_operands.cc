#include "score_operands.h"

namespace blockcompact_ffi {

using blockcompact::AttendType;
using blockcompact::BlockReduction;
using blockcompact::KeyBlocks;
using blockcompact::PackedView;
using blockcompact::PlainView;
using blockcompact::ScoreCall;

ffi::ErrorOr<AttendType> TypeOf(const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::F32) return AttendType::kF32;
  if (buffer.element_type() == ffi::BF16) return AttendType::kBf16;
  return ffi::Unexpected<ffi::Error>(
      ffi::Error::InvalidArgument("keys and queries must be bfloat16 or float32"));
}

ffi::Error CheckNumbers(const Number& layer, const Number& num_keys) {
  if (layer.element_count() == 1 && num_keys.element_count() == 1) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("`layer` and `num_keys` must have 1 element");
}

ffi::ErrorOr<KeyBlocks> KeysOf(const Number& layer, const Int32Rows& table,
                               const Number& num_keys) {
  if (auto error = CheckNumbers(layer, num_keys); error.failure()) {
    return ffi::Unexpected<ffi::Error>(error);
  }
  KeyBlocks keys;
  keys.layer = *layer.typed_data();
  keys.block_table = table.typed_data();
  keys.num_entries = static_cast<int64_t>(table.element_count());
  keys.num_keys = *num_keys.typed_data();
  return keys;
}

ffi::Error BlocksView::Set(const ffi::AnyBuffer& blocks, int64_t layout) {
  if (layout >= static_cast<int64_t>(PlainOrder::kNhd)) {
    auto view = PlainViewOf("blocks", blocks, layout);
    if (view.has_error()) return view.error();
    plain = std::make_unique<PlainView>(*view);
  } else {
    const auto dims = blocks.dimensions();
    auto view = PackedViewOf("blocks", blocks, layout, dims.size() == 5 ? dims[0] : 1);
    if (view.has_error()) return view.error();
    packed = std::make_unique<PackedView>(*view);
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<ScoreCall> ScoreCallOf(const ffi::AnyBuffer& queries, int64_t num_entries,
                                    ffi::Result<Scores>& scores, int64_t block_tokens,
                                    int64_t reduction, float scale) {
  const auto type = TypeOf(queries);
  if (type.has_error()) return ffi::Unexpected<ffi::Error>(type.error());
  const auto dims = queries.dimensions();
  const auto out = scores->dimensions();
  ScoreCall call;
  call.reduction = static_cast<BlockReduction>(reduction);
  const int64_t columns =
      num_entries * (call.reduction == BlockReduction::kTokens ? block_tokens : 1);
  if (dims.size() != 3 || out[0] != dims[0] || out[1] != dims[1] || out[2] != columns) {
    return ffi::Unexpected<ffi::Error>(ffi::Error::InvalidArgument(
        "`queries` must be [heads, queries, dim] and the result have their rows"));
  }
  call.type = *type;
  call.num_query_heads = dims[0];
  call.num_queries = dims[1];
  call.head_dim = dims[2];
  call.scale = scale;
  const int64_t row_bytes = dims[2] * static_cast<int64_t>(call.type);
  call.queries = {static_cast<const std::byte*>(queries.untyped_data()), dims[1] * row_bytes,
                  row_bytes};
  call.scores = scores->typed_data();
  call.row_stride = columns;
  return call;
}

}  // namespace blockcompact_ffi
