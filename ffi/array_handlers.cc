#include <algorithm>

#include "array_calls.h"
#include "blockcompact/block_move.h"

namespace blockcompact_ffi {
namespace {

using blockcompact::PackedView;
using blockcompact::PlainView;
using blockcompact::Rows;

// Dense layers seen as one layer of all their blocks.
template <typename View>
View JoinLayers(View view) {
  view.num_blocks *= view.num_layers();
  view.layer_bases.resize(1);
  return view;
}

// Rows 0 ... num_rows - 1, each from and to its own number.
std::vector<int32_t> Identity(int64_t num_rows) {
  std::vector<int32_t> numbers(static_cast<size_t>(num_rows));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int32_t>(i);
  return numbers;
}

// The host's memory and XLA's own threads.
struct CpuBackend {
  ffi::ThreadPool threads;

  ffi::Error CheckReads(const char*, const ffi::AnyBuffer&) { return ffi::Error::Success(); }

  ffi::Error PackAll(const PlainView& from, const PackedView& to) {
    const std::vector<int32_t> numbers = Identity(from.num_layers() * from.num_blocks);
    blockcompact::PackRows(JoinLayers(from), JoinLayers(to), AllRows(numbers),
                           OnThreadPool(threads));
    return ffi::Error::Success();
  }

  ffi::Error UnpackAll(const PackedView& from, const PlainView& to) {
    const std::vector<int32_t> numbers = Identity(to.num_layers() * to.num_blocks);
    blockcompact::UnpackRows(JoinLayers(from), JoinLayers(to), AllRows(numbers),
                             OnThreadPool(threads));
    return ffi::Error::Success();
  }

  ffi::Error Unpack(const PackedView& from, const PlainView& to, const CheckedRows& call) {
    if (Check(call)) blockcompact::UnpackRows(from, to, call.rows, OnThreadPool(threads));
    return ffi::Error::Success();
  }

  ffi::Error Move(const PoolBlocks& pool, const CheckedRows& call) {
    if (!Check(call)) return ffi::Error::Success();
    std::vector<std::byte*> bases;
    for (int64_t l = 0; l < pool.num_layers; ++l) {
      bases.push_back(pool.base + l * pool.num_blocks * pool.block_bytes);
    }
    blockcompact::MoveBlocks(blockcompact::DenseBlockSpace(std::move(bases), pool.block_bytes),
                             call.rows, OnThreadPool(threads));
    return ffi::Error::Success();
  }

  ffi::Error Gather(const PlainView& from, const PlainView& to, const CheckedRows& call,
                    const ffi::AnyBuffer& out) {
    if (Check(call)) {
      blockcompact::GatherRows(from, to, call.rows, OnThreadPool(threads));
    } else {
      std::fill_n(static_cast<std::byte*>(out.untyped_data()), out.size_bytes(), std::byte{0});
    }
    return ffi::Error::Success();
  }

  ffi::Error Score(const BlocksView& blocks, const KeyOperands& operands,
                   const blockcompact::ScoreCall& call, Scores& scores) {
    auto keys = KeysOf(operands.layer, operands.block_table, operands.num_keys);
    if (keys.has_error()) return keys.error();
    keys->plain = blocks.plain.get();
    keys->packed = blocks.packed.get();
    const blockcompact::Status done = blockcompact::ScoreBlocks(*keys, call, OnThreadPool(threads));
    if (!done.ok()) std::fill_n(scores.typed_data(), scores.element_count(), 0.0F);
    WriteStatus(done, operands.status);
    return ffi::Error::Success();
  }

 private:
  static Rows AllRows(const std::vector<int32_t>& numbers) {
    return {static_cast<int64_t>(numbers.size()), nullptr, numbers.data(), nullptr, nullptr};
  }

  // Whether the rows may move; writes the status.
  static bool Check(const CheckedRows& call) {
    const blockcompact::Status checked = blockcompact::CheckRows(call.rows, call.limits);
    WriteStatus(checked, call.status);
    return checked.ok();
  }
};

}  // namespace
}  // namespace blockcompact_ffi

namespace xla::ffi {

template <>
struct CtxDecoding<blockcompact_ffi::CpuBackend> {
  using Type = blockcompact_ffi::CpuBackend;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    auto threads = CtxDecoding<ThreadPool>::Decode(api, context, diagnostic);
    if (!threads.has_value()) return std::nullopt;
    return Type{*threads};
  }
};

}  // namespace xla::ffi

namespace blockcompact_ffi {

HandlerList ArrayHandlers() { return ArrayCalls<CpuBackend>::Handlers(); }

}  // namespace blockcompact_ffi
