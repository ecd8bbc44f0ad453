// Attention: every set of kernels on every layout against double, and the sums' order.
#include "blockcompact/attend.h"

#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/pool.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

float Bf16ToFloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t FloatToBf16(float value) {  // of values that it holds exactly
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// Elements of either type; NaN until they are set.
class Elements {
 public:
  Elements(AttendType type, int64_t count) : type_(type), bytes_(Size(count), std::byte{0xFF}) {}

  std::byte* data() { return bytes_.data(); }
  int64_t size_bytes() const { return static_cast<int64_t>(bytes_.size()); }
  void Set(int64_t place, float value) {
    if (type_ == AttendType::kF32) {
      std::memcpy(data() + 4 * place, &value, 4);
    } else {
      const uint16_t bits = FloatToBf16(value);
      std::memcpy(data() + 2 * place, &bits, 2);
    }
  }
  float Get(int64_t place) const {
    if (type_ == AttendType::kF32) {
      float value;
      std::memcpy(&value, bytes_.data() + 4 * place, 4);
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, bytes_.data() + 2 * place, 2);
    return Bf16ToFloat(bits);
  }

 private:
  size_t Size(int64_t count) const {
    return static_cast<size_t>(count * static_cast<int64_t>(type_));
  }

  AttendType type_;
  std::vector<std::byte> bytes_;  // 0xFF: NaN
};

enum class Place { kPlain, kAmx, kVec };

struct Shape {
  AttendType type;
  int64_t heads, group, tokens, dims, num_keys, num_queries, window;
};

// Values that bf16 holds exactly.
float Draw(std::mt19937& random) {
  return static_cast<float>(static_cast<int>(random() % 64) - 32) / 16.0F;
}

// A pool of just the blocks it needs, in reverse order; NaN behind the last key.
struct Store {
  Store(const Shape& shape, Place place, const std::vector<float>& keys,
        const std::vector<float>& values)
      : num_blocks((shape.num_keys + shape.tokens - 1) / shape.tokens),
        memory(shape.type, num_blocks * shape.heads * 2 * shape.tokens * shape.dims) {
    for (int64_t b = 0; b < num_blocks; ++b)
      table.push_back(static_cast<int32_t>(num_blocks - 1 - b));
    const int64_t region = shape.tokens * shape.dims;
    const int64_t pair = shape.type == AttendType::kBf16 ? 2 : 1;
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t key = 0; key < shape.num_keys; ++key) {
        for (int64_t d = 0; d < shape.dims; ++d) {
          const int64_t t = key % shape.tokens;
          const int64_t base =
              (table[static_cast<size_t>(key / shape.tokens)] * shape.heads + h) * 2 * region;
          int64_t k_place = t * shape.dims + d;
          int64_t v_place = k_place;
          if (place == Place::kVec) k_place = d * shape.tokens + t;
          if (place == Place::kAmx) {
            k_place = t / 16 * 16 * shape.dims + d / pair * 16 * pair + t % 16 * pair + d % pair;
            v_place = d / 16 * shape.tokens * 16 + t / pair * 16 * pair + d % 16 * pair + t % pair;
          }
          const auto from = static_cast<size_t>((h * shape.num_keys + key) * shape.dims + d);
          memory.Set(base + k_place, keys[from]);
          memory.Set(base + region + v_place, values[from]);
        }
      }
    }
    Register(shape, place, region * static_cast<int64_t>(shape.type));
  }
  ~Store() { RemovePool(pool_id); }

  void Register(const Shape& shape, Place place, int64_t region_bytes) {
    const int64_t bytes = static_cast<int64_t>(shape.type);
    const BlockShape block{shape.heads, shape.tokens, shape.dims, bytes};
    const int64_t block_bytes = 2 * shape.heads * region_bytes;
    const PoolMemory where{{memory.data()}, memory.size_bytes(), 1, 0, true, nullptr};
    if (place == Place::kPlain) {
      pool_id = AddPlainPool(where, num_blocks, block,
                             {region_bytes, block_bytes, 2 * region_bytes, shape.dims * bytes});
    } else {
      const auto layout = place == Place::kAmx ? PackedLayout::kAmx : PackedLayout::kVec;
      pool_id = AddPackedPool(where, num_blocks, block, layout, block_bytes);
    }
  }

  int64_t num_blocks;
  Elements memory;
  std::vector<int32_t> table;
  int64_t pool_id = 0;
};

struct Results {
  std::vector<float> out;
  std::vector<float> mass;
  std::vector<float> log_sum_exp;

  bool operator==(const Results& other) const {
    return out == other.out && mass == other.mass && log_sum_exp == other.log_sum_exp;
  }
};

Results Run(const Shape& shape, Elements& queries, const Store& store) {
  const int64_t rows = shape.heads * shape.group * shape.num_queries;
  const int64_t bytes = static_cast<int64_t>(shape.type);
  Elements out(shape.type, rows * shape.dims);
  Results results;
  results.mass.assign(static_cast<size_t>(rows * store.num_blocks), -1.0F);
  results.log_sum_exp.assign(static_cast<size_t>(rows), -1.0F);
  AttendCall call;
  call.type = shape.type;
  call.num_query_heads = shape.heads * shape.group;
  call.num_queries = shape.num_queries;
  call.head_dim = shape.dims;
  call.scale = 0.3F;
  call.window_tokens = shape.window;
  call.num_segments = 1;
  call.segments[0] = {{store.pool_id, 0}, 0, store.table.data(), store.num_blocks, shape.num_keys};
  const int64_t row_bytes = shape.dims * bytes;
  call.queries = {queries.data(), shape.num_queries * row_bytes, row_bytes};
  call.out = {out.data(), shape.num_queries * row_bytes, row_bytes};
  call.max_blocks = store.num_blocks;
  call.block_mass = {reinterpret_cast<std::byte*>(results.mass.data()),
                     4 * shape.num_queries * store.num_blocks, 4 * store.num_blocks};
  call.log_sum_exp = results.log_sum_exp.data();
  const auto two_threads = [](int64_t num_tasks, const Task& task) {
    std::thread helper([&] {
      for (int64_t i = 1; i < num_tasks; i += 2) task(i);
    });
    for (int64_t i = 0; i < num_tasks; i += 2) task(i);
    helper.join();
  };
  CHECK(PoolAttend(call, two_threads).ok(), "a valid call was refused");
  for (int64_t i = 0; i < rows * shape.dims; ++i) results.out.push_back(out.Get(i));
  return results;
}

void CheckAgainstDouble(const Shape& shape, const Elements& queries, const std::vector<float>& keys,
                        const std::vector<float>& values, const Results& got, int64_t num_blocks,
                        const char* name) {
  const double tolerance = shape.type == AttendType::kF32 ? 1e-5 : 2e-2;
  for (int64_t row = 0; row < shape.heads * shape.group * shape.num_queries; ++row) {
    const int64_t head = row / shape.num_queries / shape.group;
    const int64_t end = shape.num_keys - shape.num_queries + row % shape.num_queries + 1;
    const int64_t begin = shape.window > 0 ? std::max<int64_t>(0, end - shape.window) : 0;
    std::vector<double> weights(static_cast<size_t>(shape.num_keys), 0.0);
    double total = 0.0;
    for (int64_t key = begin; key < end; ++key) {
      double score = 0.0;
      for (int64_t d = 0; d < shape.dims; ++d) {
        const auto place = static_cast<size_t>((head * shape.num_keys + key) * shape.dims + d);
        score += static_cast<double>(queries.Get(row * shape.dims + d)) * keys[place];
      }
      total += weights[static_cast<size_t>(key)] = std::exp(0.3 * score);
    }
    CHECK(std::fabs(got.log_sum_exp[static_cast<size_t>(row)] - std::log(total)) < 1e-4,
          "%s: log-sum-exp of row %ld is %f, not %f", name, static_cast<long>(row),
          static_cast<double>(got.log_sum_exp[static_cast<size_t>(row)]), std::log(total));
    std::vector<double> mass(static_cast<size_t>(num_blocks), 0.0);
    for (int64_t key = begin; key < end; ++key) {
      mass[static_cast<size_t>(key / shape.tokens)] += weights[static_cast<size_t>(key)] / total;
    }
    for (int64_t b = 0; b < num_blocks; ++b) {
      CHECK(std::fabs(got.mass[static_cast<size_t>(row * num_blocks + b)] -
                      mass[static_cast<size_t>(b)]) < 1e-5,
            "%s: mass of row %ld, block %ld", name, static_cast<long>(row), static_cast<long>(b));
    }
    for (int64_t d = 0; d < shape.dims; ++d) {
      double expected = 0.0;
      for (int64_t key = begin; key < end; ++key) {
        const auto place = static_cast<size_t>((head * shape.num_keys + key) * shape.dims + d);
        expected += weights[static_cast<size_t>(key)] / total * values[place];
      }
      const double value = got.out[static_cast<size_t>(row * shape.dims + d)];
      CHECK(std::fabs(value - expected) < tolerance * (1.0 + std::fabs(expected)),
            "%s: row %ld, dim %ld is %f, not %f", name, static_cast<long>(row),
            static_cast<long>(d), value, expected);
    }
  }
}

void TestShape(const Shape& shape) {
  std::mt19937 random(11);
  const int64_t num_values = shape.heads * shape.num_keys * shape.dims;
  std::vector<float> keys, values;
  for (int64_t i = 0; i < num_values; ++i) {
    keys.push_back(Draw(random));
    values.push_back(Draw(random));
  }
  Elements queries(shape.type, shape.heads * shape.group * shape.num_queries * shape.dims);
  for (int64_t i = 0; i < shape.heads * shape.group * shape.num_queries * shape.dims; ++i) {
    queries.Set(i, Draw(random));
  }
  std::vector<Results> float_results;
  for (const NamedAttendKernels& named :
       AvailableAttendKernels(shape.type, PaddedDims(shape.dims))) {
    ForceAttendKernels(&named.kernels);
    std::vector<Results> results;
    std::vector<Place> places = {Place::kPlain, Place::kVec};
    if (shape.tokens % 32 == 0 && shape.dims % 32 == 0) places.push_back(Place::kAmx);
    for (Place place : places) {
      const Store store(shape, place, keys, values);
      results.push_back(Run(shape, queries, store));
      CheckAgainstDouble(shape, queries, keys, values, results.back(), store.num_blocks,
                         named.name);
      CHECK(results.back() == results.front(), "%s: layouts differ in bits", named.name);
    }
    if (shape.type == AttendType::kF32) float_results.push_back(results.front());
    ForceAttendKernels(nullptr);
  }
  for (const Results& results : float_results) {
    CHECK(results == float_results.front(), "float32 bits differ between implementations");
  }
}

}  // namespace

int main() {
  for (AttendType type : {AttendType::kBf16, AttendType::kF32}) {
    TestShape({type, 2, 3, 32, 64, 600, 5, 0});
    TestShape({type, 1, 1, 32, 32, 33, 1, 0});
    TestShape({type, 1, 8, 32, 128, 70, 9, 0});
    TestShape({type, 1, 2, 64, 96, 700, 2, 65});
    TestShape({type, 1, 2, 1, 7, 20, 3, 0});
    TestShape({type, 2, 1, 8, 40, 530, 2, 17});
    TestShape({type, 1, 17, 16, 256, 31, 3, 0});
  }
  for (const NamedAttendKernels& named : AvailableAttendKernels(AttendType::kBf16, 64)) {
    std::printf("%s: ok\n", named.name);
  }
  return 0;
}
