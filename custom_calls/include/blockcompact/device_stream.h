// Names of devices and their streams.
#pragma once

#include <cstdint>

namespace blockcompact {

inline constexpr int32_t kHostDevice = -1;

// A stream of one device; `handle` null is its default stream.
struct DeviceStream {
  int32_t device = 0;
  void* handle = nullptr;
};

}  // namespace blockcompact
