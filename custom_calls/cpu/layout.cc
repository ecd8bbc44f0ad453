#include "blockcompact/layout.h"

namespace blockcompact {
namespace {

std::string Positive(const char* name, int64_t value) {
  if (value > 0) return "";
  return std::string("`") + name + "` is " + std::to_string(value) + "; it must be positive";
}

}  // namespace

std::string PlainShapeProblem(const BlockShape& shape) {
  for (const std::string& problem :
       {Positive("num_kv_heads", shape.num_heads), Positive("block_tokens", shape.block_tokens),
        Positive("head_dim", shape.head_dim)}) {
    if (!problem.empty()) return problem;
  }
  if (shape.element_bytes != 1 && shape.element_bytes != 2 && shape.element_bytes != 4) {
    return "`element_bytes` is " + std::to_string(shape.element_bytes) + "; it must be 1, 2 or 4";
  }
  return "";
}

std::string PackedShapeProblem(PackedLayout layout, const BlockShape& shape) {
  const std::string plain = PlainShapeProblem(shape);
  if (!plain.empty() || layout == PackedLayout::kVec) return plain;
  if (shape.element_bytes == 1) {
    return "layout `amx` has no order for `element_bytes` = 1; use layout `vec`";
  }
  if (shape.block_tokens % 32 != 0) {
    return "layout `amx` needs `block_tokens` to be a multiple of 32, got " +
           std::to_string(shape.block_tokens) + "; use layout `vec`";
  }
  if (shape.head_dim % 32 != 0) {
    return "layout `amx` needs `head_dim` to be a multiple of 32, got " +
           std::to_string(shape.head_dim) + "; use layout `vec`";
  }
  return "";
}

}  // namespace blockcompact
