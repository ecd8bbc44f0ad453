// As much of the CUDA runtime as the component names, on host memory, at once. With it the device
// checks and the device runtime run without a device: a fault is found before it costs time on one.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDefault = 4 };
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2
};
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaStreamNonBlocking = 1 };
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;
struct cudaDeviceProp {
  char name[256];
};

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
};

struct FakeSpan {
  size_t num_bytes;
  cudaMemoryType type;
};
inline std::map<const char*, FakeSpan> fake_spans;
inline int fake_num_streams = 0;
inline int fake_num_events = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the fake runtime"; }
inline cudaError_t cudaGetDeviceCount(int* num_devices) {
  *num_devices = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "none: host memory");
  return cudaSuccess;
}
inline cudaError_t FakeAllocate(void** data, size_t num_bytes, cudaMemoryType type) {
  *data = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  fake_spans[static_cast<const char*>(*data)] = {num_bytes, type};
  return *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaMalloc(void** data, size_t num_bytes) {
  return FakeAllocate(data, num_bytes, cudaMemoryTypeDevice);
}
inline cudaError_t cudaHostAlloc(void** data, size_t num_bytes, unsigned) {
  return FakeAllocate(data, num_bytes, cudaMemoryTypeHost);
}
inline cudaError_t cudaFree(void* data) {
  fake_spans.erase(static_cast<const char*>(data));
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaHostRegister(void* data, size_t num_bytes, unsigned) {
  fake_spans[static_cast<const char*>(data)] = {num_bytes, cudaMemoryTypeHost};
  return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* data) {
  return fake_spans.erase(static_cast<const char*>(data)) > 0 ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  *attributes = {cudaMemoryTypeUnregistered, 0, nullptr};
  const char* place = static_cast<const char*>(data);
  auto after = fake_spans.upper_bound(place);
  if (after == fake_spans.begin()) return cudaSuccess;
  const auto& [begin, span] = *--after;
  if (place < begin + span.num_bytes) *attributes = {span.type, 0, const_cast<void*>(data)};
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaErrorNoDevice; }  // there is no other
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
  *stream = reinterpret_cast<cudaStream_t>(static_cast<size_t>(++fake_num_streams));
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) {
  ++fake_num_events;
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
  std::memcpy(to, from, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, num_bytes, kind);
}
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t num_bytes, cudaStream_t) {
  std::memset(data, value, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t*) {
  ++fake_num_events;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) {
  --fake_num_events;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
