#include "blockcompact/lists.h"

#include <algorithm>

#include "blockcompact/rank_kernels.h"
#include "id_set.h"
#include "row_tasks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

// Adds a list to an empty set; returns the first place whose ID comes again, or kHole.
int32_t AddAll(const int32_t* ids, int64_t num_places, IdSet* set) {
  bool has_repeat = false;
  for (int64_t place = 0; place < num_places; ++place) {
    if (set->IsId(ids[place])) has_repeat |= !set->Add(ids[place]);
  }
  if (!has_repeat) return kHole;
  set->Clear();  // rare: from the end, the last new repeat is the first place
  int64_t first = kHole;
  for (int64_t place = num_places - 1; place >= 0; --place) {
    if (set->IsId(ids[place]) && !set->Add(ids[place])) first = place;
  }
  return static_cast<int32_t>(first);
}

void MarkRow(const MembersCall& call, int64_t row, IdSet set) {
  const int32_t* ids = call.ids.ids + row * call.ids.num_places;
  set.Clear();
  call.repeated_id[row] = AddAll(ids, call.ids.num_places, &set);
  set.Clear();
  call.repeated_other[row] =
      AddAll(call.others.ids + row * call.others.num_places, call.others.num_places, &set);
  uint8_t* is_member = call.is_member + row * call.ids.num_places;
  for (int64_t place = 0; place < call.ids.num_places; ++place) {
    is_member[place] = set.IsId(ids[place]) && set.Has(ids[place]) ? 1 : 0;
  }
}

void SortRow(const AscendingCall& call, int64_t row, IdSet set) {
  const int32_t* ids = call.ids.ids + row * call.ids.num_places;
  int32_t* out = call.ascending + row * call.capacity;
  set.Clear();
  for (int64_t place = 0; place < call.ids.num_places; ++place) {
    if (set.IsId(ids[place])) set.Add(ids[place]);
  }
  int64_t num_listed = 0;
  const int64_t num_words = IdSet::NumWords(call.max_ids);
  for (int64_t place = 0; place < num_words && num_listed < call.capacity; ++place) {
    for (uint64_t word = set.word(place); word != 0 && num_listed < call.capacity;
         word &= word - 1) {
      out[num_listed++] = static_cast<int32_t>(place * IdSet::kWordBits + __builtin_ctzll(word));
    }
  }
  std::fill(out + num_listed, out + call.capacity, kHole);
}

int32_t* TakePlaces(int64_t num_places) {
  thread_local Scratch scratch;
  scratch.Reset(4 * num_places, 1);
  return scratch.Take<int32_t>(num_places);
}

}  // namespace

void FindMembers(const MembersCall& call, const ParallelFor& parallel_for) {
  const int64_t row_elements =
      2 * (2 * call.ids.num_places + call.others.num_places) + IdSet::NumWords(call.max_ids);
  ForRows(call.num_rows, row_elements, parallel_for, [&](int64_t begin, int64_t end) {
    const IdSet set(TakeWords(call.max_ids), call.max_ids);
    for (int64_t row = begin; row < end; ++row) MarkRow(call, row, set);
  });
}

void SortIds(const AscendingCall& call, const ParallelFor& parallel_for) {
  const int64_t row_elements = 4 * call.ids.num_places + IdSet::NumWords(call.max_ids);
  ForRows(call.num_rows, row_elements, parallel_for, [&](int64_t begin, int64_t end) {
    const IdSet set(TakeWords(call.max_ids), call.max_ids);
    for (int64_t row = begin; row < end; ++row) SortRow(call, row, set);
  });
}

void ListMasks(const MaskCall& call, const ParallelFor& parallel_for) {
  const RankKernels kernels = SelectRankKernels(ChosenImpl());
  ForRows(call.num_rows, call.max_ids, parallel_for, [&](int64_t begin, int64_t end) {
    int32_t* places = TakePlaces(std::min(call.capacity, call.max_ids) + kRankSpare);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t num_set =
          kernels.list_set(call.is_set + row * call.max_ids, call.max_ids, call.capacity, places);
      int32_t* out = call.ascending + row * call.capacity;
      const int64_t num_listed = std::min(num_set, call.capacity);
      std::copy_n(places, num_listed, out);
      std::fill(out + num_listed, out + call.capacity, kHole);
    }
  });
}

void KeepPlaces(const KeepCall& call, const ParallelFor& parallel_for) {
  const RankKernels kernels = SelectRankKernels(ChosenImpl());
  ForRows(call.num_rows, 4 * call.num_places, parallel_for, [&](int64_t begin, int64_t end) {
    int32_t* listed = TakePlaces(call.num_places + kRankSpare);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row * call.num_places;
      const int64_t num_kept =
          kernels.list_set(call.is_kept + start, call.num_places, call.num_places, listed);
      for (int64_t place = 0; place < num_kept; ++place) {
        call.places[start + place] = listed[place];
        call.kept_first[start + place] = call.first[start + listed[place]];
        call.kept_second[start + place] = call.second[start + listed[place]];
      }
      for (int32_t* column : {call.places, call.kept_first, call.kept_second}) {
        std::fill(column + start + num_kept, column + start + call.num_places, kHole);
      }
    }
  });
}

}  // namespace blockcompact
