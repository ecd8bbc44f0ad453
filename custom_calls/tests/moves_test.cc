// Block moves, strided copies and row checks against naive models.
#include <algorithm>
#include <map>
#include <numeric>

#include "blockcompact/block_move.h"
#include "blockcompact/rows.h"
#include "blockcompact/strided_copy.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: a test program

namespace {

// Each block holds one number; scratch holds one more.
std::vector<int> RunOrdered(const std::vector<BlockMove>& ordered, std::vector<int> blocks,
                            int* num_saves) {
  int scratch = -1;
  for (const BlockMove& move : ordered) {
    const int value = move.from_block == kScratchBlock ? scratch : blocks[move.from_block];
    if (move.to_block == kScratchBlock) {
      scratch = value;
      ++*num_saves;
    } else {
      blocks[move.to_block] = value;
    }
  }
  return blocks;
}

int CountCycles(const std::vector<BlockMove>& moves) {
  std::map<int, int> from_of;
  for (const BlockMove& move : moves) from_of[move.to_block] = move.from_block;
  int num_cycles = 0;
  std::map<int, bool> is_seen;
  for (const auto& [start, unused] : from_of) {
    std::vector<int> path;
    int block = start;
    while (from_of.count(block) && !is_seen[block]) {
      is_seen[block] = true;
      path.push_back(block);
      block = from_of[block];
    }
    const auto found = std::find(path.begin(), path.end(), block);
    if (found != path.end() && path.end() - found > 1) ++num_cycles;
  }
  return num_cycles;
}

void TestOrderMoves() {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    const int num_blocks = 1 + static_cast<int>(random() % 8);
    std::vector<int> targets(static_cast<size_t>(num_blocks));
    std::iota(targets.begin(), targets.end(), 0);
    std::shuffle(targets.begin(), targets.end(), random);
    targets.resize(random() % (static_cast<size_t>(num_blocks) + 1));
    std::vector<BlockMove> moves;
    std::vector<int> before(static_cast<size_t>(num_blocks));
    std::iota(before.begin(), before.end(), 100);
    std::vector<int> expected = before;
    for (int target : targets) {
      moves.push_back({static_cast<int32_t>(random() % static_cast<unsigned>(num_blocks)), target});
      expected[target] = before[moves.back().from_block];
    }
    int num_saves = 0;
    const std::vector<int> after = RunOrdered(OrderMoves(moves), before, &num_saves);
    CHECK(after == expected, "round %d", round);
    // A cycle with a reader outside could be done without scratch; never more than one save each.
    CHECK(num_saves <= CountCycles(moves), "round %d: %d saves", round, num_saves);
  }
}

void TestStridedCopy() {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    const std::array<int64_t, 3> extents = {static_cast<int64_t>(1 + random() % 3),
                                            static_cast<int64_t>(1 + random() % 4),
                                            static_cast<int64_t>(1 + random() % 5)};
    const int64_t run = static_cast<int64_t>(1 + random() % 9);
    std::array<CopyDim, 3> dims;
    int64_t sizes[2];
    for (int side = 0; side < 2; ++side) {  // random order of dimensions, random gaps
      std::array<size_t, 3> order = {0, 1, 2};
      std::shuffle(order.begin(), order.end(), random);
      int64_t stride = run;
      for (size_t dim : order) {
        stride += random() % 2 == 0 ? 0 : 3;
        dims[dim].extent = extents[dim];
        (side == 0 ? dims[dim].from_stride_bytes : dims[dim].to_stride_bytes) = stride;
        stride *= extents[dim];
      }
      sizes[side] = stride;
    }
    const std::vector<uint8_t> from = RandomBytes(sizes[0], static_cast<uint32_t>(random()));
    std::vector<uint8_t> to = RandomBytes(sizes[1], static_cast<uint32_t>(random()));
    std::vector<uint8_t> expected = to;
    for (int64_t i = 0; i < extents[0]; ++i) {
      for (int64_t j = 0; j < extents[1]; ++j) {
        for (int64_t k = 0; k < extents[2]; ++k) {
          for (int64_t b = 0; b < run; ++b) {
            expected[i * dims[0].to_stride_bytes + j * dims[1].to_stride_bytes +
                     k * dims[2].to_stride_bytes + b] =
                from[i * dims[0].from_stride_bytes + j * dims[1].from_stride_bytes +
                     k * dims[2].from_stride_bytes + b];
          }
        }
      }
    }
    const StridedCopy plan = PlanStridedCopy(dims, run);
    RunStridedCopy(plan, reinterpret_cast<const std::byte*>(from.data()),
                   reinterpret_cast<std::byte*>(to.data()));
    CHECK(to == expected, "round %d", round);
  }
}

void CheckFault(const char* name, std::vector<int32_t> layer, std::vector<int32_t> from,
                std::vector<int32_t> to, std::vector<int32_t> valid, Status expected) {
  const Rows rows{static_cast<int64_t>(from.size()), layer.data(), from.data(), to.data(),
                  valid.data()};
  const Status status = CheckRows(rows, {2, 5, 4, 32});
  CHECK(status.code == expected.code && status.row == expected.row, "%s: code %d row %ld", name,
        static_cast<int>(status.code), status.row);
}

void TestCheckRows() {
  CheckFault("fine", {0, 1, 9}, {4, 4, -1}, {3, 3, -1}, {32, 0, 99}, {});
  CheckFault("layer", {0, 2}, {0, 0}, {0, 1}, {1, 1}, {StatusCode::kLayerOutOfRange, 1});
  CheckFault("from", {0, 0}, {0, 5}, {0, 1}, {1, 1}, {StatusCode::kFromBlockOutOfRange, 1});
  CheckFault("below", {0, 0}, {0, -2}, {0, 1}, {1, 1}, {StatusCode::kFromBlockOutOfRange, 1});
  CheckFault("to", {0}, {0}, {4}, {1}, {StatusCode::kToBlockOutOfRange, 0});
  CheckFault("half hole", {0}, {0}, {-1}, {1}, {StatusCode::kPartialHole, 0});
  CheckFault("half hole", {0}, {-1}, {0}, {1}, {StatusCode::kPartialHole, 0});
  CheckFault("tokens", {0}, {0}, {0}, {33}, {StatusCode::kValidTokensOutOfRange, 0});
  CheckFault("tokens", {0}, {0}, {0}, {-1}, {StatusCode::kValidTokensOutOfRange, 0});
  CheckFault("twice", {0, 1, 1, 1}, {0, 1, 2, 3}, {0, 0, 1, 0}, {1, 1, 1, 1},
             {StatusCode::kDuplicateDestination, 3});
}

}  // namespace

int main() {
  TestOrderMoves();
  TestStridedCopy();
  TestCheckRows();
  std::printf("ok\n");
  return 0;
}
