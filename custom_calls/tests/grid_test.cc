// The bodies of the CUDA kernels, run thread by thread on the host in shuffled order, against the
// CPU kernels: equal bytes, and every byte stored once.
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "blockcompact/block_move.h"
#include "blockcompact/rows.h"
#include "check.h"
#include "grid_emulator.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

void CheckStoredOnce(const Bytes& before, const Bytes& after, int64_t num_stored,
                     const char* what) {
  int64_t sum = 0;
  for (size_t i = 0; i < after.size(); ++i) {
    CHECK(store_counts[i] <= 1, "%s: byte %zu was stored %d times", what, i, store_counts[i]);
    CHECK(store_counts[i] == 1 || before[i] == after[i], "%s: byte %zu", what, i);
    sum += store_counts[i];
  }
  CHECK(sum == num_stored, "%s: %ld bytes stored, expected %ld", what, sum, num_stored);
}

// Rows over two layers with a hole, a partial and an empty block.
struct TestRows {
  std::vector<int32_t> layer, from, to, valid;
  explicit TestRows(int64_t block_tokens) {
    const int32_t all = static_cast<int32_t>(block_tokens);
    layer = {0, 1, 7, 1, 0, 0};
    from = {2, 0, kHole, 2, 1, 0};
    to = {0, 3, kHole, 0, 3, 2};
    valid = {all, all, 1, all - all / 3, all / 2, 0};
  }
  Rows rows() const {
    return {static_cast<int64_t>(layer.size()), layer.data(), from.data(), to.data(), valid.data()};
  }
  int64_t num_tokens() const { return valid[0] + valid[1] + valid[3] + valid[4]; }
};

void TestUnpack(PackedLayout layout, const BlockShape& shape, bool is_nhd, int64_t gap,
                int64_t offset) {
  PackedMemory source(shape, layout, 2, 3, 5);
  PlainMemory target(shape, 2, 4, is_nhd, gap, offset, 6);
  const Bytes before = target.bytes;
  const TestRows test(shape.block_tokens);
  UnpackRows(source.view, target.view, test.rows(), SerialFor);
  const Bytes expected = target.bytes;
  target.bytes = before;
  Call call(test.rows(), {2, 3, 4, shape.block_tokens});
  CHECK(call.status().ok(), "rows");
  Watch(target.bytes);
  CHECK(LaunchUnpack(layout, source.grid, target.grid, shape, call.grid, Emulator{}) == 0, "run");
  CHECK(target.bytes == expected, "unpack: layout %d, %ld bytes, H=%ld B=%ld D=%ld nhd=%d gap=%ld",
        static_cast<int>(layout), shape.element_bytes, shape.num_heads, shape.block_tokens,
        shape.head_dim, is_nhd, gap);
  const int64_t per_token = 2 * shape.num_heads * shape.token_bytes();
  CheckStoredOnce(before, target.bytes, test.num_tokens() * per_token, "unpack");
  const bool is_wide = HasWholeChunks(layout, shape, source.grid, target.grid);
  const int64_t v_bytes =
      layout == PackedLayout::kVec ? 16 : 16 / PairElements(shape.element_bytes);
  CHECK(widest_store == (is_wide ? v_bytes : shape.element_bytes), "stores of %d", widest_store);
  CHECK(is_wide || gap != 0 || offset != 0 || shape.token_bytes() % 16 != 0 ||
            shape.block_tokens * shape.element_bytes % 16 != 0,
        "aligned blocks went element by element");
}

void TestPack(PackedLayout layout, const BlockShape& shape, bool is_nhd, int64_t gap,
              int64_t offset) {
  PlainMemory source(shape, 2, 4, is_nhd, gap, offset, 7);
  PackedMemory target(shape, layout, 2, 3, 8);
  const Bytes before = target.bytes;
  const int32_t layer[] = {1, 0, 5, 0}, from[] = {3, 0, kHole, 3}, to[] = {0, 2, kHole, 1};
  const Rows rows{4, layer, from, to, nullptr};
  PackRows(source.view, target.view, rows, SerialFor);
  const Bytes expected = target.bytes;
  target.bytes = before;
  Call call(rows, {2, 4, 3, shape.block_tokens});
  Watch(target.bytes);
  CHECK(LaunchPack(layout, source.grid, target.grid, shape, call.grid, Emulator{}) == 0, "run");
  CHECK(target.bytes == expected, "pack: layout %d, %ld bytes, B=%ld D=%ld",
        static_cast<int>(layout), shape.element_bytes, shape.block_tokens, shape.head_dim);
  CheckStoredOnce(before, target.bytes, 3 * shape.packed_row_bytes(), "pack");
}

void TestGather(const BlockShape& shape, bool is_nhd, bool is_token_contiguous, int64_t gap) {
  PlainMemory source(shape, 2, 4, is_nhd, gap, 0, 9);
  const int32_t layer[] = {1, 0, 9, 0, 1}, from[] = {3, 0, kHole, 0, 2};
  const Rows rows{5, layer, from, nullptr, nullptr};
  PlainMemory target(shape, 1, 5, false, 0, 0, 10);
  if (is_token_contiguous) {
    const int64_t region = shape.region_bytes();
    const PlainStrides s{5 * shape.num_heads * region, region, 5 * region, shape.token_bytes()};
    target.view.strides = target.grid.strides = s;
  }
  const Bytes before = target.bytes;
  GatherRows(source.view, target.view, rows, SerialFor);
  const Bytes expected = target.bytes;
  target.bytes = before;
  Call call(rows, {2, 4, 0, shape.block_tokens});
  Watch(target.bytes);
  CHECK(LaunchGather(source.grid, target.grid, shape, call.grid, Emulator{}) == 0, "run");
  CHECK(target.bytes == expected, "gather");
  CheckStoredOnce(before, target.bytes, 5 * shape.packed_row_bytes(), "gather");
}

// Whole arrays, all layers as one: block columns are absent.
void TestConvertAll(PackedLayout layout, const BlockShape& shape, bool is_nhd) {
  PlainMemory plain(shape, 2, 3, is_nhd, 0, 0, 11);
  PackedMemory packed(shape, layout, 2, 3, 12);
  GridFault fault = kNoGridFault;
  const GridRows grid{
      {6, nullptr, nullptr, nullptr, nullptr}, {1, 6, 6, shape.block_tokens}, &fault, nullptr};
  const Bytes before = plain.bytes;
  CHECK(LaunchPack(layout, plain.grid, packed.grid, shape, grid, Emulator{}) == 0, "run");
  std::fill(plain.bytes.begin(), plain.bytes.end(), uint8_t{0});
  CHECK(LaunchUnpack(layout, packed.grid, plain.grid, shape, grid, Emulator{}) == 0, "run");
  const std::byte* first = plain.view.block(0, 0);
  const auto offset = first - reinterpret_cast<const std::byte*>(plain.bytes.data());
  CHECK(std::memcmp(first, before.data() + offset,
                    static_cast<size_t>(6 * shape.packed_row_bytes())) == 0,
        "there and back, layout %d", static_cast<int>(layout));
}

void TestShapes() {
  for (bool is_nhd : {false, true}) {
    TestConvertAll(PackedLayout::kVec, {2, 5, 24, 2}, is_nhd);
    TestConvertAll(PackedLayout::kAmx, {2, 32, 64, 2}, is_nhd);
  }
  for (bool is_nhd : {false, true}) {
    for (int64_t gap : {int64_t{0}, int64_t{4}, int64_t{16}}) {
      for (int64_t element_bytes : {1, 2, 4}) {
        for (int64_t block_tokens : {1, 2, 7, 8, 16, 17, 32}) {
          for (int64_t head_dim : {1, 3, 8, 16, 33, 80}) {
            const BlockShape shape{2, block_tokens, head_dim, element_bytes};
            TestUnpack(PackedLayout::kVec, shape, is_nhd, gap, 0);
            TestPack(PackedLayout::kVec, shape, is_nhd, gap, 0);
            TestGather(shape, is_nhd, gap == 4, gap);
          }
        }
      }
      for (int64_t element_bytes : {2, 4}) {
        for (int64_t block_tokens : {32, 64, 96}) {
          for (int64_t head_dim : {32, 64, 96}) {
            const BlockShape shape{2, block_tokens, head_dim, element_bytes};
            for (int64_t offset : {int64_t{0}, element_bytes}) {
              TestUnpack(PackedLayout::kAmx, shape, is_nhd, gap, offset);
              TestPack(PackedLayout::kAmx, shape, is_nhd, gap, offset);
            }
          }
        }
      }
    }
  }
}

// Each offset of a region, back and forth.
void TestPlaces() {
  const auto check = [](BlockPlace place, int64_t offset, int64_t back) {
    CHECK(back == offset, "offset %ld is token %ld dim %ld, back %ld", offset, place.token,
          place.dim, back);
  };
  for (int64_t tokens : {1, 2, 7, 16, 32, 64, 96, 128}) {
    for (int64_t dims : {1, 3, 16, 32, 64, 80, 96, 128}) {
      for (int64_t offset = 0; offset < tokens * dims; ++offset) {
        BlockPlace p = VecKPlace(offset, tokens);
        check(p, offset, VecKOffset(p.token, p.dim, tokens));
        p = VecVPlace(offset, dims);
        check(p, offset, VecVOffset(p.token, p.dim, dims));
        if (tokens % 32 != 0 || dims % 32 != 0) continue;
        for (int64_t pair : {1, 2}) {
          p = AmxKPlace(offset, dims, pair);
          check(p, offset, AmxKOffset(p.token, p.dim, dims, pair));
          p = AmxVPlace(offset, tokens, pair);
          check(p, offset, AmxVOffset(p.token, p.dim, tokens, pair));
        }
      }
    }
  }
}

int32_t Random(std::mt19937& random, int32_t first, int32_t last) {
  return first + static_cast<int32_t>(random() % static_cast<uint32_t>(last - first + 1));
}

void TestRowChecks() {
  std::mt19937 random(13);
  int num_faulty = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t num_rows = Random(random, 0, 6);
    std::vector<int32_t> layer, from, to, valid;
    const bool is_wild = round % 2 == 0;
    for (int64_t row = 0; row < num_rows; ++row) {
      layer.push_back(Random(random, is_wild ? -1 : 0, is_wild ? 2 : 1));
      from.push_back(Random(random, is_wild ? -2 : 0, is_wild ? 4 : 3));
      to.push_back(Random(random, is_wild ? -2 : 0, is_wild ? 5 : 4));
      valid.push_back(Random(random, is_wild ? -1 : 0, is_wild ? 9 : 8));
    }
    const bool has_to = round % 5 != 0;
    const Rows rows{num_rows, layer.data(), from.data(), has_to ? to.data() : nullptr,
                    round % 3 == 0 ? nullptr : valid.data()};
    const RowLimits limits{2, 4, 5, 8};
    const Status expected = CheckRows(rows, limits);
    const Status status = Call(rows, limits).status();
    CHECK(status.code == expected.code && status.row == expected.row,
          "round %d: code %d row %ld, expected code %d row %ld", round,
          static_cast<int>(status.code), status.row, static_cast<int>(expected.code), expected.row);
    num_faulty += !expected.ok();
  }
  CHECK(num_faulty > 2000 && num_faulty < 18000, "%d of 20000 rounds were faulty", num_faulty);
}

void TestRefusedCallsMoveNothing() {
  const BlockShape shape{1, 32, 32, 2};
  PackedMemory source(shape, PackedLayout::kAmx, 1, 3, 1);
  PlainMemory target(shape, 1, 4, false, 0, 0, 2);
  const Bytes before = target.bytes;
  const int32_t from[] = {0, 1}, to[] = {1, 1};
  Call call({2, nullptr, from, to, nullptr}, {1, 3, 4, 32});
  CHECK(call.status().code == StatusCode::kDuplicateDestination && call.status().row == 1, "code");
  LaunchUnpack(PackedLayout::kAmx, source.grid, target.grid, shape, call.grid, Emulator{});
  Bytes saved(static_cast<size_t>(2 * shape.packed_row_bytes()));
  LaunchMove({target.grid.base, Data(saved), shape.packed_row_bytes(), call.grid}, Emulator{});
  CHECK(target.bytes == before, "a refused call moved bytes");
  PlainMemory out(shape, 1, 2, false, 0, 0, 3);
  GridRows gather = call.grid;
  LaunchGather(target.grid, target.grid, shape, gather, Emulator{});
  CHECK(target.bytes == before, "a refused copy moved bytes");
  gather.rows.to_block = nullptr;
  LaunchGather(target.grid, out.grid, shape, gather, Emulator{});
  const std::byte* gathered = out.view.block(0, 0);
  CHECK(std::all_of(gathered, gathered + 2 * shape.packed_row_bytes(),
                    [](std::byte b) { return b == std::byte{0}; }),
        "a refused gather is not zero");
}

void TestMoves() {
  std::mt19937 random(17);
  for (int round = 0; round < 3000; ++round) {
    const int64_t num_layers = 1 + round % 2, num_blocks = 7;
    const int64_t block_bytes = std::array<int64_t, 6>{1, 2, 12, 24, 32, 80}[random() % 6];
    Bytes pool = RandomBytes(num_layers * num_blocks * block_bytes + 16, random());
    const int64_t offset = round % 3 == 0 ? 1 : 0;
    std::vector<std::pair<int32_t, int32_t>> cells;
    for (int32_t layer = 0; layer < num_layers; ++layer) {
      for (int32_t block = 0; block < num_blocks; ++block) cells.push_back({layer, block});
    }
    std::shuffle(cells.begin(), cells.end(), random);
    cells.resize(random() % (cells.size() + 1));
    std::vector<int32_t> layer, from, to;
    for (const auto& [cell_layer, block] : cells) {
      const bool is_hole = random() % 8 == 0;
      layer.push_back(cell_layer);
      from.push_back(is_hole ? kHole : Random(random, 0, num_blocks - 1));
      to.push_back(is_hole ? kHole : block);
    }
    const Rows rows{static_cast<int64_t>(to.size()), layer.data(), from.data(), to.data(), nullptr};
    Bytes expected = pool;
    std::vector<std::byte*> bases;
    for (int64_t l = 0; l < num_layers; ++l) {
      bases.push_back(Data(expected, offset + l * num_blocks * block_bytes));
    }
    MoveBlocks(DenseBlockSpace(bases, block_bytes), rows, SerialFor);
    Call call(rows, {num_layers, num_blocks, num_blocks, 0});
    CHECK(call.status().ok(), "rows");
    const Bytes before = pool;
    Bytes saved(static_cast<size_t>(rows.num_rows * block_bytes + 16));
    int64_t num_moved = 0;
    for (size_t row = 0; row < to.size(); ++row) num_moved += from[row] != to[row];
    Watch(pool);
    LaunchMove({Data(pool, offset), Data(saved), block_bytes, call.grid}, Emulator{});
    CHECK(pool == expected, "round %d, blocks of %ld bytes", round, block_bytes);
    CheckStoredOnce(before, pool, num_moved * block_bytes, "move");
  }
}

void TestFarLayers() {
  const BlockShape shape{2, 32, 32, 2};
  const int64_t block_bytes = shape.packed_row_bytes();
  const int64_t layer_bytes = int64_t{5} << 30;  // the second layer starts past 2^32
  void* region = mmap(nullptr, static_cast<size_t>(2 * layer_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(region != MAP_FAILED, "mmap");
  PackedMemory source(shape, PackedLayout::kVec, 2, 1, 4);
  const int64_t num_blocks = layer_bytes / block_bytes;
  const GridPlain target{static_cast<std::byte*>(region),
                         layer_bytes,
                         {block_bytes / 2, block_bytes, block_bytes / 4, 64}};
  const int32_t layer[] = {1}, from[] = {0}, to[] = {static_cast<int32_t>(num_blocks - 1)};
  GridFault fault = kNoGridFault;
  const GridRows grid{{1, layer, from, to, nullptr}, {2, 1, num_blocks, 32}, &fault, nullptr};
  LaunchUnpack(PackedLayout::kVec, source.grid, target, shape, grid, Emulator{});
  // V of `vec` is plain, so the last head's V stands at the very end of the region.
  CHECK(std::memcmp(static_cast<std::byte*>(region) + 2 * layer_bytes - 2048,
                    source.view.block(1, 0) + block_bytes - 2048, 2048) == 0,
        "the last bytes of the region");
  munmap(region, static_cast<size_t>(2 * layer_bytes));
}

}  // namespace

int main() {
  TestPlaces();
  TestShapes();
  TestRowChecks();
  TestRefusedCallsMoveNothing();
  TestMoves();
  TestFarLayers();
  std::printf("ok\n");
  return 0;
}
