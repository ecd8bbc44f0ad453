#include "device_check.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>

#include "blockcompact/block_move.h"
#include "blockcompact/rows.h"
#include "launch.h"

namespace blockcompact::cuda {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

enum class Place { kDevice, kPinned };

// Memory that the device reads and writes.
class Memory {
 public:
  Memory(Place place, int64_t num_bytes)
      : place_(place), num_bytes_(static_cast<size_t>(std::max<int64_t>(num_bytes, 1))) {
    if (place == Place::kPinned) {
      Check(cudaHostAlloc(&data_, num_bytes_, cudaHostAllocMapped), "cudaHostAlloc");
    } else {
      Check(cudaMalloc(&data_, num_bytes_), "cudaMalloc");
    }
  }
  Memory(Place place, const std::vector<uint8_t>& bytes)
      : Memory(place, static_cast<int64_t>(bytes.size())) {
    Check(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyDefault), "cudaMemcpy");
  }
  ~Memory() { place_ == Place::kPinned ? cudaFreeHost(data_) : cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <typename T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> bytes(num_bytes_);
    Check(cudaMemcpy(bytes.data(), data_, num_bytes_, cudaMemcpyDefault), "cudaMemcpy");
    return bytes;
  }

 private:
  Place place_;
  size_t num_bytes_;
  void* data_ = nullptr;
};

std::vector<uint8_t> RandomBytes(int64_t num_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>((num_bytes + 7) / 8 * 8));
  for (size_t i = 0; i < bytes.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, 8);
  }
  bytes.resize(static_cast<size_t>(num_bytes));
  return bytes;
}

// Distinct destinations in all layers, random sources; on the host and on the device.
struct CheckRowsData {
  std::vector<int32_t> layer, from, to, valid;
  Memory columns;
  Memory fault{Place::kDevice, sizeof(GridFault)};
  Memory owner;
  Memory status{Place::kDevice, 8};
  RowLimits limits;

  explicit CheckRowsData(const DeviceCheck& check, bool has_duplicate = false)
      : columns(Place::kDevice, 16 * check.num_rows),
        owner(Place::kDevice, 4 * check.num_layers * check.num_blocks),
        limits{check.num_layers, check.num_blocks, check.num_blocks, check.shape.block_tokens} {
    std::mt19937 random(3);
    std::vector<int32_t> cells(static_cast<size_t>(check.num_layers * check.num_blocks));
    std::iota(cells.begin(), cells.end(), 0);
    std::shuffle(cells.begin(), cells.end(), random);
    cells.resize(static_cast<size_t>(check.num_rows));
    if (has_duplicate) cells.back() = cells.front();
    for (int32_t cell : cells) {
      layer.push_back(cell / static_cast<int32_t>(check.num_blocks));
      to.push_back(cell % static_cast<int32_t>(check.num_blocks));
      from.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(check.num_blocks)));
      const auto tokens = static_cast<uint64_t>(check.shape.block_tokens);
      valid.push_back(
          static_cast<int32_t>(check.has_partial_rows ? random() % (tokens + 1) : tokens));
    }
    int column_number = 0;
    for (const auto* column : {&layer, &from, &to, &valid}) {
      Check(cudaMemcpy(Column(column_number++), column->data(), 4 * column->size(),
                       cudaMemcpyHostToDevice),
            "cudaMemcpy");
    }
  }

  int32_t* Column(int number) const { return columns.as<int32_t>() + number * num_rows(); }
  int64_t num_rows() const { return static_cast<int64_t>(layer.size()); }
  Rows host(bool has_to = true) const {
    return {num_rows(), layer.data(), from.data(), has_to ? to.data() : nullptr, valid.data()};
  }
  GridRows device(bool has_to = true) const {
    return {{num_rows(), Column(0), Column(1), has_to ? Column(2) : nullptr, Column(3)},
            limits,
            fault.as<GridFault>(),
            has_to ? owner.as<int32_t>() : nullptr};
  }
};

GridPlain PoolGrid(const DeviceCheck& check, std::byte* base) {
  const int64_t region = check.shape.region_bytes();
  const int64_t block = check.shape.packed_row_bytes();
  return {base,
          check.num_blocks * block,
          {check.shape.num_heads * region, block, region, check.shape.token_bytes()}};
}

std::vector<std::byte*> Layers(const DeviceCheck& check, std::vector<uint8_t>& bytes) {
  std::vector<std::byte*> bases;
  for (int64_t layer = 0; layer < check.num_layers; ++layer) {
    bases.push_back(reinterpret_cast<std::byte*>(bytes.data()) +
                    layer * check.num_blocks * check.shape.packed_row_bytes());
  }
  return bases;
}

PlainView PoolView(const DeviceCheck& check, std::vector<uint8_t>& bytes) {
  return {Layers(check, bytes), check.num_blocks, check.shape, PoolGrid(check, nullptr).strides};
}

int64_t StoreBytes(const DeviceCheck& check) {
  return check.num_layers * check.num_blocks * check.shape.packed_row_bytes();
}

class Timer {
 public:
  Timer() {
    Check(cudaEventCreate(&begin_), "cudaEventCreate");
    Check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  template <typename Function>
  double Microseconds(const Function& function) {
    Check(cudaEventRecord(begin_), "cudaEventRecord");
    Check(function(), "launch");
    Check(cudaEventRecord(end_), "cudaEventRecord");
    Check(cudaEventSynchronize(end_), "run");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds * 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// The first run of each counts for correctness alone; then they take turns.
template <typename Kernel>
void Measure(const DeviceCheck& check, const Memory& source, const Kernel& kernel,
             DeviceCheckResult* result) {
  result->num_bytes = check.num_rows * check.shape.packed_row_bytes();
  const Memory target(Place::kDevice, result->num_bytes);
  const auto copy = [&] {
    return cudaMemcpyAsync(target.as(), source.as(), static_cast<size_t>(result->num_bytes),
                           cudaMemcpyDefault, nullptr);
  };
  Timer timer;
  timer.Microseconds(copy);
  for (int64_t run = 0; run < check.num_runs; ++run) {
    result->kernel_us.push_back(timer.Microseconds(kernel));
    result->copy_us.push_back(timer.Microseconds(copy));
  }
}

}  // namespace

int NumDevices() {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) return 0;
  Check(error, "cudaGetDeviceCount");
  return num_devices;
}

std::string DeviceName() {
  cudaDeviceProp properties{};
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties.name;
}

DeviceCheckResult CheckReload(const DeviceCheck& check) {
  const CheckRowsData rows(check);
  std::vector<uint8_t> store = RandomBytes(StoreBytes(check), 1);
  std::vector<uint8_t> pool = RandomBytes(StoreBytes(check), 2);
  const Memory source(check.is_source_pinned ? Place::kPinned : Place::kDevice, store);
  const Memory target(Place::kDevice, pool);
  const int64_t row_bytes = check.shape.packed_row_bytes();
  const GridPacked from{source.as(), check.num_blocks * row_bytes, row_bytes};
  const auto reload = [&] {
    const cudaError_t error = CheckRows(rows.device(), rows.status.as<int32_t>(), nullptr);
    if (error != cudaSuccess) return error;
    return UnpackRows(check.layout, from, PoolGrid(check, target.as()), check.shape, rows.device(),
                      nullptr);
  };
  Check(reload(), "reload");
  blockcompact::UnpackRows(
      {Layers(check, store), check.num_blocks, check.shape, check.layout, row_bytes},
      PoolView(check, pool), rows.host(), SerialFor);
  DeviceCheckResult result;
  result.is_equal = target.Read() == pool;
  Measure(check, source, reload, &result);
  return result;
}

DeviceCheckResult CheckGather(const DeviceCheck& check) {
  const CheckRowsData rows(check);
  std::vector<uint8_t> pool = RandomBytes(StoreBytes(check), 4);
  const Memory source(Place::kDevice, pool);
  DeviceCheck out_check = check;
  out_check.num_layers = 1;
  out_check.num_blocks = check.num_rows;
  std::vector<uint8_t> expected(static_cast<size_t>(StoreBytes(out_check)));
  const Memory out(Place::kDevice, StoreBytes(out_check));
  const auto gather = [&] {
    const cudaError_t error = CheckRows(rows.device(false), rows.status.as<int32_t>(), nullptr);
    if (error != cudaSuccess) return error;
    return GatherRows(PoolGrid(check, source.as()), PoolGrid(out_check, out.as()), check.shape,
                      rows.device(false), nullptr);
  };
  Check(gather(), "gather");
  blockcompact::GatherRows(PoolView(check, pool), PoolView(out_check, expected), rows.host(false),
                           SerialFor);
  DeviceCheckResult result;
  result.is_equal = out.Read() == expected;
  Measure(check, source, gather, &result);
  return result;
}

DeviceCheckResult CheckMove(const DeviceCheck& check) {
  const CheckRowsData rows(check);
  std::vector<uint8_t> pool = RandomBytes(StoreBytes(check), 5);
  const Memory target(Place::kDevice, pool);
  const int64_t block_bytes = check.shape.packed_row_bytes();
  const Memory saved(Place::kDevice, check.num_rows * block_bytes);
  const auto move = [&] {
    const cudaError_t error = CheckRows(rows.device(), rows.status.as<int32_t>(), nullptr);
    if (error != cudaSuccess) return error;
    return MoveBlocks({target.as(), saved.as(), block_bytes, rows.device()}, nullptr);
  };
  Check(move(), "block_move");
  blockcompact::MoveBlocks(DenseBlockSpace(Layers(check, pool), block_bytes), rows.host(),
                           SerialFor);
  DeviceCheckResult result;
  result.is_equal = target.Read() == pool;
  Measure(check, target, move, &result);
  return result;
}

bool CheckRefusal(const DeviceCheck& check) {
  const CheckRowsData rows(check, /*has_duplicate=*/true);
  std::vector<uint8_t> pool = RandomBytes(StoreBytes(check), 6);
  const Memory source(Place::kDevice, RandomBytes(StoreBytes(check), 7));
  const Memory target(Place::kDevice, pool);
  const int64_t row_bytes = check.shape.packed_row_bytes();
  Check(CheckRows(rows.device(), rows.status.as<int32_t>(), nullptr), "row checks");
  Check(UnpackRows(check.layout, {source.as(), check.num_blocks * row_bytes, row_bytes},
                   PoolGrid(check, target.as()), check.shape, rows.device(), nullptr),
        "reload");
  int32_t status[2] = {0, 0};
  std::memcpy(status, rows.status.Read().data(), sizeof(status));
  const Status expected = blockcompact::CheckRows(rows.host(), rows.limits);
  return !expected.ok() && status[0] == static_cast<int32_t>(expected.code) &&
         status[1] == expected.row && target.Read() == pool;
}

}  // namespace blockcompact::cuda
