// Every head kernel of every implementation against loops written from the layout's definition.
#include <algorithm>
#include <memory>
#include <new>

#include "blockcompact/head_kernels.h"
#include "blockcompact/streaming.h"
#include "check.h"

using blockcompact::HeadJob;
using blockcompact::HeadKernel;
using blockcompact::HeadKernels;
using blockcompact::HeadShape;
using blockcompact::Impl;
using blockcompact::PackedLayout;

namespace {

struct Case {
  PackedLayout layout;
  int64_t element_bytes;
  int64_t block_tokens;
  int64_t head_dim;
  int64_t token_stride;  // elements
};

// Written out again on purpose: nothing of the code under test is used here.
int64_t KPlace(const Case& c, int64_t t, int64_t d) {
  if (c.layout == PackedLayout::kVec) return d * c.block_tokens + t;
  const int64_t tile = t / 16 * 16 * c.head_dim;
  if (c.element_bytes == 4) return tile + d * 16 + t % 16;
  return tile + d / 2 * 32 + t % 16 * 2 + d % 2;
}

int64_t VPlace(const Case& c, int64_t t, int64_t d) {
  if (c.layout == PackedLayout::kVec) return t * c.head_dim + d;
  const int64_t chunk = d / 16 * c.block_tokens * 16;
  if (c.element_bytes == 4) return chunk + t * 16 + d % 16;
  return chunk + t / 2 * 32 + d % 16 * 2 + t % 2;
}

void CopyElement(const Case& c, uint8_t* to, int64_t to_place, const uint8_t* from,
                 int64_t from_place) {
  for (int64_t b = 0; b < c.element_bytes; ++b) {
    to[to_place * c.element_bytes + b] = from[from_place * c.element_bytes + b];
  }
}

// Exactly what the rows span: a read or write past the last one is seen by the sanitizer.
int64_t PlainBytes(const Case& c) {
  return ((c.block_tokens - 1) * c.token_stride + c.head_dim) * c.element_bytes;
}

// Bytes that start at an aligned address plus `offset`, and end with their allocation.
class Bytes {
 public:
  Bytes(const std::vector<uint8_t>& values, int64_t offset)
      : size_(static_cast<int64_t>(values.size())) {
    const auto room = static_cast<size_t>(offset + size_);
    memory_ = std::shared_ptr<uint8_t>(
        static_cast<uint8_t*>(::operator new(room, std::align_val_t{64})),
        [](uint8_t* memory) { ::operator delete(memory, std::align_val_t{64}); });
    first_ = memory_.get() + offset;
    std::copy(values.begin(), values.end(), first_);
  }
  uint8_t* data() { return first_; }
  std::vector<uint8_t> values() const { return {first_, first_ + size_}; }

 private:
  std::shared_ptr<uint8_t> memory_;
  uint8_t* first_;
  int64_t size_;
};

// Several jobs in turns write what each would alone; the number of tokens differs between them.
template <typename Place>
void TestJobs(const Case& c, const char* name, const HeadShape& shape, HeadKernel unpack,
              Place place) {
  const int64_t packed_bytes = c.block_tokens * c.head_dim * c.element_bytes;
  std::vector<Bytes> from, to;
  std::vector<std::vector<uint8_t>> expected;
  HeadJob jobs[blockcompact::kMaxHeadJobs];
  for (int64_t i = 0; i < blockcompact::kMaxHeadJobs; ++i) {
    const std::vector<uint8_t> packed = RandomBytes(packed_bytes, static_cast<uint32_t>(20 + i));
    expected.push_back(RandomBytes(PlainBytes(c), static_cast<uint32_t>(40 + i)));
    from.emplace_back(packed, 0);
    to.emplace_back(expected.back(), i == 3 && c.token_stride % 2 == 1 ? c.element_bytes : 0);
    const int64_t num_tokens = i == 1 ? c.block_tokens : c.block_tokens * i / 4;
    jobs[i] = {from.back().data(), to.back().data(), num_tokens, i == 2 ? nullptr : from[0].data()};
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t d = 0; d < c.head_dim; ++d) {
        CopyElement(c, expected.back().data(), t * c.token_stride + d, packed.data(),
                    place(c, t, d));
      }
    }
  }
  unpack(jobs, blockcompact::kMaxHeadJobs, shape);
  blockcompact::FenceStores();
  for (size_t i = 0; i < to.size(); ++i) {
    CHECK(to[i].values() == expected[i], "%s, job %zu of %zu, layout %d, B=%ld D=%ld", name, i,
          to.size(), static_cast<int>(c.layout), c.block_tokens, c.head_dim);
  }
}

template <typename Place>
void TestOne(const Case& c, const char* name, bool is_streaming, HeadKernel pack, HeadKernel unpack,
             Place place) {
  const HeadShape shape{c.block_tokens, c.head_dim, c.token_stride * c.element_bytes, is_streaming};
  TestJobs(c, name, shape, unpack, place);
  const int64_t packed_bytes = c.block_tokens * c.head_dim * c.element_bytes;
  const std::vector<uint8_t> plain = RandomBytes(PlainBytes(c), 1);
  std::vector<uint8_t> expected(static_cast<size_t>(packed_bytes));
  for (int64_t t = 0; t < c.block_tokens; ++t) {
    for (int64_t d = 0; d < c.head_dim; ++d) {
      CopyElement(c, expected.data(), place(c, t, d), plain.data(), t * c.token_stride + d);
    }
  }
  Bytes aligned_plain(plain, 0);
  Bytes packed(RandomBytes(packed_bytes, 2), 0);
  const HeadJob pack_job{aligned_plain.data(), packed.data(), c.block_tokens, nullptr};
  pack(&pack_job, 1, shape);
  CHECK(packed.values() == expected, "%s pack, layout %d, %ld bytes, B=%ld D=%ld stride=%ld", name,
        static_cast<int>(c.layout), c.element_bytes, c.block_tokens, c.head_dim, c.token_stride);

  const std::vector<uint8_t> canary = RandomBytes(PlainBytes(c), 3);
  for (int64_t num_tokens = 0; num_tokens <= c.block_tokens; ++num_tokens) {
    Bytes out(canary, 0);
    std::vector<uint8_t> expected_out = canary;
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t d = 0; d < c.head_dim; ++d) {
        CopyElement(c, expected_out.data(), t * c.token_stride + d, plain.data(),
                    t * c.token_stride + d);
      }
    }
    Bytes aligned_packed(expected, 0);
    const HeadJob job{aligned_packed.data(), out.data(), num_tokens, nullptr};
    unpack(&job, 1, shape);
    CHECK(out.values() == expected_out,
          "%s unpack of %ld, layout %d, %ld bytes, B=%ld D=%ld stride=%ld", name, num_tokens,
          static_cast<int>(c.layout), c.element_bytes, c.block_tokens, c.head_dim, c.token_stride);
  }
}

void TestShape(Impl impl, Case c) {
  const HeadKernels kernels = blockcompact::SelectHeadKernels(impl, c.layout, c.element_bytes);
  for (int64_t gap : {int64_t{0}, int64_t{1}, 3 * c.head_dim}) {
    c.token_stride = c.head_dim + gap;
    for (bool is_streaming : {false, true}) {
      const char* name = blockcompact::ImplName(impl);
      TestOne(c, name, is_streaming, kernels.pack_k, kernels.unpack_k, KPlace);
      TestOne(c, name, is_streaming, kernels.pack_v, kernels.unpack_v, VPlace);
    }
  }
}

}  // namespace

int main() {
  for (Impl impl : blockcompact::AvailableImpls()) {
    for (int64_t element_bytes : {1, 2, 4}) {
      for (int64_t block_tokens : {1, 2, 7, 8, 16, 17, 33}) {
        for (int64_t head_dim : {1, 3, 16, 31, 33, 80}) {
          TestShape(impl, {PackedLayout::kVec, element_bytes, block_tokens, head_dim, 0});
        }
      }
    }
    for (int64_t element_bytes : {2, 4}) {
      for (int64_t block_tokens : {32, 64}) {
        for (int64_t head_dim : {32, 96, 128}) {
          TestShape(impl, {PackedLayout::kAmx, element_bytes, block_tokens, head_dim, 0});
        }
      }
    }
    std::printf("%s: ok\n", blockcompact::ImplName(impl));
  }
  return 0;
}
