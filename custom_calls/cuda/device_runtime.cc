#include "device_runtime.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "launch.h"

namespace blockcompact::cuda {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // what is reported here is not found again by the next call
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a device the thread's current one for a while.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) {
    Check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) Check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

cudaStream_t Of(const DeviceStream& stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t Of(DeviceRuntime::Event event) { return static_cast<cudaEvent_t>(event); }

class CudaRuntime : public DeviceRuntime {
 public:
  MemoryPlace PlaceOf(const void* address) override {
    cudaPointerAttributes attributes{};
    Check(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
    const bool is_device = attributes.type == cudaMemoryTypeDevice;
    return {is_device ? attributes.device : kHostDevice,
            static_cast<std::byte*>(attributes.devicePointer)};
  }

  // It neither waits for the default stream nor makes it wait.
  DeviceStream MakeStream(int32_t device) override {
    const OnDevice on_device(device);
    cudaStream_t stream = nullptr;
    Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return {device, stream};
  }
  Event MakeEvent(int32_t device) override {
    const OnDevice on_device(device);
    cudaEvent_t event = nullptr;
    // Whoever waits for it sleeps: the processors are needed for the draft.
    Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
          "cudaEventCreate");
    return event;
  }
  void DestroyEvent(Event event) noexcept override { cudaEventDestroy(Of(event)); }
  void Record(Event event, const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    Check(cudaEventRecord(Of(event), Of(stream)), "cudaEventRecord");
  }
  void WaitInStream(const DeviceStream& stream, Event event) override {
    const OnDevice on_device(stream.device);
    Check(cudaStreamWaitEvent(Of(stream), Of(event), 0), "cudaStreamWaitEvent");
  }
  bool IsDone(Event event) override {
    const cudaError_t error = cudaEventQuery(Of(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    Check(error, "cudaEventQuery");
    return true;
  }
  void Synchronize(Event event) override {
    Check(cudaEventSynchronize(Of(event)), "the device's work");
  }

  std::byte* Allocate(int32_t device, int64_t num_bytes) override {
    const OnDevice on_device(device);
    void* memory = nullptr;
    Check(cudaMalloc(&memory, static_cast<size_t>(num_bytes)), "cudaMalloc");
    return static_cast<std::byte*>(memory);
  }
  void Free(int32_t, std::byte* memory) noexcept override { cudaFree(memory); }
  std::byte* AllocatePinned(int64_t num_bytes) override {
    void* memory = nullptr;
    const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
    Check(cudaHostAlloc(&memory, static_cast<size_t>(num_bytes), flags), "cudaHostAlloc");
    return static_cast<std::byte*>(memory);
  }
  void FreePinned(std::byte* memory) noexcept override { cudaFreeHost(memory); }
  void Pin(const std::byte* memory, int64_t num_bytes) override {
    const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable;
    Check(cudaHostRegister(const_cast<std::byte*>(memory), static_cast<size_t>(num_bytes), flags),
          "cudaHostRegister");
  }
  void Unpin(const std::byte* memory) noexcept override {
    cudaHostUnregister(const_cast<std::byte*>(memory));
  }

  void Copy(std::byte* to, const std::byte* from, int64_t num_bytes,
            const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    if (num_bytes <= 0) return;
    Check(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, Of(stream)),
          "cudaMemcpyAsync");
  }
  void Unpack(PackedLayout layout, const GridPacked& from, const GridPlain& to,
              const BlockShape& shape, const GridRows& rows, const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    Check(UnpackRows(layout, from, to, shape, rows, Of(stream)), "upload");
  }
  void Pack(PackedLayout layout, const GridPlain& from, const GridPacked& to,
            const BlockShape& shape, const GridRows& rows, const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    Check(PackRows(layout, from, to, shape, rows, Of(stream)), "pack");
  }
  void CopyBlocks(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                  const GridRows& rows, const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    Check(GatherRows(from, to, shape, rows, Of(stream)), "copy of blocks");
  }
  void Score(GridOrder order, const GridKeys& keys, const GridQueries& queries,
             const GridScores& to, const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    Check(ScoreBlocks(order, keys, queries, to, Of(stream)), "scores");
  }
  void Attend(GridOrder order, const GridAttend& call, const DeviceStream& stream) override {
    const OnDevice on_device(stream.device);
    Check(AttendBlocks(order, call, Of(stream)), "attention");
  }
};

}  // namespace

DeviceRuntime* Runtime() {
  static auto* runtime = new CudaRuntime;
  return runtime;
}

}  // namespace blockcompact::cuda
