#include <cstring>

#include "blockcompact/attend.h"
#include "buffers.h"
#include "handlers.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::AttendCall;
using blockcompact::AttendSegment;
using blockcompact::AttendType;

using Ord = ffi::Buffer<ffi::U32, 1>;
using Number = ffi::Buffer<ffi::S32, 1>;
using Mass = ffi::Buffer<ffi::F32, 3>;
using RowFloats = ffi::Buffer<ffi::F32, 2>;

template <typename Byte>
blockcompact::RowsAt<Byte> DenseRows(Byte* base, int64_t num_queries, int64_t row_bytes) {
  return {base, num_queries * row_bytes, row_bytes};
}

AttendSegment SegmentOf(int64_t pool, const Ord& ord, const Number& layer, const Int32Rows& table,
                        const Number& num_keys) {
  return {{pool, *ord.typed_data()},
          *layer.typed_data(),
          table.typed_data(),
          static_cast<int64_t>(table.element_count()),
          *num_keys.typed_data()};
}

// Pool 0 is no pool: the second segment is absent then.
ffi::Error Attend(ffi::ThreadPool threads, ffi::AnyBuffer queries, Ord ord_0, Number layer_0,
                  Int32Rows table_0, Number num_keys_0, Ord ord_1, Number layer_1,
                  Int32Rows table_1, Number num_keys_1, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<Mass> block_mass, ffi::Result<RowFloats> log_sum_exp,
                  ffi::Result<Ord> next_ord_0, ffi::Result<Ord> next_ord_1, StatusResult status,
                  int64_t pool_0, int64_t pool_1, float scale, int64_t window_tokens) {
  const auto dims = queries.dimensions();
  const auto type = queries.element_type();
  if (dims.size() != 3 || (type != ffi::BF16 && type != ffi::F32) || out->element_type() != type ||
      out->size_bytes() != queries.size_bytes()) {
    return ffi::Error::InvalidArgument(
        "`queries` and the result must be equal [heads, queries, dim] of bfloat16 or float32");
  }
  for (const Number* number : {&layer_0, &num_keys_0, &layer_1, &num_keys_1}) {
    if (number->element_count() != 1) {
      return ffi::Error::InvalidArgument("`layer` and `num_keys` must have 1 element");
    }
  }
  const auto mass_dims = block_mass->dimensions();
  if (ord_0.element_count() != 1 || ord_1.element_count() != 1 || status->element_count() != 2 ||
      mass_dims[0] != dims[0] || mass_dims[1] != dims[1] ||
      static_cast<int64_t>(log_sum_exp->element_count()) != dims[0] * dims[1]) {
    return ffi::Error::InvalidArgument("an `ord` or a result has the wrong shape");
  }
  AttendCall call;
  call.type = type == ffi::F32 ? AttendType::kF32 : AttendType::kBf16;
  call.num_query_heads = dims[0];
  call.num_queries = dims[1];
  call.head_dim = dims[2];
  call.scale = scale;
  call.window_tokens = window_tokens;
  call.segments[0] = SegmentOf(pool_0, ord_0, layer_0, table_0, num_keys_0);
  call.segments[1] = SegmentOf(pool_1, ord_1, layer_1, table_1, num_keys_1);
  call.num_segments = pool_1 == 0 ? 1 : 2;
  const int64_t row_bytes = dims[2] * static_cast<int64_t>(call.type);
  call.queries =
      DenseRows(static_cast<const std::byte*>(queries.untyped_data()), dims[1], row_bytes);
  call.out = DenseRows(static_cast<std::byte*>(out->untyped_data()), dims[1], row_bytes);
  call.max_blocks = mass_dims[2];
  if (call.max_blocks > 0) {
    call.block_mass = DenseRows(reinterpret_cast<std::byte*>(block_mass->typed_data()), dims[1],
                                4 * call.max_blocks);
  }
  call.log_sum_exp = log_sum_exp->typed_data();
  const blockcompact::Status done = blockcompact::PoolAttend(call, OnThreadPool(threads));
  if (!done.ok()) {
    std::memset(out->untyped_data(), 0, out->size_bytes());
    std::memset(block_mass->typed_data(), 0, block_mass->size_bytes());
    std::memset(log_sum_exp->typed_data(), 0, log_sum_exp->size_bytes());
  }
  *next_ord_0->typed_data() = *ord_0.typed_data();
  *next_ord_1->typed_data() = *ord_1.typed_data();
  WriteStatus(done, status);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kPoolAttend, Attend,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // queries
                           .Arg<Ord>()             // of the first segment
                           .Arg<Number>()          // layer
                           .Arg<Int32Rows>()       // block_table
                           .Arg<Number>()          // num_keys
                           .Arg<Ord>()             // of the second segment
                           .Arg<Number>()          // layer
                           .Arg<Int32Rows>()       // block_table
                           .Arg<Number>()          // num_keys
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<Mass>()            // block_mass
                           .Ret<RowFloats>()       // log_sum_exp
                           .Ret<Ord>()             // of the first segment
                           .Ret<Ord>()             // of the second segment
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("pool_0")
                           .Attr<int64_t>("pool_1")
                           .Attr<float>("scale")
                           .Attr<int64_t>("window_tokens"));

}  // namespace

HandlerList AttendHandlers() { return {{"blockcompact_pool_attend", kPoolAttend}}; }

}  // namespace blockcompact_ffi
