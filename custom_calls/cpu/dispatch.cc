#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "blockcompact/head_kernels.h"

namespace blockcompact {
namespace {

constexpr char kForceVariable[] = "BLOCKCOMPACT_FORCE_IMPL";
constexpr int32_t kNotForced = -1;
std::atomic<int32_t> forced_impl{kNotForced};

std::string Names(const std::vector<Impl>& impls) {
  std::string names;
  for (Impl impl : impls) names += (names.empty() ? "" : ", ") + std::string(ImplName(impl));
  return names;
}

Impl ParseImpl(const std::string& name, const std::string& origin) {
  for (Impl impl : AvailableImpls()) {
    if (name == ImplName(impl)) return impl;
  }
  bool is_known = name == ImplName(Impl::kAvx2) || name == ImplName(Impl::kAvx512);
  throw std::invalid_argument(origin + " names " + (is_known ? "the unavailable" : "the unknown") +
                              " implementation '" + name +
                              "'; this machine and build have: " + Names(AvailableImpls()));
}

Impl DefaultImpl() {
  const char* forced = std::getenv(kForceVariable);
  if (forced != nullptr && forced[0] != '\0') return ParseImpl(forced, kForceVariable);
  return AvailableImpls().back();
}

void Fill(HeadKernels* kernels, const HeadKernels& fallback) {
  if (kernels->pack_k == nullptr) kernels->pack_k = fallback.pack_k;
  if (kernels->pack_v == nullptr) kernels->pack_v = fallback.pack_v;
  if (kernels->unpack_k == nullptr) kernels->unpack_k = fallback.unpack_k;
  if (kernels->unpack_v == nullptr) kernels->unpack_v = fallback.unpack_v;
}

}  // namespace

const char* ImplName(Impl impl) {
  switch (impl) {
    case Impl::kAvx2:
      return "avx2";
    case Impl::kAvx512:
      return "avx512";
    case Impl::kScalar:
      break;
  }
  return "scalar";
}

std::vector<Impl> CompiledImpls() {
#if defined(__x86_64__)
  return {Impl::kScalar, Impl::kAvx2, Impl::kAvx512};
#else
  return {Impl::kScalar};
#endif
}

std::vector<Impl> AvailableImpls() {
  std::vector<Impl> impls = {Impl::kScalar};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) impls.push_back(Impl::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    impls.push_back(Impl::kAvx512);
  }
#endif
  return impls;
}

Impl ChosenImpl() {
  const int32_t forced = forced_impl.load(std::memory_order_relaxed);
  if (forced != kNotForced) return static_cast<Impl>(forced);
  static const Impl chosen = DefaultImpl();
  return chosen;
}

void ForceImpl(const std::string& name) {
  forced_impl.store(name.empty() ? kNotForced : static_cast<int32_t>(ParseImpl(name, "`name`")),
                    std::memory_order_relaxed);
}

HeadKernels SelectHeadKernels(Impl impl, PackedLayout layout, int64_t element_bytes) {
  HeadKernels kernels;
#if defined(__x86_64__)
  if (impl == Impl::kAvx512) kernels = avx512::Kernels(layout, element_bytes);
  if (impl == Impl::kAvx2) kernels = avx2::Kernels(layout, element_bytes);
#else
  static_cast<void>(impl);
#endif
  Fill(&kernels, scalar::Kernels(layout, element_bytes));
  return kernels;
}

}  // namespace blockcompact
