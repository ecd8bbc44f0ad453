// Scores and attention of the CUDA kernels, run thread by thread on the host in shuffled order,
// against the CPU kernels: values within rounding, equal statuses, and bits that no layout changes.
#include <cmath>
#include <cstring>
#include <limits>

#include "blockcompact/attend.h"
#include "blockcompact/block_scores.h"
#include "blockcompact/device_attend.h"
#include "blockcompact/pool.h"
#include "grid_emulator.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  int64_t bytes, heads, group, tokens, dims, num_keys, num_queries, window;

  BlockShape shape() const { return {heads, tokens, dims, bytes}; }
  AttendType type() const { return static_cast<AttendType>(bytes); }
  int64_t num_used() const { return (num_keys + tokens - 1) / tokens; }
  int64_t num_entries() const { return num_used() + 1; }  // one unused
  int64_t num_rows() const { return heads * group * num_queries; }
};

void Set(Bytes* to, int64_t bytes, int64_t place, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (bytes == 2) bits >>= 16;
  std::memcpy(to->data() + bytes * place, &bits, static_cast<size_t>(bytes));
}

float Get(const Bytes& from, int64_t bytes, int64_t place) {
  uint32_t bits = 0;
  std::memcpy(&bits, from.data() + bytes * place, static_cast<size_t>(bytes));
  if (bytes == 2) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Multiples of 1/16 that bf16 holds exactly.
Bytes Draw(int64_t bytes, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes values(static_cast<size_t>(bytes * count));
  for (int64_t i = 0; i < count; ++i) {
    Set(&values, bytes, i, static_cast<float>(static_cast<int>(random() % 64) - 32) / 16.0F);
  }
  return values;
}

// Blocks of one layer behind another, in one order; NaN behind the last key.
struct World {
  Case c;
  GridOrder order;
  Bytes queries, memory;
  std::vector<int32_t> table;
  int64_t pool_id, num_blocks, layer_bytes;
  int32_t layer = 1, num_keys;
  GridFault fault = kNoGridFault;
  World(const Case& its_case, GridOrder its_order)
      : c(its_case),
        order(its_order),
        queries(Draw(c.bytes, c.num_rows() * c.dims, 5)),
        num_blocks(c.num_used() + 2),
        layer_bytes(num_blocks * c.shape().packed_row_bytes()),
        num_keys(static_cast<int32_t>(c.num_keys)) {
    const BlockShape shape = c.shape();
    const int64_t row = shape.packed_row_bytes(), region = shape.region_bytes();
    const PlainStrides hnd{region, row, 2 * region, shape.token_bytes()};
    Bytes plain = Draw(c.bytes, 2 * layer_bytes / c.bytes, 6);
    for (int64_t entry = 0; entry < c.num_used(); ++entry) {
      table.push_back(static_cast<int32_t>(num_blocks - 1 - entry));
    }
    table.push_back(-7);
    for (int64_t key = c.num_keys; key < c.num_used() * c.tokens; ++key) {
      for (int64_t at = 0; at < 2 * c.heads * c.dims; ++at) {
        const int64_t block = table[static_cast<size_t>(key / c.tokens)];
        const int64_t first = layer_bytes + block * row + at / c.dims * region;
        Set(&plain, c.bytes, first / c.bytes + key % c.tokens * c.dims + at % c.dims, kNan);
      }
    }
    memory = plain;
    const auto memory_of = [&](Bytes& bytes) {
      return PoolMemory{{Data(bytes)}, 2 * layer_bytes, 2, layer_bytes, true, nullptr};
    };
    if (order == GridOrder::kPlain) {
      pool_id = AddPlainPool(memory_of(memory), num_blocks, shape, hnd);
      return;
    }
    const PackedLayout layout = order == GridOrder::kAmx ? PackedLayout::kAmx : PackedLayout::kVec;
    pool_id = AddPackedPool(memory_of(memory), num_blocks, shape, layout, row);
    std::vector<int32_t> all;
    for (int32_t i = 0; i < 2 * num_blocks; ++i) all.push_back(i);
    PackRows({{Data(plain)}, 2 * num_blocks, shape, hnd},
             {{Data(memory)}, 2 * num_blocks, shape, layout, row},
             {2 * num_blocks, nullptr, all.data(), nullptr, nullptr}, SerialFor);
  }
  World(const World&) = delete;
  ~World() { CHECK(RemovePool(pool_id), "close"); }

  RowsAt<const std::byte> rows() const {
    const int64_t row = c.dims * c.bytes;
    return {reinterpret_cast<const std::byte*>(queries.data()), c.num_queries * row, row};
  }
  GridKeys keys() {
    const BlockShape shape = c.shape();
    const int64_t row = shape.packed_row_bytes(), region = shape.region_bytes();
    GridKeys keys;
    keys.plain = {Data(memory), layer_bytes, {region, row, 2 * region, shape.token_bytes()}};
    keys.packed = {Data(memory), layer_bytes, row};
    keys.shape = shape;
    keys.num_layers = 2;
    keys.num_blocks = num_blocks;
    keys.num_entries = c.num_entries();
    keys.layer = &layer;
    keys.block_table = table.data();
    keys.num_keys = &num_keys;
    keys.fault = &fault;
    return keys;
  }
  GridQueries grid_queries(float scale) const {
    const RowsAt<const std::byte> at = rows();
    return {{at.base, at.head_stride_bytes, at.query_stride_bytes},
            c.heads * c.group,
            c.num_queries,
            scale};
  }
  Status Check() {
    fault = kNoGridFault;
    int32_t status[2] = {-7, -7};
    CHECK(LaunchKeyChecks(keys(), status, Emulator{}) == 0, "checks");
    return {static_cast<StatusCode>(status[0]), status[1]};
  }
};

bool IsNear(float a, float b, float tolerance) {  // NaN is not
  return a == b || std::abs(a - b) <= tolerance * (1 + std::abs(b));
}

std::vector<float> Scores(World& world, BlockReduction reduction, int64_t columns) {
  std::vector<float> scratch(static_cast<size_t>(world.c.num_rows() * world.keys().num_tokens()));
  std::vector<float> scores(static_cast<size_t>(world.c.num_rows() * columns), 77.0F);
  CHECK(LaunchScores(world.order, world.keys(), world.grid_queries(0.125F),
                     {reduction, scratch.data(), scores.data(), columns}, Emulator{}) == 0,
        "scores");
  return scores;
}

void TestScores(const Case& c, GridOrder order) {
  World world(c, order);
  World plain(c, GridOrder::kPlain);
  CHECK(world.Check().ok() && plain.Check().ok(), "keys");
  for (int32_t number = 0; number <= 4; ++number) {
    const auto reduction = static_cast<BlockReduction>(number);
    const int64_t columns = c.num_entries() * (number == 0 ? c.tokens : 1);
    ScoreCall call;
    call.type = c.type();
    call.num_query_heads = c.heads * c.group;
    call.num_queries = c.num_queries;
    call.head_dim = c.dims;
    call.scale = 0.125F;
    call.queries = world.rows();
    call.reduction = reduction;
    std::vector<float> expected(static_cast<size_t>(c.num_rows() * columns));
    call.scores = expected.data();
    KeyBlocks keys;
    keys.layer = 1;
    keys.block_table = world.table.data();
    keys.num_entries = c.num_entries();
    keys.num_keys = c.num_keys;
    CHECK(PoolScoreBlocks({world.pool_id, 0}, keys, call, SerialFor).ok(), "the CPU's");
    const std::vector<float> scores = Scores(world, reduction, columns);
    for (size_t i = 0; i < scores.size(); ++i) {
      CHECK(IsNear(scores[i], expected[i], 1e-5F), "order %d reduction %d place %zu: %g, not %g",
            static_cast<int>(order), number, i, scores[i], expected[i]);
    }
    CHECK(scores == Scores(plain, reduction, columns), "the layout changes bits");
  }
}

// A NaN in a key makes the block's score NaN, and no other.
void TestNanScores() {
  const Case c{4, 1, 1, 4, 8, 10, 1, 0};
  World world(c, GridOrder::kPlain);
  Set(&world.memory, 4, (world.layer_bytes + world.table[1] * c.shape().packed_row_bytes()) / 4 + 9,
      kNan);
  for (int32_t number = 1; number <= 4; ++number) {
    const auto scores = Scores(world, static_cast<BlockReduction>(number), c.num_entries());
    CHECK(!std::isnan(scores[0]) && std::isnan(scores[1]) && !std::isnan(scores[2]), "NaN");
  }
}

void TestKeyChecks() {
  std::mt19937 random(23);
  World world({4, 1, 1, 4, 8, 14, 1, 0}, GridOrder::kPlain);
  const auto draw = [&](int32_t first, int32_t last) {
    return first + static_cast<int32_t>(random() % static_cast<uint32_t>(last - first + 1));
  };
  int num_faulty = 0;
  for (int round = 0; round < 3000; ++round) {
    world.layer = round % 3 == 0 ? draw(-1, 2) : 1;
    world.num_keys = round % 2 == 0 ? draw(-1, 21) : 14;
    for (int32_t& entry : world.table) entry = draw(round % 4 == 0 ? -1 : 0, 6);
    KeyBlocks keys;
    keys.layer = world.layer;
    keys.block_table = world.table.data();
    keys.num_entries = static_cast<int64_t>(world.table.size());
    keys.num_keys = world.num_keys;
    ScoreCall call;
    call.type = AttendType::kF32;
    call.num_query_heads = call.num_queries = 1;
    call.head_dim = 8;
    call.queries = world.rows();
    std::vector<float> scores(8);
    call.scores = scores.data();
    const Status expected = PoolScoreBlocks({world.pool_id, 0}, keys, call, SerialFor);
    const Status status = world.Check();
    CHECK(status.code == expected.code && status.row == expected.row, "code %d row %ld, not %d %ld",
          static_cast<int>(status.code), status.row, static_cast<int>(expected.code), expected.row);
    if (expected.ok()) continue;
    ++num_faulty;
    const auto refused = Scores(world, BlockReduction::kMax, 5);
    CHECK(refused == std::vector<float>(5, 0.0F), "a refused call is not zero");
  }
  CHECK(num_faulty > 500 && num_faulty < 2900, "%d of 3000 rounds were faulty", num_faulty);
}

struct Attention {
  Bytes out;
  std::vector<float> mass, log_sum_exp;

  Attention(const Case& c, int64_t max_blocks)
      : out(static_cast<size_t>(c.num_rows() * c.dims * c.bytes)),
        mass(static_cast<size_t>(c.num_rows() * max_blocks), 77.0F),
        log_sum_exp(static_cast<size_t>(c.num_rows()), 77.0F) {}
};

AttendCall CallOf(const World& world, int64_t max_blocks, Attention* to) {
  const Case& c = world.c;
  AttendCall call;
  call.type = c.type();
  call.num_query_heads = c.heads * c.group;
  call.num_queries = c.num_queries;
  call.head_dim = c.dims;
  call.scale = 0.125F;
  call.window_tokens = c.window;
  call.num_segments = 1;
  call.segments[0] = {{world.pool_id, 0}, 1, world.table.data(), c.num_entries(), c.num_keys};
  call.queries = world.rows();
  const int64_t row = c.dims * c.bytes, mass_row = max_blocks * 4;
  call.out = {Data(to->out), c.num_queries * row, row};
  call.block_mass = {reinterpret_cast<std::byte*>(to->mass.data()), c.num_queries * mass_row,
                     mass_row};
  call.max_blocks = max_blocks;
  call.log_sum_exp = to->log_sum_exp.data();
  return call;
}

Attention AttendOnGrid(World& world, int64_t max_blocks) {
  Attention to(world.c, max_blocks);
  const AttendCall call = CallOf(world, max_blocks, &to);
  GridAttend grid;
  grid.keys = world.keys();
  grid.keys.num_entries = world.c.num_used();
  grid.queries = world.grid_queries(call.scale);
  grid.sight = {true, world.c.window};
  grid.out = {call.out.base, call.out.head_stride_bytes, call.out.query_stride_bytes};
  grid.block_mass = {call.block_mass.base, call.block_mass.head_stride_bytes,
                     call.block_mass.query_stride_bytes};
  grid.max_blocks = max_blocks;
  grid.log_sum_exp = to.log_sum_exp.data();
  Bytes scratch(static_cast<size_t>(grid.TakeScratch(nullptr)));
  grid.TakeScratch(Data(scratch));
  CHECK(LaunchAttend(world.order, grid, Emulator{}) == 0, "attend");
  return to;
}

void CheckNear(const Case& c, const Attention& got, const Attention& expected) {
  const float tolerance = c.bytes == 2 ? 2e-2F : 1e-5F;
  for (int64_t i = 0; i < c.num_rows() * c.dims; ++i) {
    const float value = Get(got.out, c.bytes, i), wanted = Get(expected.out, c.bytes, i);
    CHECK(IsNear(value, wanted, tolerance), "out %ld: %g, not %g", i, value, wanted);
  }
  for (size_t i = 0; i < got.mass.size(); ++i) {
    CHECK(IsNear(got.mass[i], expected.mass[i], 1e-5F), "mass %zu: %g, not %g", i, got.mass[i],
          expected.mass[i]);
  }
  for (size_t i = 0; i < got.log_sum_exp.size(); ++i) {
    CHECK(IsNear(got.log_sum_exp[i], expected.log_sum_exp[i], 1e-5F), "log_sum_exp %zu", i);
  }
}

void TestAttend(const Case& c, GridOrder order) {
  World world(c, order);
  World plain(c, GridOrder::kPlain);
  for (int64_t max_blocks : {c.num_used() + 2, c.num_used() - 1}) {
    Attention expected(c, max_blocks);
    CHECK(PoolAttend(CallOf(world, max_blocks, &expected), SerialFor).ok(), "the CPU's");
    const Attention got = AttendOnGrid(world, max_blocks);
    CheckNear(c, got, expected);
    const Attention same = AttendOnGrid(plain, max_blocks);
    CHECK(got.out == same.out && got.mass == same.mass && got.log_sum_exp == same.log_sum_exp,
          "the layout changes bits");
  }
}

// The calls on pools of a device: enqueued in the owner's stream, statuses as the CPU's.
void TestDevicePool(const Case& c, GridOrder order) {
  auto& device = *new EmulatedDevice;
  SetDeviceRuntime(&device);
  World world(c, order);
  device.AddMemory(Data(world.memory), static_cast<int64_t>(world.memory.size()), 0);
  PoolMemory memory{
      {Data(world.memory)}, 2 * world.layer_bytes, 2, world.layer_bytes, true, nullptr};
  memory.stream = device.MakeStream(0);
  const int64_t row = c.shape().packed_row_bytes(), region = c.shape().region_bytes();
  const int64_t pool_id =
      order == GridOrder::kPlain
          ? AddPlainPool(memory, world.num_blocks, c.shape(),
                         {region, row, 2 * region, c.shape().token_bytes()})
          : AddPackedPool(memory, world.num_blocks, c.shape(),
                          order == GridOrder::kAmx ? PackedLayout::kAmx : PackedLayout::kVec, row);
  const int64_t max_blocks = c.num_used();
  Attention expected(c, max_blocks), got(c, max_blocks);
  CHECK(PoolAttend(CallOf(world, max_blocks, &expected), SerialFor).ok(), "the CPU's");
  AttendCall call = CallOf(world, max_blocks, &got);
  CHECK(DevicePoolAttend(call).code == StatusCode::kOtherDevice, "a pool of the host");
  call.segments[0].pool.pool_id = pool_id;
  CHECK(DevicePoolAttend(call).ok() && got.mass[0] == 77.0F, "ran before its stream");
  DeviceEvent(device, memory.stream).Synchronize();
  CheckNear(c, got, expected);
  const auto code = [&](auto change) {
    AttendCall faulty = call;
    change(faulty);
    return DevicePoolAttend(faulty).code;
  };
  CHECK(code([](AttendCall& a) { a.segments[0].pool.ord = 9; }) == StatusCode::kStaleOrd, "ord");
  CHECK(code([](AttendCall& a) { a.segments[0].layer = 2; }) == StatusCode::kLayerOutOfRange,
        "layer");
  CHECK(code([](AttendCall& a) { a.segments[0].num_keys = a.num_queries - 1; }) ==
            StatusCode::kNumKeysOutOfRange,
        "fewer keys than queries");
  CHECK(code([](AttendCall& a) { a.head_dim += 1; }) == StatusCode::kShapeMismatch, "dims");
  CHECK(code([](AttendCall& a) { a.num_segments = 2; }) == StatusCode::kShapeMismatch, "two");
  std::vector<float> scores(static_cast<size_t>(c.num_rows() * c.num_entries()), 77.0F);
  ScoreSequence sequence;
  sequence.keys.layer = 1;
  sequence.keys.block_table = world.table.data();
  sequence.keys.num_entries = c.num_entries();
  sequence.keys.num_keys = c.num_keys;
  sequence.call.type = c.type();
  sequence.call.num_query_heads = c.heads * c.group;
  sequence.call.num_queries = c.num_queries;
  sequence.call.head_dim = c.dims;
  sequence.call.scale = 0.125F;
  sequence.call.queries = world.rows();
  sequence.call.reduction = BlockReduction::kLogSumExp;
  sequence.call.scores = scores.data();
  CHECK(DevicePoolScoreSequences({pool_id, 0}, {sequence}).ok(), "scores");
  DeviceEvent(device, memory.stream).Synchronize();
  CHECK(scores == Scores(world, BlockReduction::kLogSumExp, c.num_entries()), "scores");
  std::swap(world.table.front(), world.table.back());
  const Status refused = DevicePoolScoreSequences({pool_id, 0}, {sequence, sequence});
  CHECK(refused.code == StatusCode::kFromBlockOutOfRange && refused.row == 0, "table");
  CHECK(RemovePool(pool_id), "close");
  SetDeviceRuntime(nullptr);
}

}  // namespace

int main() {
  // bytes, heads, group, tokens, dims, num_keys, num_queries, window
  const Case cases[] = {{2, 2, 3, 32, 64, 150, 5, 0},
                        {4, 1, 4, 32, 32, 97, 1, 0},
                        {4, 2, 1, 64, 96, 600, 3, 70},
                        {2, 1, 2, 32, 32, 32, 32, 7}};
  const Case odd[] = {
      {4, 2, 2, 7, 20, 31, 2, 5}, {2, 3, 1, 16, 80, 47, 4, 0}, {4, 1, 1, 1, 8, 9, 3, 2}};
  const auto test = [](const Case& c, GridOrder order) {
    TestScores(c, order);
    TestAttend(c, order);
  };
  for (GridOrder order : {GridOrder::kAmx, GridOrder::kVec, GridOrder::kPlain}) {
    for (const Case& c : cases) test(c, order);
    for (const Case& c : odd) {
      if (order != GridOrder::kAmx) test(c, order);
    }
  }
  TestNanScores();
  TestKeyChecks();
  TestDevicePool(cases[0], GridOrder::kAmx);
  TestDevicePool(odd[0], GridOrder::kPlain);
  std::printf("ok\n");
  return 0;
}
