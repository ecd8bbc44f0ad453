#include "cuda_handlers.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "array_calls.h"
#include "launch.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::GridFault;
using blockcompact::GridKeys;
using blockcompact::GridOrder;
using blockcompact::GridPacked;
using blockcompact::GridPlain;
using blockcompact::GridQueries;
using blockcompact::GridRows;
using blockcompact::PackedView;
using blockcompact::PlainView;
using blockcompact::Rows;

using Stream = ffi::PlatformStream<cudaStream_t>;
namespace cuda = blockcompact::cuda;

ffi::Error ToError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error) + " (" +
                              cudaGetErrorName(error) + ")");
}

// Dense views: their layers lie at equal distances.
template <typename View>
int64_t LayerBytes(const View& view) {
  return view.num_layers() > 1 ? view.layer_bases[1] - view.layer_bases[0] : 0;
}

GridPlain GridOf(const PlainView& view) {
  return {view.layer_bases.empty() ? nullptr : view.layer_bases[0], LayerBytes(view), view.strides};
}

GridPacked GridOf(const PackedView& view) {
  return {view.layer_bases.empty() ? nullptr : view.layer_bases[0], LayerBytes(view),
          view.block_bytes};
}

template <typename T>
T* Take(ffi::ScratchAllocator& scratch, int64_t num_bytes) {
  constexpr size_t kAlignment = 256;
  const auto memory =
      scratch.Allocate(static_cast<size_t>(std::max<int64_t>(num_bytes, 1)), kAlignment);
  return memory.has_value() ? static_cast<T*>(*memory) : nullptr;
}

ffi::Error OutOfScratch(int64_t num_bytes) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "no " + std::to_string(num_bytes) + " bytes of scratch memory on the device");
}

// Pageable host memory would fault in the kernel and take the whole context with it.
ffi::Error CheckDeviceReads(const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.size_bytes() == 0) return ffi::Error::Success();
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, buffer.untyped_data());
  if (error != cudaSuccess) return ToError(error, "cudaPointerGetAttributes");
  if (attributes.devicePointer == buffer.untyped_data()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string("`") + name +
                                     "` lies in memory that the device cannot read; put it on the "
                                     "device or in pinned host memory");
}

// A stream of the device and memory that lives as long as the call.
struct CudaBackend {
  cudaStream_t stream;
  ffi::ScratchAllocator scratch;

  ffi::Error CheckReads(const char* name, const ffi::AnyBuffer& buffer) {
    return CheckDeviceReads(name, buffer);
  }

  ffi::Error PackAll(const PlainView& from, const PackedView& to) {
    GridRows grid;
    if (auto error = AllRows(from, &grid); error.failure()) return error;
    return ToError(cuda::PackRows(to.layout, GridOf(from), GridOf(to), to.shape, grid, stream),
                   "pack");
  }

  ffi::Error UnpackAll(const PackedView& from, const PlainView& to) {
    GridRows grid;
    if (auto error = AllRows(from, &grid); error.failure()) return error;
    return ToError(cuda::UnpackRows(from.layout, GridOf(from), GridOf(to), to.shape, grid, stream),
                   "unpack");
  }

  ffi::Error Unpack(const PackedView& from, const PlainView& to, const CheckedRows& call) {
    GridRows grid;
    if (auto error = Check(call, &grid); error.failure()) return error;
    return ToError(cuda::UnpackRows(from.layout, GridOf(from), GridOf(to), to.shape, grid, stream),
                   "unpack_scatter");
  }

  ffi::Error Move(const PoolBlocks& pool, const CheckedRows& call) {
    blockcompact::GridMove move;
    move.pool = pool.base;
    move.block_bytes = pool.block_bytes;
    if (auto error = Check(call, &move.grid); error.failure()) return error;
    const int64_t saved_bytes = call.rows.num_rows * move.block_bytes;
    move.saved = Take<std::byte>(scratch, saved_bytes);
    if (move.saved == nullptr) return OutOfScratch(saved_bytes);
    return ToError(cuda::MoveBlocks(move, stream), "block_move");
  }

  // The kernel itself writes zeros where the rows are refused.
  ffi::Error Gather(const PlainView& from, const PlainView& to, const CheckedRows& call,
                    const ffi::AnyBuffer&) {
    GridRows grid;
    if (auto error = Check(call, &grid); error.failure()) return error;
    return ToError(cuda::GatherRows(GridOf(from), GridOf(to), from.shape, grid, stream), "gather");
  }

  // The kernels themselves write zeros where the keys are refused.
  ffi::Error Score(const BlocksView& blocks, const KeyOperands& operands,
                   const blockcompact::ScoreCall& call, Scores&) {
    GridKeys keys = KeysOf(blocks, operands);
    const GridQueries queries{
        {call.queries.base, call.queries.head_stride_bytes, call.queries.query_stride_bytes},
        call.num_query_heads,
        call.num_queries,
        call.scale};
    const int64_t scratch_bytes =
        call.reduction == blockcompact::BlockReduction::kTokens
            ? 0
            : queries.num_rows() * keys.num_tokens() * static_cast<int64_t>(sizeof(float));
    keys.fault = Take<GridFault>(scratch, sizeof(GridFault));
    auto* token_scores = Take<float>(scratch, scratch_bytes);
    if (keys.fault == nullptr || token_scores == nullptr) return OutOfScratch(scratch_bytes);
    const cudaError_t error = cuda::CheckKeys(keys, operands.status->typed_data(), stream);
    if (error != cudaSuccess) return ToError(error, "key checks");
    return ToError(
        cuda::ScoreBlocks(OrderOf(blocks), keys, queries,
                          {call.reduction, token_scores, call.scores, call.row_stride}, stream),
        "score_blocks");
  }

 private:
  static GridOrder OrderOf(const BlocksView& blocks) {
    if (blocks.plain != nullptr) return GridOrder::kPlain;
    const bool is_amx = blocks.packed->layout == blockcompact::PackedLayout::kAmx;
    return is_amx ? GridOrder::kAmx : GridOrder::kVec;
  }

  static GridKeys KeysOf(const BlocksView& blocks, const KeyOperands& operands) {
    GridKeys keys;
    if (blocks.plain != nullptr) {
      keys.plain = GridOf(*blocks.plain);
      keys.num_layers = blocks.plain->num_layers();
      keys.num_blocks = blocks.plain->num_blocks;
    } else {
      keys.packed = GridOf(*blocks.packed);
      keys.num_layers = blocks.packed->num_layers();
      keys.num_blocks = blocks.packed->num_blocks;
    }
    keys.shape = blocks.shape();
    keys.num_entries = static_cast<int64_t>(operands.block_table.element_count());
    keys.layer = operands.layer.typed_data();
    keys.block_table = operands.block_table.typed_data();
    keys.num_keys = operands.num_keys.typed_data();
    return keys;
  }

  // The rows of a call with their scratch, checked on the stream; writes the status.
  ffi::Error Check(const CheckedRows& call, GridRows* grid) {
    *grid = {call.rows, call.limits, Take<GridFault>(scratch, sizeof(GridFault)), nullptr};
    const int64_t owner_bytes = cuda::OwnerBytes(call.limits);
    const bool has_owner = call.rows.to_block != nullptr;
    if (has_owner) grid->owner = Take<int32_t>(scratch, owner_bytes);
    if (grid->fault == nullptr || (has_owner && grid->owner == nullptr)) {
      return OutOfScratch(owner_bytes);
    }
    return ToError(cuda::CheckRows(*grid, call.status->typed_data(), stream), "row checks");
  }

  // All blocks of a dense array, each from and to its own number; nothing is checked or refused.
  template <typename View>
  ffi::Error AllRows(const View& view, GridRows* grid) {
    const int64_t num_rows = view.num_layers() * view.num_blocks;
    auto* fault = Take<GridFault>(scratch, sizeof(GridFault));
    if (fault == nullptr) return OutOfScratch(sizeof(GridFault));
    const Rows rows{num_rows, nullptr, nullptr, nullptr, nullptr};
    *grid = {rows, {1, num_rows, num_rows, view.shape.block_tokens}, fault, nullptr};
    return ToError(cudaMemsetAsync(fault, 0xff, sizeof(GridFault), stream), "cudaMemsetAsync");
  }
};

}  // namespace
}  // namespace blockcompact_ffi

namespace xla::ffi {

template <>
struct CtxDecoding<blockcompact_ffi::CudaBackend> {
  using Type = blockcompact_ffi::CudaBackend;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<blockcompact_ffi::Stream>::Decode(api, context, diagnostic);
    auto scratch = CtxDecoding<ScratchAllocator>::Decode(api, context, diagnostic);
    if (!stream.has_value() || !scratch.has_value()) return std::nullopt;
    return Type{*stream, std::move(*scratch)};
  }
};

}  // namespace xla::ffi

namespace blockcompact_ffi {

HandlerList CudaHandlers() { return ArrayCalls<CudaBackend>::Handlers(); }

}  // namespace blockcompact_ffi
