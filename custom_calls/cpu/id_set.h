// A set of the IDs of one row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "scratch.h"

namespace blockcompact {

// The IDs are those below max_ids. Bits lie in words that the caller provides.
class IdSet {
 public:
  static constexpr int64_t kWordBits = 64;

  IdSet(uint64_t* words, int64_t max_ids) : words_(words), max_ids_(max_ids) { Clear(); }

  static int64_t NumWords(int64_t max_ids) { return (max_ids + kWordBits - 1) / kWordBits; }

  void Clear() { std::fill_n(words_, NumWords(max_ids_), uint64_t{0}); }
  bool IsId(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint64_t>(max_ids_);
  }
  bool Has(int32_t id) const {
    const auto place = static_cast<uint32_t>(id);
    return (words_[place / kWordBits] >> (place % kWordBits) & 1) != 0;
  }

  // Returns whether the ID was new.
  bool Add(int32_t id) {
    const auto place = static_cast<uint32_t>(id);
    uint64_t& word = words_[place / kWordBits];
    const uint64_t bit = uint64_t{1} << (place % kWordBits);
    const bool is_new = (word & bit) == 0;
    word |= bit;
    return is_new;
  }

  // Adds the ID where the condition holds and it is one, without a branch.
  void AddIf(bool condition, int32_t id) {
    const bool is_added = condition & IsId(id);
    const uint32_t place = is_added ? static_cast<uint32_t>(id) : 0;
    words_[place / kWordBits] |= static_cast<uint64_t>(is_added) << (place % kWordBits);
  }

  uint64_t word(int64_t place) const { return words_[place]; }
  const uint64_t* words() const { return words_; }

 private:
  uint64_t* words_;
  int64_t max_ids_;
};

// Words for one set, kept by the thread.
inline uint64_t* TakeWords(int64_t max_ids) {
  thread_local Scratch scratch;
  const int64_t num_words = IdSet::NumWords(max_ids);
  scratch.Reset(8 * num_words, 1);
  return scratch.Take<uint64_t>(num_words);
}

}  // namespace blockcompact
