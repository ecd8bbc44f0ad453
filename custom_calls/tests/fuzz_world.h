// Random pools for fuzz.cc, and where their elements lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <random>
#include <vector>

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t Below(int64_t limit) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit));
  }
  bool OneIn(int64_t count) { return Below(count) == 0; }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return *(values.begin() + Below(static_cast<int64_t>(values.size())));
  }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

// Aligned memory that ends where it ends: a step outside is seen by the sanitizer.
class Memory {
 public:
  Memory(int64_t size_bytes, Random& random) : size_bytes_(size_bytes) {
    bytes_.reset(static_cast<uint8_t*>(
        ::operator new(static_cast<size_t>(size_bytes), std::align_val_t{64})));
    for (int64_t i = 0; i < size_bytes; i += 4) {
      const uint32_t word = random.engine()();
      std::memcpy(&bytes_[i], &word, static_cast<size_t>(std::min<int64_t>(4, size_bytes - i)));
    }
  }
  uint8_t* data() { return bytes_.get(); }
  int64_t size_bytes() const { return size_bytes_; }
  std::vector<uint8_t> values() const { return {bytes_.get(), bytes_.get() + size_bytes_}; }

 private:
  struct Free {
    void operator()(uint8_t* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  int64_t size_bytes_;
  std::unique_ptr<uint8_t[], Free> bytes_;
};

// Everything below is written from the layouts' definition and uses nothing of the code under test.
struct World {
  int64_t layers, plain_blocks, packed_blocks, heads, tokens, dims, bytes;
  bool is_amx;
  int64_t layer_stride, block_stride, kv_stride, head_stride, token_stride;  // plain, in elements
  int64_t packed_layer_stride, packed_block_stride;

  int64_t region() const { return tokens * dims; }
  int64_t PlainSize() const {
    return (layers - 1) * layer_stride + (plain_blocks - 1) * block_stride + kv_stride +
           (heads - 1) * head_stride + (tokens - 1) * token_stride + dims;
  }
  int64_t PackedSize() const {
    return (layers - 1) * packed_layer_stride + (packed_blocks - 1) * packed_block_stride +
           2 * heads * region();
  }
  int64_t Plain(int64_t l, int64_t b, int64_t kv, int64_t h, int64_t t, int64_t d) const {
    return l * layer_stride + b * block_stride + kv * kv_stride + h * head_stride +
           t * token_stride + d;
  }
  int64_t Packed(int64_t l, int64_t b, int64_t kv, int64_t h, int64_t t, int64_t d) const {
    const int64_t base =
        l * packed_layer_stride + b * packed_block_stride + (2 * h + kv) * region();
    if (!is_amx) return base + (kv == 0 ? d * tokens + t : t * dims + d);
    const int64_t pair = bytes == 2 ? 2 : 1;
    if (kv == 0) {
      return base + t / 16 * 16 * dims + d / pair * 16 * pair + t % 16 * pair + d % pair;
    }
    return base + d / 16 * tokens * 16 + t / pair * 16 * pair + d % 16 * pair + t % pair;
  }
  template <typename Visit>
  void ForElements(int64_t num_tokens, Visit visit) const {
    for (int64_t kv = 0; kv < 2; ++kv) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < num_tokens; ++t) {
          for (int64_t d = 0; d < dims; ++d) visit(kv, h, t, d);
        }
      }
    }
  }
};

inline World RandomWorld(Random& random) {
  World w{};
  w.is_amx = random.OneIn(2);
  w.layers = 1 + random.Below(2);
  w.plain_blocks = 1 + random.Below(6);
  w.packed_blocks = 1 + random.Below(6);
  w.heads = 1 + random.Below(3);
  w.tokens = w.is_amx ? random.Of<int64_t>({32, 64}) : 1 + random.Below(40);
  w.dims = w.is_amx ? random.Of<int64_t>({32, 64, 96, 128}) : 1 + random.Below(100);
  if (!w.is_amx && random.OneIn(2)) {
    w.tokens = random.Of<int64_t>({8, 16, 32});
    w.dims = random.Of<int64_t>({16, 32, 64, 128});
  }
  w.bytes = w.is_amx ? random.Of<int64_t>({2, 4}) : random.Of<int64_t>({1, 2, 4});
  const auto gap = [&] { return random.Of<int64_t>({0, 0, 0, 0, 3, 64}); };
  int64_t stride = w.dims + gap();
  const bool is_head_inner = random.OneIn(2);
  for (bool is_inner : {true, false}) {
    const bool is_head = is_inner == is_head_inner;
    (is_head ? w.head_stride : w.token_stride) = stride;
    stride = stride * (is_head ? w.heads : w.tokens) + gap();
  }
  w.kv_stride = stride;
  w.block_stride = 2 * stride + gap();
  w.layer_stride = w.plain_blocks * w.block_stride + gap();
  w.packed_block_stride = 2 * w.heads * w.region() + gap();
  w.packed_layer_stride = w.packed_blocks * w.packed_block_stride + gap();
  return w;
}
