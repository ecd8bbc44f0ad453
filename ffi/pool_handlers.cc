#include <algorithm>
#include <exception>

#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "buffers.h"
#include "handlers.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::PoolRef;
using blockcompact::Rows;
using blockcompact::Status;

using Ord = ffi::Buffer<ffi::U32, 1>;
using OrdResult = ffi::ResultBuffer<ffi::U32, 1>;

// What a device refuses comes as an exception, which may not pass through XLA.
template <typename Call>
ffi::Error Run(const Call& call, Status* done) {
  try {
    *done = call();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

uint32_t ReadOrd(const Ord& ord) { return ord.element_count() == 1 ? *ord.typed_data() : 0; }

ffi::Error Pack(ffi::ThreadPool threads, Ord ord_plain, Ord ord_packed, Int32Rows layer,
                Int32Rows plain_block, Int32Rows source_block, OrdResult next_ord_plain,
                OrdResult next_ord_packed, StatusResult status, int64_t plain_pool,
                int64_t packed_pool) {
  if (auto error = CheckRowArrays({&layer, &plain_block, &source_block}, status); error.failure()) {
    return error;
  }
  const PoolRef plain{plain_pool, ReadOrd(ord_plain)};
  PoolRef packed{packed_pool, ReadOrd(ord_packed)};
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  plain_block.typed_data(), source_block.typed_data(), nullptr};
  const auto call = [&] {
    return blockcompact::PoolPack(plain, &packed, rows, OnThreadPool(threads));
  };
  Status done;
  if (auto error = Run(call, &done); error.failure()) return error;
  WriteStatus(done, status);
  *next_ord_plain->typed_data() = plain.ord;
  *next_ord_packed->typed_data() = packed.ord;
  return ffi::Error::Success();
}

ffi::Error Upload(ffi::ThreadPool threads, Ord ord_packed, Ord ord_plain, Int32Rows layer,
                  Int32Rows source_block, Int32Rows physical_block, Int32Rows valid_tokens,
                  OrdResult next_ord_packed, OrdResult next_ord_plain, StatusResult status,
                  int64_t packed_pool, int64_t plain_pool) {
  if (auto error = CheckRowArrays({&layer, &source_block, &physical_block, &valid_tokens}, status);
      error.failure()) {
    return error;
  }
  const PoolRef packed{packed_pool, ReadOrd(ord_packed)};
  PoolRef plain{plain_pool, ReadOrd(ord_plain)};
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  source_block.typed_data(), physical_block.typed_data(),
                  valid_tokens.typed_data()};
  const auto call = [&] {
    return blockcompact::PoolUpload(packed, &plain, rows, OnThreadPool(threads));
  };
  Status done;
  if (auto error = Run(call, &done); error.failure()) return error;
  WriteStatus(done, status);
  *next_ord_packed->typed_data() = packed.ord;
  *next_ord_plain->typed_data() = plain.ord;
  return ffi::Error::Success();
}

ffi::Error BlockMove(ffi::ThreadPool threads, Ord ord, Int32Rows layer, Int32Rows from_block,
                     Int32Rows to_block, OrdResult next_ord, StatusResult status, int64_t pool) {
  if (auto error = CheckRowArrays({&layer, &from_block, &to_block}, status); error.failure()) {
    return error;
  }
  PoolRef ref{pool, ReadOrd(ord)};
  const Rows rows{static_cast<int64_t>(layer.element_count()), layer.typed_data(),
                  from_block.typed_data(), to_block.typed_data(), nullptr};
  const auto call = [&] { return blockcompact::PoolBlockMove(&ref, rows, OnThreadPool(threads)); };
  Status done;
  if (auto error = Run(call, &done); error.failure()) return error;
  WriteStatus(done, status);
  *next_ord->typed_data() = ref.ord;
  return ffi::Error::Success();
}

ffi::Error Gather(ffi::ThreadPool threads, Ord ord, Int32Rows layer, Int32Rows physical_block,
                  ffi::Result<ffi::AnyBuffer> out, OrdResult next_ord, StatusResult status,
                  int64_t pool, bool is_token_contiguous) {
  if (auto error = CheckRowArrays({&layer, &physical_block}, status); error.failure()) {
    return error;
  }
  const int64_t num_rows = static_cast<int64_t>(layer.element_count());
  const PoolRef ref{pool, ReadOrd(ord)};
  const Rows rows{num_rows, layer.typed_data(), physical_block.typed_data(), nullptr, nullptr};
  Status done{blockcompact::StatusCode::kUnknownPool, -1};
  const std::shared_ptr<blockcompact::Pool> found = blockcompact::FindAnyPool(pool);
  if (found != nullptr && found->plain() == nullptr) {
    done.code = blockcompact::StatusCode::kWrongPoolKind;
  } else if (found != nullptr) {
    const auto to =
        GatherTarget(*out, found->plain()->shape, num_rows, PlainOrder::kHnd, is_token_contiguous);
    if (to.has_error()) return to.error();
    const auto call = [&] {
      return blockcompact::PoolGather(ref, *to, rows, OnThreadPool(threads));
    };
    if (auto error = Run(call, &done); error.failure()) return error;
  }
  if (!done.ok()) {
    std::fill_n(static_cast<std::byte*>(out->untyped_data()), out->size_bytes(), std::byte{0});
  }
  *next_ord->typed_data() = ref.ord;
  WriteStatus(done, status);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kPoolPack, Pack,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ord>()        // ord_plain
                           .Arg<Ord>()        // ord_packed
                           .Arg<Int32Rows>()  // layer
                           .Arg<Int32Rows>()  // plain_block
                           .Arg<Int32Rows>()  // source_block
                           .Ret<Ord>()
                           .Ret<Ord>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("plain_pool")
                           .Attr<int64_t>("packed_pool"));

XLA_FFI_DEFINE_HANDLER(kPoolUpload, Upload,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ord>()        // ord_packed
                           .Arg<Ord>()        // ord_plain
                           .Arg<Int32Rows>()  // layer
                           .Arg<Int32Rows>()  // source_block
                           .Arg<Int32Rows>()  // physical_block
                           .Arg<Int32Rows>()  // valid_tokens
                           .Ret<Ord>()
                           .Ret<Ord>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("packed_pool")
                           .Attr<int64_t>("plain_pool"));

XLA_FFI_DEFINE_HANDLER(kPoolBlockMove, BlockMove,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ord>()
                           .Arg<Int32Rows>()  // layer
                           .Arg<Int32Rows>()  // from_block
                           .Arg<Int32Rows>()  // to_block
                           .Ret<Ord>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("pool"));

XLA_FFI_DEFINE_HANDLER(kPoolGather, Gather,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ord>()
                           .Arg<Int32Rows>()  // layer
                           .Arg<Int32Rows>()  // physical_block
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Ord>()
                           .Ret<Int32Rows>()
                           .Attr<int64_t>("pool")
                           .Attr<bool>("is_token_contiguous"));

}  // namespace

HandlerList PoolHandlers() {
  return {{"blockcompact_pool_pack", kPoolPack},
          {"blockcompact_pool_upload", kPoolUpload},
          {"blockcompact_pool_block_move", kPoolBlockMove},
          {"blockcompact_pool_gather", kPoolGather}};
}

}  // namespace blockcompact_ffi
