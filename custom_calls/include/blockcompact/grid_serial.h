// Runs the bodies of a grid on the host, one thread after the other, as the device would all at
// once. For emulated devices.
#pragma once

#include <cstdint>

namespace blockcompact {

struct SerialGrid {
  template <typename Body>
  int operator()(const Body& body, int64_t num_rows, int64_t num_lanes) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t lane = 0; lane < num_lanes; ++lane) body(row, static_cast<uint32_t>(lane));
    }
    return 0;
  }
};

}  // namespace blockcompact
