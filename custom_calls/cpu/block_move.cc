#include "blockcompact/block_move.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace blockcompact {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);

// Moves with distinct ends, and for each: who writes its source, how many still read its target.
struct MoveGraph {
  std::vector<BlockMove> moves;
  std::vector<size_t> writer_of_source;
  std::vector<size_t> num_readers;
};

MoveGraph BuildGraph(const std::vector<BlockMove>& all_moves) {
  MoveGraph graph;
  for (const BlockMove& move : all_moves) {
    if (move.from_block != move.to_block) graph.moves.push_back(move);
  }
  const std::vector<BlockMove>& moves = graph.moves;
  std::vector<size_t> by_target(moves.size());
  std::iota(by_target.begin(), by_target.end(), size_t{0});
  std::sort(by_target.begin(), by_target.end(),
            [&](size_t a, size_t b) { return moves[a].to_block < moves[b].to_block; });
  graph.writer_of_source.assign(moves.size(), kNone);
  graph.num_readers.assign(moves.size(), 0);
  for (size_t i = 0; i < moves.size(); ++i) {
    const auto found =
        std::lower_bound(by_target.begin(), by_target.end(), moves[i].from_block,
                         [&](size_t a, int32_t block) { return moves[a].to_block < block; });
    if (found == by_target.end() || moves[*found].to_block != moves[i].from_block) continue;
    graph.writer_of_source[i] = *found;
    ++graph.num_readers[*found];
  }
  return graph;
}

// What is left after all chains are simple cycles: every target has exactly one reader.
void AppendCycle(const MoveGraph& graph, size_t start, std::vector<bool>* is_done,
                 std::vector<BlockMove>* ordered) {
  const int32_t saved_block = graph.moves[start].to_block;
  ordered->push_back({saved_block, kScratchBlock});
  size_t i = start;
  while (graph.moves[i].from_block != saved_block) {
    ordered->push_back(graph.moves[i]);
    (*is_done)[i] = true;
    i = graph.writer_of_source[i];
  }
  ordered->push_back({kScratchBlock, graph.moves[i].to_block});
  (*is_done)[i] = true;
}

std::array<CopyDim, 3> PlainDims(const PlainView& view) {
  const PlainStrides& s = view.strides;
  return {CopyDim{2, s.kv_bytes, s.kv_bytes},
          CopyDim{view.shape.num_heads, s.head_bytes, s.head_bytes},
          CopyDim{view.shape.block_tokens, s.token_bytes, s.token_bytes}};
}

// Runs the moves of one layer in their order, a few in step: a batch keeps the order at every byte,
// and a byte of a block meets only the same byte of another.
void RunMoves(const BlockSpace& space, std::byte* base, const std::vector<BlockMove>& ordered,
              CopyStreams copy_streams) {
  const auto block = [&](int32_t number) { return base + number * space.block_stride_bytes; };
  std::vector<std::byte> scratch;
  CopyBatch batch(space.in_pool, copy_streams);
  for (const BlockMove& move : ordered) {
    if (move.to_block == kScratchBlock) {
      batch.Flush();
      scratch.resize(static_cast<size_t>(space.block_bytes));
      RunStridedCopy(space.to_scratch, block(move.from_block), scratch.data());
    } else if (move.from_block == kScratchBlock) {
      batch.Flush();
      RunStridedCopy(space.from_scratch, scratch.data(), block(move.to_block));
    } else {
      batch.Add({block(move.from_block), block(move.to_block)});
    }
  }
  batch.Flush();
}

}  // namespace

std::vector<BlockMove> OrderMoves(const std::vector<BlockMove>& moves) {
  MoveGraph graph = BuildGraph(moves);
  std::vector<BlockMove> ordered;
  std::vector<bool> is_done(graph.moves.size());
  std::vector<size_t> ready;
  for (size_t i = 0; i < graph.moves.size(); ++i) {
    if (graph.num_readers[i] == 0) ready.push_back(i);
  }
  while (!ready.empty()) {
    const size_t i = ready.back();
    ready.pop_back();
    ordered.push_back(graph.moves[i]);
    is_done[i] = true;
    const size_t writer = graph.writer_of_source[i];
    if (writer != kNone && --graph.num_readers[writer] == 0) ready.push_back(writer);
  }
  for (size_t i = 0; i < graph.moves.size(); ++i) {
    if (!is_done[i]) AppendCycle(graph, i, &is_done, &ordered);
  }
  return ordered;
}

BlockSpace BlockSpaceOf(const PlainView& view) {
  const BlockShape& shape = view.shape;
  const std::array<CopyDim, 3> in_pool = PlainDims(view);
  std::array<CopyDim, 3> to_scratch = in_pool;
  // Scratch keeps the pool's own order of dimensions, so runs stay as long as in the pool.
  std::array<size_t, 3> inner_first = {0, 1, 2};
  std::sort(inner_first.begin(), inner_first.end(), [&](size_t a, size_t b) {
    return in_pool[a].from_stride_bytes < in_pool[b].from_stride_bytes;
  });
  int64_t dense_bytes = shape.token_bytes();
  for (size_t dim : inner_first) {
    to_scratch[dim].to_stride_bytes = dense_bytes;
    dense_bytes *= to_scratch[dim].extent;
  }
  std::array<CopyDim, 3> from_scratch = to_scratch;
  for (CopyDim& dim : from_scratch) std::swap(dim.from_stride_bytes, dim.to_stride_bytes);
  return {view.layer_bases,
          view.strides.block_bytes,
          shape.packed_row_bytes(),
          PlanStridedCopy(in_pool, shape.token_bytes()),
          PlanStridedCopy(to_scratch, shape.token_bytes()),
          PlanStridedCopy(from_scratch, shape.token_bytes())};
}

BlockSpace BlockSpaceOf(const PackedView& view) {
  BlockSpace space = DenseBlockSpace(view.layer_bases, view.shape.packed_row_bytes());
  space.block_stride_bytes = view.block_bytes;
  return space;
}

BlockSpace DenseBlockSpace(std::vector<std::byte*> layer_bases, int64_t block_bytes) {
  const StridedCopy copy = PlanStridedCopy({}, block_bytes);
  return {std::move(layer_bases), block_bytes, block_bytes, copy, copy, copy};
}

void MoveBlocks(const BlockSpace& space, const Rows& rows, const ParallelFor& parallel_for) {
  const size_t num_layers = space.layer_bases.size();
  std::vector<std::vector<BlockMove>> moves_by_layer(num_layers);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    if (rows.is_hole(row)) continue;
    moves_by_layer[static_cast<size_t>(rows.layer_of(row))].push_back(
        {rows.from_block[row], rows.to_block[row]});
  }
  const CopyStreams copy_streams = CopyStreamsFor(rows.num_rows * space.block_bytes);
  parallel_for(static_cast<int64_t>(num_layers), [&](int64_t layer) {
    const auto place = static_cast<size_t>(layer);
    RunMoves(space, space.layer_bases[place], OrderMoves(moves_by_layer[place]), copy_streams);
  });
}

}  // namespace blockcompact
