// Working memory of a thread, kept between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockcompact {

// Hands out 64-byte aligned pieces of one allocation.
class Scratch {
 public:
  // Forgets what was handed out and makes room for num_bytes in at most num_pieces pieces.
  void Reset(int64_t num_bytes, int64_t num_pieces) {
    const size_t size = static_cast<size_t>(num_bytes + (num_pieces + 1) * kAlignment);
    if (memory_.size() < size) memory_.resize(size);
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    next_ = memory_.data() + (kAlignment - address % kAlignment) % kAlignment;
  }

  template <typename T>
  T* Take(int64_t count) {
    std::byte* piece = next_;
    const int64_t num_bytes = count * static_cast<int64_t>(sizeof(T));
    next_ += (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }

 private:
  static constexpr int64_t kAlignment = 64;
  std::vector<std::byte> memory_;
  std::byte* next_ = nullptr;
};

}  // namespace blockcompact
