// Ranking and its check, and lists and masks of bounded IDs. Leading axes of an operand are rows.
#include "blockcompact/lists.h"
#include "blockcompact/rank.h"
#include "buffers.h"
#include "handlers.h"

namespace blockcompact_ffi {
namespace {

using Scores = ffi::Buffer<ffi::F32>;
using Ids = ffi::Buffer<ffi::S32>;
using Mask = ffi::Buffer<ffi::PRED>;

template <typename Buffer>
int64_t LastDim(const Buffer& buffer) {
  return buffer.dimensions().size() == 0 ? 0 : buffer.dimensions().back();
}

template <typename Buffer>
int64_t NumRows(const Buffer& buffer) {
  int64_t num_rows = 1;
  const auto dims = buffer.dimensions();
  for (size_t axis = 0; axis + 1 < dims.size(); ++axis) num_rows *= dims[axis];
  return num_rows;
}

template <typename Buffer>
bool HasElements(const Buffer& buffer, int64_t count) {
  return static_cast<int64_t>(buffer.element_count()) == count;
}

ffi::Error WrongShape(const char* sentence) { return ffi::Error::InvalidArgument(sentence); }

template <typename Buffer>
const uint8_t* Bytes(const Buffer& buffer) {
  return reinterpret_cast<const uint8_t*>(buffer.untyped_data());
}

ffi::Error Rank(ffi::ThreadPool threads, Scores scores, Ids num_candidates, Ids count,
                Mask is_excluded, ffi::Result<Ids> blocks, ffi::Result<Ids> first_non_finite,
                int64_t num_sinks, int64_t order, bool has_excluded) {
  blockcompact::RankCall call;
  call.num_rows = NumRows(scores);
  call.num_blocks = LastDim(scores);
  call.capacity = LastDim(*blocks);
  if (!HasElements(num_candidates, call.num_rows) || !HasElements(count, call.num_rows) ||
      !HasElements(*first_non_finite, call.num_rows) || NumRows(*blocks) != call.num_rows ||
      (has_excluded && !HasElements(is_excluded, call.num_rows * call.num_blocks))) {
    return WrongShape("the operands of rank differ in rows or blocks");
  }
  call.scores = scores.typed_data();
  call.num_candidates = num_candidates.typed_data();
  call.count = count.typed_data();
  call.is_excluded = has_excluded ? Bytes(is_excluded) : nullptr;
  call.num_sinks = num_sinks;
  call.order = static_cast<blockcompact::RankOrder>(order);
  call.blocks = blocks->typed_data();
  call.first_non_finite = first_non_finite->typed_data();
  blockcompact::RankRows(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error AreBest(ffi::ThreadPool threads, Scores scores, Ids num_candidates, Ids listed,
                   Ids num_listed, ffi::Result<Mask> are_best, int64_t num_sinks) {
  const int64_t num_rows = NumRows(scores);
  blockcompact::BestCall call;
  call.num_batches = static_cast<int64_t>(are_best->element_count());
  if (!HasElements(num_candidates, num_rows) || !HasElements(num_listed, num_rows) ||
      NumRows(listed) != num_rows || (num_rows > 0 && call.num_batches == 0) ||
      (num_rows > 0 && num_rows % call.num_batches != 0)) {
    return WrongShape("the operands of are_best differ in rows");
  }
  call.num_rows = num_rows > 0 ? num_rows / call.num_batches : 0;
  call.num_blocks = LastDim(scores);
  call.num_places = LastDim(listed);
  call.num_sinks = num_sinks;
  call.scores = scores.typed_data();
  call.num_candidates = num_candidates.typed_data();
  call.listed = listed.typed_data();
  call.num_listed = num_listed.typed_data();
  call.are_best = reinterpret_cast<uint8_t*>(are_best->untyped_data());
  blockcompact::CheckBest(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

// A list and the mask of its filled places.
blockcompact::IdRows RowsOf(const Ids& ids, const Mask& is_filled) {
  return {ids.typed_data(), Bytes(is_filled), LastDim(ids)};
}

ffi::Error FindMembers(ffi::ThreadPool threads, Ids ids, Mask is_filled, Ids others,
                       Mask is_other_filled, Ids bound, ffi::Result<Mask> is_member,
                       ffi::Result<Ids> repeated_id, ffi::Result<Ids> repeated_other,
                       ffi::Result<Ids> outside_id, ffi::Result<Ids> outside_other,
                       int64_t max_ids) {
  blockcompact::MembersCall call;
  call.num_rows = NumRows(ids);
  call.ids = RowsOf(ids, is_filled);
  call.others = RowsOf(others, is_other_filled);
  bool is_right = NumRows(others) == call.num_rows;
  for (const Ids& rows : {bound, *repeated_id, *repeated_other, *outside_id, *outside_other}) {
    is_right = is_right && HasElements(rows, call.num_rows);
  }
  const auto num_ids = static_cast<int64_t>(ids.element_count());
  if (!is_right || !HasElements(*is_member, num_ids) || !HasElements(is_filled, num_ids) ||
      !HasElements(is_other_filled, static_cast<int64_t>(others.element_count()))) {
    return WrongShape("the operands of find_members differ in rows or places");
  }
  call.bound = bound.typed_data();
  call.max_ids = max_ids;
  call.is_member = reinterpret_cast<uint8_t*>(is_member->untyped_data());
  call.faults = {repeated_id->typed_data(), outside_id->typed_data()};
  call.other_faults = {repeated_other->typed_data(), outside_other->typed_data()};
  blockcompact::FindMembers(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error SortIds(ffi::ThreadPool threads, Ids ids, Mask is_filled, ffi::Result<Ids> ascending,
                   int64_t max_ids) {
  if (NumRows(ids) != NumRows(*ascending) ||
      !HasElements(is_filled, static_cast<int64_t>(ids.element_count()))) {
    return WrongShape("the operands of sort_ids differ in rows or places");
  }
  blockcompact::AscendingCall call;
  call.ids = RowsOf(ids, is_filled);
  call.num_rows = NumRows(ids);
  call.max_ids = max_ids;
  call.capacity = LastDim(*ascending);
  call.ascending = ascending->typed_data();
  blockcompact::SortIds(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

ffi::Error KeepPlaces(ffi::ThreadPool threads, Mask is_kept, Ids first, Ids second,
                      ffi::Result<Ids> places, ffi::Result<Ids> kept_first,
                      ffi::Result<Ids> kept_second) {
  const int64_t num_elements = is_kept.element_count();
  for (const Ids& column : {first, second, *places, *kept_first, *kept_second}) {
    if (!HasElements(column, num_elements)) {
      return WrongShape("the operands of keep_places differ in rows or places");
    }
  }
  blockcompact::KeepCall call;
  call.is_kept = Bytes(is_kept);
  call.first = first.typed_data();
  call.second = second.typed_data();
  call.num_rows = NumRows(is_kept);
  call.num_places = LastDim(is_kept);
  call.places = places->typed_data();
  call.kept_first = kept_first->typed_data();
  call.kept_second = kept_second->typed_data();
  blockcompact::KeepPlaces(call, OnThreadPool(threads));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kRank, Rank,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Scores>()
                           .Arg<Ids>()   // num_candidates
                           .Arg<Ids>()   // count
                           .Arg<Mask>()  // is_excluded
                           .Ret<Ids>()   // blocks
                           .Ret<Ids>()   // first_non_finite
                           .Attr<int64_t>("num_sinks")
                           .Attr<int64_t>("order")
                           .Attr<bool>("has_excluded"));

XLA_FFI_DEFINE_HANDLER(kAreBest, AreBest,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Scores>()
                           .Arg<Ids>()   // num_candidates
                           .Arg<Ids>()   // listed
                           .Arg<Ids>()   // num_listed
                           .Ret<Mask>()  // are_best
                           .Attr<int64_t>("num_sinks"));

XLA_FFI_DEFINE_HANDLER(kFindMembers, FindMembers,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ids>()   // ids
                           .Arg<Mask>()  // is_filled
                           .Arg<Ids>()   // others
                           .Arg<Mask>()  // is_other_filled
                           .Arg<Ids>()   // bound
                           .Ret<Mask>()  // is_member
                           .Ret<Ids>()   // repeated_id
                           .Ret<Ids>()   // repeated_other
                           .Ret<Ids>()   // outside_id
                           .Ret<Ids>()   // outside_other
                           .Attr<int64_t>("max_ids"));

XLA_FFI_DEFINE_HANDLER(kSortIds, SortIds,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ids>()   // ids
                           .Arg<Mask>()  // is_filled
                           .Ret<Ids>()
                           .Attr<int64_t>("max_ids"));

XLA_FFI_DEFINE_HANDLER(kKeepPlaces, KeepPlaces,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Mask>()  // is_kept
                           .Arg<Ids>()   // first
                           .Arg<Ids>()   // second
                           .Ret<Ids>()   // places
                           .Ret<Ids>()   // kept_first
                           .Ret<Ids>());

}  // namespace

HandlerList RankHandlers() {
  return {{"blockcompact_rank", kRank},
          {"blockcompact_are_best", kAreBest},
          {"blockcompact_find_members", kFindMembers},
          {"blockcompact_sort_ids", kSortIds},
          {"blockcompact_keep_places", kKeepPlaces}};
}

}  // namespace blockcompact_ffi
