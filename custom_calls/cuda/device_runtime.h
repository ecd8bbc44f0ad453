// The CUDA runtime as calls on pools of a device take it.
#pragma once

#include "blockcompact/device.h"

namespace blockcompact::cuda {

// Lives as long as the process. Starts no driver until a call asks for a device.
DeviceRuntime* Runtime();

}  // namespace blockcompact::cuda
