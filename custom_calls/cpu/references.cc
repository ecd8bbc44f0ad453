#include "blockcompact/references.h"

#include <algorithm>

#include "blockcompact/rank_kernels.h"
#include "row_tasks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

bool IsBlock(int32_t id, int64_t num_blocks) {
  return static_cast<uint32_t>(id) < static_cast<uint64_t>(num_blocks);
}

void MarkOwner(const MarkCall& call, int64_t batch, int64_t owner) {
  uint8_t* is_marked = call.is_marked + (batch * call.num_owners + owner) * call.max_ids;
  std::fill_n(is_marked, call.max_ids, uint8_t{0});
  for (int64_t row = batch * call.num_rows; row < (batch + 1) * call.num_rows; ++row) {
    if (call.owner[row] != owner) continue;
    const int32_t* ids = call.ids + row * call.num_places;
    const int64_t num_filled = std::min<int64_t>(call.num_filled[row], call.num_places);
    for (int64_t place = 0; place < num_filled; ++place) {
      if (IsBlock(ids[place], call.max_ids)) is_marked[ids[place]] = 1;
    }
  }
}

// One owner's part of a call.
struct OwnerReferences {
  OwnerReferences(const ReferenceCall& call, int64_t batch, int64_t owner)
      : num_blocks(call.num_blocks), num_places(call.num_places) {
    const int64_t row = batch * call.num_owners + owner;
    generation = call.generation + row * num_blocks;
    landed = call.landed + row * num_places;
    landed_generation = call.landed_generation + row * num_places;
    is_before = call.is_before + row * num_blocks;
    is_after = call.is_after + row * num_blocks;
    is_released = call.is_released + row * num_blocks;
    num_retired = call.num_retired + row;
    faults = call.faults + row * kNumReferenceChecks;
    kind_stride = call.num_owners * num_blocks;
    const int64_t start = (batch * call.num_kinds * call.num_owners + owner) * num_blocks;
    references = call.references + start;
    moved = call.moved + start;
  }

  const int32_t* old_of(int64_t kind) const { return references + kind * kind_stride; }
  int32_t* new_of(int64_t kind) const { return moved + kind * kind_stride; }

  int64_t num_blocks, num_places, kind_stride;
  const int32_t *references, *generation, *landed, *landed_generation;
  const uint8_t *is_before, *is_after;
  int32_t* moved;
  uint8_t* is_released;
  int32_t *num_retired, *faults;
};

// Returns the first element for which a condition holds, as `value` names it, or kHole.
template <typename Condition, typename Value>
int32_t FirstFault(int64_t count, const Condition& is_faulty, const Value& value) {
  for (int64_t i = 0; i < count; ++i) {
    if (is_faulty(i)) return value(i);
  }
  return kHole;
}

void ReportFaults(const OwnerReferences& of, const uint8_t* num_landed, const int32_t* regular,
                  const int32_t* transfer_left) {
  const auto place_fault = [&](const auto& is_faulty) {
    return FirstFault(of.num_places, is_faulty, [&](int64_t place) { return of.landed[place]; });
  };
  const auto block_fault = [&](const auto& is_faulty) {
    return FirstFault(of.num_blocks, is_faulty,
                      [](int64_t block) { return static_cast<int32_t>(block); });
  };
  of.faults[0] = place_fault([&](int64_t place) {
    return of.landed[place] != kHole && !IsBlock(of.landed[place], of.num_blocks);
  });
  of.faults[1] = block_fault([&](int64_t block) { return num_landed[block] > 1; });
  of.faults[2] = place_fault([&](int64_t place) {
    const int32_t block = of.landed[place];
    if (!IsBlock(block, of.num_blocks)) return false;
    const int32_t current = of.generation[block];
    return current != of.landed_generation[place] && current != kHole;
  });
  of.faults[3] = block_fault([&](int64_t block) { return transfer_left[block] < 0; });
  of.faults[4] = block_fault([&](int64_t block) {
    return of.is_after[block] != 0 && of.is_before[block] == 0 && num_landed[block] == 0;
  });
  of.faults[5] = block_fault([&](int64_t block) {
    return of.is_before[block] != 0 && of.is_after[block] == 0 && regular[block] == 0;
  });
}

// Ends the transfers of landed blocks; returns whether a place is faulty.
bool Land(const OwnerReferences& of, int32_t* transfer, uint8_t* num_landed) {
  bool is_faulty = false;
  for (int64_t place = 0; place < of.num_places; ++place) {
    const int32_t block = of.landed[place];
    if (!IsBlock(block, of.num_blocks)) {
      is_faulty |= block != kHole;
      continue;
    }
    is_faulty |= num_landed[block] != 0 || of.generation[block] != of.landed_generation[place];
    num_landed[block] = num_landed[block] == 0 ? 1 : 2;
    --transfer[block];
  }
  return is_faulty;
}

void MoveOwner(const ReferenceCall& call, const OwnerReferences& of, uint8_t* num_landed,
               int32_t* num_old, int32_t* num_new) {
  const int64_t num_blocks = of.num_blocks;
  std::fill_n(num_landed, num_blocks, uint8_t{0});
  for (int64_t kind = 0; kind < call.num_kinds; ++kind) {
    if (kind != call.regular) std::copy_n(of.old_of(kind), num_blocks, of.new_of(kind));
  }
  int32_t* transfer = of.new_of(call.transfer);
  int32_t is_faulty = Land(of, transfer, num_landed) ? 1 : 0;
  const int32_t* old_regular = of.old_of(call.regular);
  int32_t* new_regular = of.new_of(call.regular);
  int32_t num_retired = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int32_t before = of.is_before[block], after = of.is_after[block];
    const int32_t gained = after & (before ^ 1), retired = before & (after ^ 1);
    new_regular[block] = old_regular[block] + gained - retired;
    is_faulty |= gained & static_cast<int32_t>(num_landed[block] == 0);
    is_faulty |= retired & static_cast<int32_t>(old_regular[block] == 0);
    is_faulty |= static_cast<int32_t>(transfer[block] < 0);
    num_retired += retired;
  }
  *of.num_retired = num_retired;
  std::fill_n(num_old, num_blocks, 0);
  std::fill_n(num_new, num_blocks, 0);
  for (int64_t kind = 0; kind < call.num_kinds; ++kind) {
    const int32_t *old_counts = of.old_of(kind), *new_counts = of.new_of(kind);
    for (int64_t block = 0; block < num_blocks; ++block) {
      num_old[block] |= old_counts[block];
      num_new[block] |= new_counts[block];
    }
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    of.is_released[block] = num_old[block] != 0 && num_new[block] == 0 ? 1 : 0;
  }
  std::fill_n(of.faults, kNumReferenceChecks, kHole);
  if (is_faulty != 0) ReportFaults(of, num_landed, old_regular, transfer);
}

}  // namespace

void MarkIds(const MarkCall& call, const ParallelFor& parallel_for) {
  const int64_t num_tasks = call.num_batches * call.num_owners;
  const int64_t places_of_owner =
      num_tasks == 0 ? 0 : call.num_batches * call.num_rows * call.num_places / num_tasks;
  ForRows(num_tasks, places_of_owner + call.max_ids / 8, parallel_for,
          [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) {
              MarkOwner(call, task / call.num_owners, task % call.num_owners);
            }
          });
}

void ListFree(const FreeCall& call, const ParallelFor& parallel_for) {
  const RankKernels kernels = SelectRankKernels(ChosenImpl());
  const int64_t num_blocks = call.num_blocks;
  ForRows(call.num_batches * call.num_owners, call.num_kinds * num_blocks, parallel_for,
          [&](int64_t begin, int64_t end) {
            thread_local Scratch scratch;
            scratch.Reset(9 * num_blocks + 4 * kRankSpare, 3);
            auto* is_free = scratch.Take<uint8_t>(num_blocks);
            auto* counts = scratch.Take<int32_t>(num_blocks);
            auto* places = scratch.Take<int32_t>(num_blocks + kRankSpare);
            for (int64_t task = begin; task < end; ++task) {
              const int64_t batch = task / call.num_owners, owner = task % call.num_owners;
              std::fill_n(counts, num_blocks, 0);
              for (int64_t kind = 0; kind < call.num_kinds; ++kind) {
                const int32_t* of_kind =
                    call.references +
                    ((batch * call.num_kinds + kind) * call.num_owners + owner) * num_blocks;
                for (int64_t block = 0; block < num_blocks; ++block)
                  counts[block] |= of_kind[block];
              }
              int32_t num_free = 0;
              for (int64_t block = 0; block < num_blocks; ++block) {
                is_free[block] = counts[block] == 0 ? 1 : 0;
                num_free += counts[block] == 0 ? 1 : 0;
              }
              call.num_free[task] = num_free;
              const int64_t num_listed = std::min<int64_t>(num_free, call.capacity);
              kernels.list_set(is_free, num_blocks, num_listed, places);
              int32_t* out = call.blocks + task * call.capacity;
              std::copy_n(places, num_listed, out);
              std::fill(out + num_listed, out + call.capacity, kHole);
            }
          });
}

void MoveReferences(const ReferenceCall& call, const ParallelFor& parallel_for) {
  ForRows(call.num_batches * call.num_owners, 4 * call.num_blocks + call.num_places, parallel_for,
          [&](int64_t begin, int64_t end) {
            thread_local Scratch scratch;
            scratch.Reset(9 * call.num_blocks, 3);
            auto* num_landed = scratch.Take<uint8_t>(call.num_blocks);
            auto* num_old = scratch.Take<int32_t>(call.num_blocks);
            auto* num_new = scratch.Take<int32_t>(call.num_blocks);
            for (int64_t task = begin; task < end; ++task) {
              const OwnerReferences of(call, task / call.num_owners, task % call.num_owners);
              MoveOwner(call, of, num_landed, num_old, num_new);
            }
          });
}

}  // namespace blockcompact
