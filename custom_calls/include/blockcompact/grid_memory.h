// Memory accesses of one grid thread. On the host they check what the device demands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "blockcompact/host_device.h"

// A test defines it to see each store of a grid thread.
#ifndef BLOCKCOMPACT_ON_STORE
#define BLOCKCOMPACT_ON_STORE(address, num_bytes)
#endif

namespace blockcompact {

inline constexpr int kGridChunkBytes = 16;  // the widest access of one thread

// Elements that are loaded or stored at once.
template <typename T, int kNum>
struct alignas(sizeof(T) * kNum) Run {
  T elements[kNum];
};

template <int kBytes>
struct AccessWord;
#if defined(__CUDACC__)
template <>
struct AccessWord<16> {
  using Type = uint4;
};
#else
struct alignas(16) HostWord16 {
  uint64_t words[2];
};
template <>
struct AccessWord<16> {
  using Type = HostWord16;
};
#endif
template <>
struct AccessWord<8> {
  using Type = uint64_t;
};
template <>
struct AccessWord<4> {
  using Type = uint32_t;
};
template <>
struct AccessWord<2> {
  using Type = uint16_t;
};
template <>
struct AccessWord<1> {
  using Type = uint8_t;
};

// A device faults at an access that its width does not divide; so does the host here.
template <int kBytes>
BLOCKCOMPACT_HOST_DEVICE inline void CheckAligned(const std::byte* address) {
#if !defined(__CUDA_ARCH__)
  if (reinterpret_cast<uintptr_t>(address) % kBytes != 0) std::abort();
#else
  static_cast<void>(address);
#endif
}

template <typename T, int kNum>
BLOCKCOMPACT_HOST_DEVICE inline Run<T, kNum> LoadRun(const std::byte* from) {
  constexpr int kBytes = sizeof(T) * kNum;
  using Word = typename AccessWord<kBytes>::Type;
  CheckAligned<kBytes>(from);
  Word word;
#if defined(__CUDA_ARCH__)
  word = *reinterpret_cast<const Word*>(from);
#else
  std::memcpy(&word, from, kBytes);
#endif
  Run<T, kNum> run;
  memcpy(&run, &word, kBytes);
  return run;
}

template <typename T, int kNum>
BLOCKCOMPACT_HOST_DEVICE inline void StoreRun(std::byte* to, const Run<T, kNum>& run) {
  constexpr int kBytes = sizeof(T) * kNum;
  using Word = typename AccessWord<kBytes>::Type;
  CheckAligned<kBytes>(to);
  Word word;
  memcpy(&word, &run, kBytes);
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<Word*>(to) = word;
#else
  std::memcpy(to, &word, kBytes);
  BLOCKCOMPACT_ON_STORE(to, kBytes);
#endif
}

// The grid's threads run one after another on the host.
template <typename T>
BLOCKCOMPACT_HOST_DEVICE inline void AtomicMin(T* place, T value) {
#if defined(__CUDA_ARCH__)
  atomicMin(place, value);
#else
  if (value < *place) *place = value;
#endif
}

}  // namespace blockcompact
