// As much of the CUDA runtime as device_check.cc and launch.cu name, on host memory. With it the
// device checks run without a device: a wrong check is found before it costs time on one.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDefault = 4 };
enum { cudaHostAllocMapped = 2 };

using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;
struct cudaDeviceProp {
  char name[256];
};

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the fake runtime"; }
inline cudaError_t cudaGetDeviceCount(int* num_devices) {
  *num_devices = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "none: host memory");
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** data, size_t num_bytes) {
  *data = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  return *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaHostAlloc(void** data, size_t num_bytes, unsigned) {
  return cudaMalloc(data, num_bytes);
}
inline cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
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
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
