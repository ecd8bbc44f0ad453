// Operands of calls on keys of blocks, with the static checks that need no data.
#pragma once

#include <memory>

#include "blockcompact/attend.h"
#include "blockcompact/block_scores.h"
#include "buffers.h"

namespace blockcompact_ffi {

using Number = ffi::Buffer<ffi::S32, 1>;
using Scores = ffi::Buffer<ffi::F32, 3>;

ffi::ErrorOr<blockcompact::AttendType> TypeOf(const ffi::AnyBuffer& buffer);

// Fails unless both have one element.
ffi::Error CheckNumbers(const Number& layer, const Number& num_keys);

// Keys of operands that lie on the host; views are not set.
ffi::ErrorOr<blockcompact::KeyBlocks> KeysOf(const Number& layer, const Int32Rows& table,
                                             const Number& num_keys);

// The view of blocks that JAX owns. Layouts from kNhd on are plain.
struct BlocksView {
  std::unique_ptr<blockcompact::PlainView> plain;
  std::unique_ptr<blockcompact::PackedView> packed;

  ffi::Error Set(const ffi::AnyBuffer& blocks, int64_t layout);
  const blockcompact::BlockShape& shape() const { return plain ? plain->shape : packed->shape; }
};

ffi::ErrorOr<blockcompact::ScoreCall> ScoreCallOf(const ffi::AnyBuffer& queries,
                                                  int64_t num_entries, ffi::Result<Scores>& scores,
                                                  int64_t block_tokens, int64_t reduction,
                                                  float scale);

}  // namespace blockcompact_ffi
