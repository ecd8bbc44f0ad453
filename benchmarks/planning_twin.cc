// What a single-threaded C++ program needs for the same answer: the best `wanted` of `num_blocks`
// by (-score, block), without the held ones, ascending. Scores are finite.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace {

constexpr int32_t kHole = -1;

// Order-preserving key: a larger score has a larger key, and both zeros have the same one.
uint32_t Key(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  if (bits == 0x80000000u) bits = 0;
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

// Finds the key of the last wanted block, digit by digit from the top.
uint32_t RadixThreshold(const std::vector<uint32_t>& keys, int64_t wanted) {
  constexpr int kDigits[][2] = {{21, 11}, {10, 11}, {0, 10}};  // shift, width
  uint32_t prefix = 0, mask = 0;
  for (const auto& [shift, width] : kDigits) {
    uint32_t counts[1 << 11] = {};
    const uint32_t low = (1u << width) - 1;
    for (uint32_t key : keys) {
      if ((key & mask) == prefix) ++counts[(key >> shift) & low];
    }
    uint32_t digit = low;
    while (wanted > counts[digit]) wanted -= counts[digit--];
    prefix |= digit << shift;
    mask |= low << shift;
  }
  return prefix;
}

uint32_t NthThreshold(const std::vector<uint32_t>& keys, int64_t wanted) {
  std::vector<uint32_t> copy(keys);
  std::nth_element(copy.begin(), copy.begin() + (wanted - 1), copy.end(), std::greater<>());
  return copy[wanted - 1];
}

template <typename Threshold>
void Plan(const float* scores, const uint8_t* is_held, int64_t num_layers, int64_t num_blocks,
          int64_t wanted, int32_t* blocks, Threshold threshold_of) {
  std::vector<uint32_t> keys(num_blocks);
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const float* row = scores + layer * num_blocks;
    const uint8_t* held = is_held + layer * num_blocks;
    int32_t* out = blocks + layer * wanted;
    for (int64_t block = 0; block < num_blocks; ++block) keys[block] = Key(row[block]);
    const uint32_t threshold = threshold_of(keys, wanted);
    int64_t tied = wanted;
    for (uint32_t key : keys) tied -= key > threshold;
    int64_t place = 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const bool is_tied = keys[block] == threshold && tied > 0;
      tied -= is_tied;
      if ((is_tied || keys[block] > threshold) && !held[block]) {
        out[place++] = static_cast<int32_t>(block);
      }
    }
    std::fill(out + place, out + wanted, kHole);
  }
}

}  // namespace

extern "C" {

void PlanRadix(const float* scores, const uint8_t* is_held, int64_t num_layers, int64_t num_blocks,
               int64_t wanted, int32_t* blocks) {
  Plan(scores, is_held, num_layers, num_blocks, wanted, blocks, RadixThreshold);
}

void PlanNthElement(const float* scores, const uint8_t* is_held, int64_t num_layers,
                    int64_t num_blocks, int64_t wanted, int32_t* blocks) {
  Plan(scores, is_held, num_layers, num_blocks, wanted, blocks, NthThreshold);
}
}
