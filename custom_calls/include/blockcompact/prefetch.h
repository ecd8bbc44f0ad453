// Lines that will be read soon, asked for a few at a time beside work that leaves memory idle.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockcompact {

// Bytes are asked for in the order they were added, but pages of them in turns: memory serves
// several streams better than one.
class PrefetchQueue {
 public:
  void Clear() {
    runs_.clear();
    num_lines_ = 0;
    next_run_ = 0;
    num_streams_ = turn_ = 0;
  }

  void Add(const std::byte* bytes, int64_t num_bytes) {
    if (num_bytes <= 0) return;
    const auto address = reinterpret_cast<uintptr_t>(bytes);
    const uintptr_t next = address / kLine * kLine;
    const uintptr_t end = (address + static_cast<uintptr_t>(num_bytes) + kLine - 1) / kLine * kLine;
    num_lines_ += static_cast<int64_t>((end - next) / kLine);
    if (next_run_ < runs_.size() && runs_.back().end == next) {
      runs_.back().end = end;
    } else {
      runs_.push_back({next, end});
    }
  }

  int64_t num_lines() const { return num_lines_; }

  // Asks for the next lines, into the second level: the first holds what is worked on.
  __attribute__((always_inline)) inline void Ask(int64_t num_lines) {
    while (num_lines > 0) {
      if (turn_ >= num_streams_) {
        turn_ = 0;
        while (num_streams_ < kStreams && Take(&streams_[num_streams_])) ++num_streams_;
        if (num_streams_ == 0) return;
      }
      Run& stream = streams_[turn_];
      const auto num_left = static_cast<int64_t>((stream.end - stream.next) / kLine);
      const int64_t count = std::min(std::min(num_lines, kTurnLines), num_left);
      uintptr_t line = stream.next;
      const uintptr_t stop = line + static_cast<uintptr_t>(count) * kLine;
      for (; line != stop; line += kLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
      }
      num_lines -= count;
      stream.next = stop;
      if (stop == stream.end) {
        stream = streams_[--num_streams_];
      } else {
        ++turn_;
      }
    }
  }

 private:
  static constexpr uintptr_t kLine = 64;
  static constexpr uintptr_t kPage = 4096;
  static constexpr int kStreams = 4;
  static constexpr int64_t kTurnLines = 16;

  struct Run {
    uintptr_t next;
    uintptr_t end;
  };

  // The rest of the next page; false where nothing is left.
  bool Take(Run* stream) {
    if (next_run_ == runs_.size()) return false;
    Run& run = runs_[next_run_];
    *stream = {run.next, std::min(run.end, (run.next / kPage + 1) * kPage)};
    run.next = stream->end;
    if (run.next == run.end) ++next_run_;
    return true;
  }

  std::vector<Run> runs_;
  int64_t num_lines_ = 0;
  size_t next_run_ = 0;
  Run streams_[kStreams];
  int num_streams_ = 0;
  int turn_ = 0;
};

}  // namespace blockcompact
