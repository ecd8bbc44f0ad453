#include "blockcompact/lists.h"

#include <algorithm>

#include "blockcompact/rank_kernels.h"
#include "id_set.h"
#include "row_tasks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

// Runs at_place(place) for the filled places of a row, ascending.
template <typename AtPlace>
void ForFilled(const IdRows& rows, int64_t row, const AtPlace& at_place) {
  const uint8_t* is_filled = rows.is_filled + row * rows.num_places;
  for (int64_t place = 0; place < rows.num_places; ++place) {
    if (is_filled[place] != 0) at_place(place);
  }
}

// From the end, the last new repeat is the first place.
int32_t FirstRepeated(const IdRows& rows, int64_t row, IdSet* set) {
  const int32_t* ids = rows.ids + row * rows.num_places;
  const uint8_t* is_filled = rows.is_filled + row * rows.num_places;
  set->Clear();
  int64_t first = kHole;
  for (int64_t place = rows.num_places - 1; place >= 0; --place) {
    if (is_filled[place] != 0 && set->IsId(ids[place]) && !set->Add(ids[place])) first = place;
  }
  return static_cast<int32_t>(first);
}

int32_t FirstOutside(const IdRows& rows, int64_t row, uint32_t limit) {
  const int32_t* ids = rows.ids + row * rows.num_places;
  int64_t first = kHole;
  ForFilled(rows, row, [&](int64_t place) {
    if (first == kHole && static_cast<uint32_t>(ids[place]) >= limit) first = place;
  });
  return static_cast<int32_t>(first);
}

// Makes the set of one row's list, and reports what is wrong with it.
void AddAll(const IdRows& rows, int64_t row, int32_t bound, const ListFaults& faults, IdSet* set) {
  const int32_t* ids = rows.ids + row * rows.num_places;
  uint32_t largest = 0;  // a negative ID is a large one
  bool has_repeat = false, has_any = false;
  set->Clear();
  ForFilled(rows, row, [&](int64_t place) {
    has_any = true;
    largest = std::max(largest, static_cast<uint32_t>(ids[place]));
    if (set->IsId(ids[place])) has_repeat |= !set->Add(ids[place]);
  });
  const auto limit = static_cast<uint32_t>(std::max(bound, 0));
  const bool has_outside = has_any && largest >= limit;
  faults.outside[row] = has_outside ? FirstOutside(rows, row, limit) : kHole;
  faults.repeated[row] = has_repeat ? FirstRepeated(rows, row, set) : kHole;
}

void MarkRow(const MembersCall& call, int64_t row, IdSet set) {
  AddAll(call.ids, row, call.bound[row], call.faults, &set);
  AddAll(call.others, row, call.bound[row], call.other_faults, &set);
  const int64_t start = row * call.ids.num_places;
  const int32_t* ids = call.ids.ids + start;
  std::fill_n(call.is_member + start, call.ids.num_places, uint8_t{0});
  ForFilled(call.ids, row, [&](int64_t place) {
    call.is_member[start + place] = set.IsId(ids[place]) && set.Has(ids[place]) ? 1 : 0;
  });
}

int32_t* TakePlaces(int64_t num_places) {
  thread_local Scratch scratch;
  scratch.Reset(4 * num_places, 1);
  return scratch.Take<int32_t>(num_places);
}

// Lists a set ascending; writes up to kListSpare elements past what it counts.
constexpr int64_t kListSpare = 2;
int64_t ListIds(const IdSet& set, int64_t num_words, int64_t capacity, int32_t* listed) {
  int64_t num_listed = 0;
  for (int64_t place = 0; place < num_words && num_listed < capacity; ++place) {
    uint64_t word = set.word(place);
    const auto first = static_cast<int32_t>(place * IdSet::kWordBits);
    const int64_t count = __builtin_popcountll(word);
    int32_t* out = listed + num_listed;
    num_listed += count;
    for (int64_t i = 0; i < kListSpare; ++i, word &= word - 1) {  // few have more, none branches
      out[i] = first + __builtin_ctzll(word | uint64_t{1} << 63);
    }
    for (int64_t i = kListSpare; i < count; ++i, word &= word - 1) {
      out[i] = first + __builtin_ctzll(word);
    }
  }
  return std::min(num_listed, capacity);
}

void SortRow(const AscendingCall& call, int64_t row, IdSet set, int32_t* listed) {
  const int64_t start = row * call.ids.num_places;
  const int32_t* ids = call.ids.ids + start;
  const uint8_t* is_filled = call.ids.is_filled + start;
  set.Clear();
  if (call.max_ids > 0) {  // filled and other places alternate in no order
    for (int64_t place = 0; place < call.ids.num_places; ++place) {
      set.AddIf(is_filled[place] != 0, ids[place]);
    }
  }
  const int64_t num_listed = ListIds(set, IdSet::NumWords(call.max_ids), call.capacity, listed);
  int32_t* out = call.ascending + row * call.capacity;
  std::copy_n(listed, num_listed, out);
  std::fill(out + num_listed, out + call.capacity, kHole);
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
    int32_t* listed = TakePlaces(call.capacity + IdSet::kWordBits + kListSpare);
    for (int64_t row = begin; row < end; ++row) SortRow(call, row, set, listed);
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
