// Scores and bounds of blocks: every set of kernels on every layout against double.
#include "blockcompact/block_scores.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/pool.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  AttendType type;
  int64_t heads, group, tokens, dims, num_keys, num_queries;

  int64_t bytes() const { return static_cast<int64_t>(type); }
  int64_t num_entries() const { return (num_keys + tokens - 1) / tokens + 1; }  // one unused
};

// Multiples of 1/16 that bf16 holds exactly.
float Draw(std::mt19937& random) {
  return static_cast<float>(static_cast<int>(random() % 64) - 32) / 16.0F;
}

void Set(AttendType type, std::vector<std::byte>* elements, int64_t place, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (type == AttendType::kF32) {
    std::memcpy(elements->data() + 4 * place, &bits, 4);
  } else {
    const auto half = static_cast<uint16_t>(bits >> 16);
    std::memcpy(elements->data() + 2 * place, &half, 2);
  }
}

float Get(AttendType type, const std::vector<std::byte>& elements, int64_t place) {
  uint32_t bits = 0;
  if (type == AttendType::kF32) {
    std::memcpy(&bits, elements.data() + 4 * place, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, elements.data() + 2 * place, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

enum class Place { kPlain, kAmx, kVec };

// The keys in blocks, last block first; NaN wherever no key is, V included.
struct Store {
  Store(const Shape& s, Place place, const std::vector<float>& keys)
      : num_blocks(s.num_entries() - 1),
        memory(static_cast<size_t>(num_blocks * s.heads * 2 * s.tokens * s.dims * s.bytes()),
               std::byte{0xFF}) {
    const int64_t region = s.tokens * s.dims;
    const int64_t pair = s.bytes() == 2 ? 2 : 1;
    for (int64_t b = 0; b < num_blocks; ++b)
      table.push_back(static_cast<int32_t>(num_blocks - 1 - b));
    table.push_back(-1);
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t key = 0; key < s.num_keys; ++key) {
        for (int64_t d = 0; d < s.dims; ++d) {
          const int64_t t = key % s.tokens;
          int64_t in_region = t * s.dims + d;
          if (place == Place::kVec) in_region = d * s.tokens + t;
          if (place == Place::kAmx) {
            in_region = t / 16 * 16 * s.dims + d / pair * 16 * pair + t % 16 * pair + d % pair;
          }
          const int64_t block = table[static_cast<size_t>(key / s.tokens)];
          Set(s.type, &memory, (block * s.heads + h) * 2 * region + in_region,
              keys[static_cast<size_t>((h * s.num_keys + key) * s.dims + d)]);
        }
      }
    }
    const int64_t region_bytes = region * s.bytes();
    const BlockShape block{s.heads, s.tokens, s.dims, s.bytes()};
    const PoolMemory where{{memory.data()}, static_cast<int64_t>(memory.size()), 1, 0, true,
                           nullptr};
    pool_id = place == Place::kPlain
                  ? AddPlainPool(where, num_blocks, block,
                                 {region_bytes, 2 * s.heads * region_bytes, 2 * region_bytes,
                                  s.dims * s.bytes()})
                  : AddPackedPool(where, num_blocks, block,
                                  place == Place::kAmx ? PackedLayout::kAmx : PackedLayout::kVec,
                                  2 * s.heads * region_bytes);
  }
  ~Store() { RemovePool(pool_id); }
  KeyBlocks Keys(const Shape& s) const {
    KeyBlocks keys;
    keys.block_table = table.data();
    keys.num_entries = s.num_entries();
    keys.num_keys = s.num_keys;
    return keys;
  }

  int64_t num_blocks;
  std::vector<std::byte> memory;
  std::vector<int32_t> table;
  int64_t pool_id = 0;
};

double Expected(const Shape& s, BlockReduction reduction, const std::vector<double>& scores,
                int64_t column) {
  if (reduction == BlockReduction::kTokens) {
    return column < s.num_keys ? scores[static_cast<size_t>(column)] : -kInfinity;
  }
  double maximum = -kInfinity, sum = 0.0;
  const int64_t begin = column * s.tokens;
  const int64_t end = std::min(s.num_keys, begin + s.tokens);
  for (int64_t key = begin; key < end; ++key) {
    maximum = std::max(maximum, scores[static_cast<size_t>(key)]);
    sum += scores[static_cast<size_t>(key)];
  }
  if (end <= begin || reduction == BlockReduction::kMax) return maximum;
  if (reduction == BlockReduction::kLogSumExp) {
    double sum_exp = 0.0;
    for (int64_t key = begin; key < end; ++key) {
      sum_exp += std::exp(scores[static_cast<size_t>(key)] - maximum);
    }
    return maximum + std::log(sum_exp);
  }
  return reduction == BlockReduction::kSum ? sum : sum / static_cast<double>(end - begin);
}

void CheckScores(const Shape& s, const Store& store, const std::vector<float>& keys,
                 const std::vector<std::byte>& queries, const char* name) {
  const int64_t num_rows = s.heads * s.group * s.num_queries;
  for (auto reduction : {BlockReduction::kTokens, BlockReduction::kMax, BlockReduction::kMean,
                         BlockReduction::kSum, BlockReduction::kLogSumExp}) {
    const int64_t columns = s.num_entries() * (reduction == BlockReduction::kTokens ? s.tokens : 1);
    const auto size = static_cast<size_t>(num_rows * columns);
    const std::unique_ptr<float[]> got(new float[size]);  // exactly as large: writes past it show
    std::fill_n(got.get(), size, 77.0F);
    const int64_t row_bytes = s.dims * s.bytes();
    const ScoreCall call{s.type,        s.heads * s.group,
                         s.num_queries, s.dims,
                         0.5F,          {queries.data(), s.num_queries * row_bytes, row_bytes},
                         reduction,     got.get()};
    CHECK(PoolScoreBlocks({store.pool_id, 0}, store.Keys(s), call, SerialFor).ok(), "%s", name);
    for (int64_t row = 0; row < num_rows; ++row) {
      std::vector<double> scores;
      const int64_t head = row / s.num_queries / s.group;
      for (int64_t key = 0; key < s.num_keys; ++key) {
        double score = 0.0;
        for (int64_t d = 0; d < s.dims; ++d) {
          score += static_cast<double>(Get(s.type, queries, row * s.dims + d)) *
                   keys[static_cast<size_t>((head * s.num_keys + key) * s.dims + d)];
        }
        scores.push_back(0.5 * score);
      }
      for (int64_t column = 0; column < columns; ++column) {
        const double want = Expected(s, reduction, scores, column);
        const double value = got[static_cast<size_t>(row * columns + column)];
        CHECK(value == want || std::fabs(value - want) < 1e-4 * (1.0 + std::fabs(want)),
              "%s: reduction %d, row %ld, column %ld is %f, not %f", name,
              static_cast<int>(reduction), static_cast<long>(row), static_cast<long>(column), value,
              want);
      }
    }
  }
}

void CheckBounds(const Shape& s, const Store& store, const std::vector<float>& keys,
                 const char* name) {
  const auto num_bytes = static_cast<size_t>(s.heads * s.num_entries() * s.dims * s.bytes());
  std::vector<std::byte> low(num_bytes), high(num_bytes);
  const SummaryCall call{s.type, low.data(), high.data()};
  CHECK(PoolSummarizeBlocks({store.pool_id, 0}, store.Keys(s), call, SerialFor).ok(), "%s", name);
  for (int64_t h = 0; h < s.heads; ++h) {
    for (int64_t entry = 0; entry < s.num_entries(); ++entry) {
      for (int64_t d = 0; d < s.dims; ++d) {
        float minimum = kInfinity, maximum = -kInfinity;
        const int64_t end = std::min(s.num_keys, (entry + 1) * s.tokens);
        for (int64_t key = entry * s.tokens; key < end; ++key) {
          const float value = keys[static_cast<size_t>((h * s.num_keys + key) * s.dims + d)];
          minimum = std::min(minimum, value);
          maximum = std::max(maximum, value);
        }
        if (end <= entry * s.tokens) minimum = maximum = 0.0F;
        const int64_t place = (h * s.num_entries() + entry) * s.dims + d;
        CHECK(Get(s.type, low, place) == minimum && Get(s.type, high, place) == maximum,
              "%s: bounds of head %ld, entry %ld, dim %ld", name, static_cast<long>(h),
              static_cast<long>(entry), static_cast<long>(d));
      }
    }
  }
}

void TestShape(const Shape& s) {
  std::mt19937 random(13);
  std::vector<float> keys;
  for (int64_t i = 0; i < s.heads * s.num_keys * s.dims; ++i) keys.push_back(Draw(random));
  const int64_t num_elements = s.heads * s.group * s.num_queries * s.dims;
  std::vector<std::byte> queries(static_cast<size_t>(num_elements * s.bytes()));
  for (int64_t i = 0; i < num_elements; ++i) Set(s.type, &queries, i, Draw(random));
  for (const NamedAttendKernels& named : AvailableAttendKernels(s.type, PaddedDims(s.dims))) {
    ForceAttendKernels(&named.kernels);
    std::vector<Place> places = {Place::kPlain, Place::kVec};
    if (s.tokens % 32 == 0 && s.dims % 32 == 0) places.push_back(Place::kAmx);
    for (Place place : places) {
      const Store store(s, place, keys);
      CheckScores(s, store, keys, queries, named.name);
      CheckBounds(s, store, keys, named.name);
    }
    ForceAttendKernels(nullptr);
  }
}

}  // namespace

int main() {
  for (AttendType type : {AttendType::kBf16, AttendType::kF32}) {
    TestShape({type, 2, 3, 32, 64, 600, 5});
    TestShape({type, 1, 1, 32, 32, 33, 1});
    TestShape({type, 1, 8, 64, 128, 70, 5});
    TestShape({type, 1, 2, 1, 7, 20, 3});
    TestShape({type, 2, 1, 48, 40, 530, 2});
    TestShape({type, 1, 1, 544, 48, 1100, 1});
  }
  for (const NamedAttendKernels& named : AvailableAttendKernels(AttendType::kBf16, 64)) {
    std::printf("%s: ok\n", named.name);
  }
  return 0;
}
