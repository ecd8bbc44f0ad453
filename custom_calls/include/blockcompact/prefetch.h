// Lines that will be read soon, asked for a few at a time beside work that leaves memory idle.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockcompact {

class PrefetchQueue {
 public:
  void Clear() {
    runs_.clear();
    num_lines_ = 0;
    next_run_ = 0;
    next_ = end_ = 0;
  }

  void Add(const std::byte* bytes, int64_t num_bytes) {
    if (num_bytes <= 0) return;
    const auto address = reinterpret_cast<uintptr_t>(bytes);
    const uintptr_t first = address / kLine * kLine;
    const uintptr_t end = (address + static_cast<uintptr_t>(num_bytes) + kLine - 1) / kLine * kLine;
    runs_.push_back({first, end});
    num_lines_ += static_cast<int64_t>((end - first) / kLine);
  }

  int64_t num_lines() const { return num_lines_; }

  // Asks for the next lines, into the second level: the first holds what is worked on.
  __attribute__((always_inline)) inline void Ask(int64_t num_lines) {
    while (num_lines > 0) {
      if (next_ == end_) {
        if (next_run_ == runs_.size()) return;
        next_ = runs_[next_run_].first;
        end_ = runs_[next_run_++].end;
      }
      uintptr_t line = next_;
      const int64_t count = std::min(num_lines, static_cast<int64_t>((end_ - line) / kLine));
      num_lines -= count;
      next_ += static_cast<uintptr_t>(count) * kLine;
      const uintptr_t stop = next_;
      for (; line != stop; line += kLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
      }
    }
  }

 private:
  static constexpr uintptr_t kLine = 64;

  struct Run {
    uintptr_t first;
    uintptr_t end;
  };

  std::vector<Run> runs_;
  int64_t num_lines_ = 0;
  size_t next_run_ = 0;
  uintptr_t next_ = 0;
  uintptr_t end_ = 0;
};

}  // namespace blockcompact
