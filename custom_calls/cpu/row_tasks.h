// Rows of a call cut into tasks that are worth a thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blockcompact/parallel.h"

namespace blockcompact {

// Handing a task to another thread takes about as long as this many elements.
inline constexpr int64_t kTaskElements = 1 << 15;

// Runs rows(begin, end) over [0, num_rows), on one thread where the call is small.
template <typename Rows>
void ForRows(int64_t num_rows, int64_t row_elements, const ParallelFor& parallel_for,
             const Rows& rows) {
  const int64_t rows_of_task =
      std::max<int64_t>(kTaskElements / std::max<int64_t>(row_elements, 1), 1);
  const int64_t num_tasks = (num_rows + rows_of_task - 1) / rows_of_task;
  if (num_tasks <= 1) return rows(int64_t{0}, num_rows);
  parallel_for(num_tasks, [&](int64_t task) {
    rows(task * rows_of_task, std::min((task + 1) * rows_of_task, num_rows));
  });
}

}  // namespace blockcompact
