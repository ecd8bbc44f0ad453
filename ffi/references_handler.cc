// Marks of tables, and reference counts that follow a commit. Leading axes are batches.
#include "blockcompact/references.h"
#include "buffers.h"
#include "handlers.h"

namespace blockcompact_ffi {
namespace {

using Counts = ffi::Buffer<ffi::S32>;
using Mask = ffi::Buffer<ffi::PRED>;

// Size of an axis counted from the last one, 0.
template <typename Buffer>
int64_t Dim(const Buffer& buffer, size_t from_last) {
  const auto dims = buffer.dimensions();
  return from_last < dims.size() ? dims[dims.size() - 1 - from_last] : 1;
}

// Product of all axes before the last num_last.
template <typename Buffer>
int64_t Leading(const Buffer& buffer, size_t num_last) {
  const auto dims = buffer.dimensions();
  int64_t product = 1;
  for (size_t axis = 0; axis + num_last < dims.size(); ++axis) product *= dims[axis];
  return product;
}

template <typename Buffer>
bool HasElements(const Buffer& buffer, int64_t count) {
  return static_cast<int64_t>(buffer.element_count()) == count;
}

uint8_t* Bytes(const Mask& mask) { return reinterpret_cast<uint8_t*>(mask.untyped_data()); }

ffi::Error MarkIds(ffi::ThreadPool threads, Counts ids, Counts num_filled, Counts owner,
                   ffi::Result<Mask> is_marked) {
  blockcompact::MarkCall call;
  call.num_batches = Leading(ids, 2);
  call.num_rows = Dim(ids, 1);
  call.num_places = Dim(ids, 0);
  call.num_owners = Dim(*is_marked, 1);
  call.max_ids = Dim(*is_marked, 0);
  const int64_t num_rows = call.num_batches * call.num_rows;
  if (!HasElements(num_filled, num_rows) || !HasElements(owner, num_rows) ||
      Leading(*is_marked, 2) != call.num_batches) {
    return ffi::Error::InvalidArgument("the operands of mark_ids differ in rows");
  }
  call.ids = ids.typed_data();
  call.num_filled = num_filled.typed_data();
  call.owner = owner.typed_data();
  call.is_marked = Bytes(*is_marked);
  blockcompact::MarkIds(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error ListFree(ffi::ThreadPool threads, Counts references, ffi::Result<Counts> blocks,
                    ffi::Result<Counts> num_free) {
  blockcompact::FreeCall call;
  call.num_batches = Leading(references, 3);
  call.num_kinds = Dim(references, 2);
  call.num_owners = Dim(references, 1);
  call.num_blocks = Dim(references, 0);
  call.capacity = Dim(*blocks, 0);
  const int64_t num_owners = call.num_batches * call.num_owners;
  if (!HasElements(*num_free, num_owners) || !HasElements(*blocks, num_owners * call.capacity)) {
    return ffi::Error::InvalidArgument("the operands of list_free differ in shape");
  }
  call.references = references.typed_data();
  call.blocks = blocks->typed_data();
  call.num_free = num_free->typed_data();
  blockcompact::ListFree(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error MoveReferences(ffi::ThreadPool threads, Counts references, Counts generation,
                          Counts landed, Counts landed_generation, Mask is_before, Mask is_after,
                          ffi::Result<Counts> moved, ffi::Result<Mask> is_released,
                          ffi::Result<Counts> num_retired, ffi::Result<Counts> faults,
                          int64_t regular, int64_t transfer) {
  blockcompact::ReferenceCall call;
  call.num_batches = Leading(references, 3);
  call.num_kinds = Dim(references, 2);
  call.num_owners = Dim(references, 1);
  call.num_blocks = Dim(references, 0);
  call.num_places = Dim(landed, 0);
  call.regular = regular;
  call.transfer = transfer;
  const int64_t num_owners = call.num_batches * call.num_owners;
  const int64_t num_cells = num_owners * call.num_blocks;
  if (regular < 0 || regular >= call.num_kinds || transfer < 0 || transfer >= call.num_kinds ||
      regular == transfer) {
    return ffi::Error::InvalidArgument("the kinds of move_references are not two of the counts'");
  }
  if (!HasElements(generation, num_cells) || !HasElements(is_before, num_cells) ||
      !HasElements(is_after, num_cells) || !HasElements(landed, num_owners * call.num_places) ||
      !HasElements(landed_generation, num_owners * call.num_places) ||
      !HasElements(*moved, static_cast<int64_t>(references.element_count())) ||
      !HasElements(*is_released, num_cells) || !HasElements(*num_retired, num_owners) ||
      !HasElements(*faults, num_owners * blockcompact::kNumReferenceChecks)) {
    return ffi::Error::InvalidArgument("the operands of move_references differ in shape");
  }
  call.references = references.typed_data();
  call.generation = generation.typed_data();
  call.landed = landed.typed_data();
  call.landed_generation = landed_generation.typed_data();
  call.is_before = Bytes(is_before);
  call.is_after = Bytes(is_after);
  call.moved = moved->typed_data();
  call.is_released = Bytes(*is_released);
  call.num_retired = num_retired->typed_data();
  call.faults = faults->typed_data();
  blockcompact::MoveReferences(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMarkIds, MarkIds,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Counts>()  // ids
                           .Arg<Counts>()  // num_filled
                           .Arg<Counts>()  // owner
                           .Ret<Mask>());

XLA_FFI_DEFINE_HANDLER(kListFree, ListFree,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Counts>()    // references
                           .Ret<Counts>()    // blocks
                           .Ret<Counts>());  // num_free

XLA_FFI_DEFINE_HANDLER(kMoveReferences, MoveReferences,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Counts>()  // references
                           .Arg<Counts>()  // generation
                           .Arg<Counts>()  // landed
                           .Arg<Counts>()  // landed_generation
                           .Arg<Mask>()    // is_before
                           .Arg<Mask>()    // is_after
                           .Ret<Counts>()  // moved
                           .Ret<Mask>()    // is_released
                           .Ret<Counts>()  // num_retired
                           .Ret<Counts>()  // faults
                           .Attr<int64_t>("regular")
                           .Attr<int64_t>("transfer"));

}  // namespace

HandlerList ReferenceHandlers() {
  return {{"blockcompact_mark_ids", kMarkIds},
          {"blockcompact_list_free", kListFree},
          {"blockcompact_move_references", kMoveReferences}};
}

}  // namespace blockcompact_ffi
