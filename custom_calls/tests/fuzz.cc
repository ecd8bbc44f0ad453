// Random plans, valid and invalid, through every call that moves bytes: after each one all memory
// is compared with a model, refused calls included. Every round has its own seed, so a failure
// replays:
//   fuzz [--seconds N] [--seed S] [--rounds R]
#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "blockcompact/head_kernels.h"
#include "blockcompact/pool.h"
#include "blockcompact/pool_calls.h"
#include "blockcompact/streaming.h"
#include "check.h"
#include "fuzz_world.h"

using namespace blockcompact;  // NOLINT: a test program

extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

uint32_t round_seed = 0;
bool is_done = false;

void PrintReplay() {
  if (!is_done) std::fprintf(stderr, "replay with: fuzz --seed %u --rounds 1\n", round_seed);
}

enum class Job { kPack, kUpload, kMovePlain, kMovePacked, kGather };

struct Plan {
  std::vector<int32_t> layer, from, to, valid;
  Status expected;  // of the rows alone
};

struct Limits {
  int64_t layers, from_blocks, to_blocks, tokens;  // tokens < 0: valid is not looked at
};

Plan RandomPlan(Random& random, const Limits& limits, bool has_to) {
  Plan plan;
  std::vector<std::pair<int32_t, int32_t>> cells;
  for (int32_t l = 0; l < limits.layers; ++l) {
    for (int32_t b = 0; b < limits.to_blocks; ++b) cells.emplace_back(l, b);
  }
  std::shuffle(cells.begin(), cells.end(), random.engine());
  cells.resize(static_cast<size_t>(random.Below(static_cast<int64_t>(cells.size()) + 1)));
  for (const auto& [l, b] : cells) {
    const bool is_hole = random.OneIn(8);
    plan.layer.push_back(is_hole ? 99 : l);
    plan.from.push_back(is_hole ? -1 : static_cast<int32_t>(random.Below(limits.from_blocks)));
    plan.to.push_back(is_hole ? -1 : b);
    plan.valid.push_back(static_cast<int32_t>(
        random.OneIn(2) ? std::max<int64_t>(limits.tokens, 0)
                        : random.Below(std::max<int64_t>(limits.tokens, 0) + 1)));
  }
  if (!random.OneIn(3) || cells.empty()) return plan;
  const auto row = static_cast<size_t>(random.Below(static_cast<int64_t>(cells.size())));
  const auto wild = [&] { return random.Of<int32_t>({-2, INT32_MIN, INT32_MAX, 1 << 20}); };
  switch (random.Below(6)) {
    case 0:
      plan.layer[row] = wild();
      break;
    case 1:
      plan.from[row] = random.OneIn(2) ? wild() : static_cast<int32_t>(limits.from_blocks);
      break;
    case 2:
      if (has_to) plan.to[row] = random.OneIn(2) ? wild() : static_cast<int32_t>(limits.to_blocks);
      break;
    case 3:
      plan.valid[row] = random.OneIn(2) ? wild() : static_cast<int32_t>(limits.tokens + 1);
      break;
    case 4:
      (random.OneIn(2) ? plan.from[row] : plan.to[row]) = -1;
      break;
    default: {
      const auto other = static_cast<size_t>(random.Below(static_cast<int64_t>(cells.size())));
      plan.layer[row] = plan.layer[other];
      plan.to[row] = plan.to[other];
    }
  }
  return plan;
}

// The first fault by the documented order: each row in turn, then destinations named twice.
Status ExpectedOf(const Plan& plan, const Limits& limits, bool has_to) {
  const auto is_in = [](int64_t value, int64_t limit) { return 0 <= value && value < limit; };
  for (size_t i = 0; i < plan.from.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    if (has_to && (plan.from[i] == -1) != (plan.to[i] == -1))
      return {StatusCode::kPartialHole, row};
    if (plan.from[i] == -1) continue;
    if (!is_in(plan.layer[i], limits.layers)) return {StatusCode::kLayerOutOfRange, row};
    if (!is_in(plan.from[i], limits.from_blocks)) return {StatusCode::kFromBlockOutOfRange, row};
    if (has_to && !is_in(plan.to[i], limits.to_blocks)) {
      return {StatusCode::kToBlockOutOfRange, row};
    }
    if (limits.tokens >= 0 && !is_in(plan.valid[i], limits.tokens + 1)) {
      return {StatusCode::kValidTokensOutOfRange, row};
    }
  }
  std::map<std::pair<int32_t, int32_t>, bool> is_taken;
  for (size_t i = 0; has_to && i < plan.from.size(); ++i) {
    if (plan.from[i] == -1) continue;
    if (std::exchange(is_taken[{plan.layer[i], plan.to[i]}], true)) {
      return {StatusCode::kDuplicateDestination, static_cast<int64_t>(i)};
    }
  }
  return {};
}

class Round {
 public:
  explicit Round(uint32_t seed)
      : random_(seed),
        world_(RandomWorld(random_)),
        plain_(world_.PlainSize() * world_.bytes, random_),
        packed_(world_.PackedSize() * world_.bytes, random_) {
    const World& w = world_;
    const int64_t e = w.bytes;
    const BlockShape shape{w.heads, w.tokens, w.dims, e};
    const PoolMemory plain_memory{{reinterpret_cast<std::byte*>(plain_.data())},
                                  plain_.size_bytes(),
                                  w.layers,
                                  w.layer_stride * e,
                                  true,
                                  nullptr};
    const PoolMemory packed_memory{{reinterpret_cast<std::byte*>(packed_.data())},
                                   packed_.size_bytes(),
                                   w.layers,
                                   w.packed_layer_stride * e,
                                   true,
                                   nullptr};
    plain_ref_.pool_id =
        AddPlainPool(plain_memory, w.plain_blocks, shape,
                     {w.kv_stride * e, w.block_stride * e, w.head_stride * e, w.token_stride * e});
    packed_ref_.pool_id = AddPackedPool(packed_memory, w.packed_blocks, shape,
                                        w.is_amx ? PackedLayout::kAmx : PackedLayout::kVec,
                                        w.packed_block_stride * e);
    const std::vector<Impl> impls = AvailableImpls();
    ForceImpl(
        ImplName(impls[static_cast<size_t>(random_.Below(static_cast<int64_t>(impls.size())))]));
    ForceStreamingFrom(random_.OneIn(2) ? 0 : -1);
  }
  ~Round() {
    RemovePool(plain_ref_.pool_id);
    RemovePool(packed_ref_.pool_id);
    ForceImpl("");
    ForceStreamingFrom(-1);
  }

  void Run() {
    for (int step = 0; step < 6; ++step) {
      RunJob(
          random_.Of({Job::kPack, Job::kUpload, Job::kMovePlain, Job::kMovePacked, Job::kGather}));
    }
  }

 private:
  Limits LimitsOf(Job job) const {
    const World& w = world_;
    switch (job) {
      case Job::kPack:
        return {w.layers, w.plain_blocks, w.packed_blocks, -1};
      case Job::kUpload:
        return {w.layers, w.packed_blocks, w.plain_blocks, w.tokens};
      case Job::kMovePacked:
        return {w.layers, w.packed_blocks, w.packed_blocks, -1};
      default:
        return {w.layers, w.plain_blocks, w.plain_blocks, -1};
    }
  }

  void RunJob(Job job) {
    const bool has_to = job != Job::kGather;
    const Limits limits = LimitsOf(job);
    Plan plan = RandomPlan(random_, limits, has_to);
    plan.expected = ExpectedOf(plan, limits, has_to);
    const auto num_rows = static_cast<int64_t>(plan.from.size());
    const Rows rows{num_rows, plan.layer.data(), plan.from.data(),
                    has_to ? plan.to.data() : nullptr,
                    job == Job::kUpload ? plan.valid.data() : nullptr};
    std::vector<uint8_t> plain = plain_.values(), packed = packed_.values();
    Memory gathered(
        std::max<int64_t>(1, num_rows * 2 * world_.heads * world_.region() * world_.bytes),
        random_);
    std::vector<uint8_t> out = gathered.values();
    const bool is_stale = random_.OneIn(10);
    PoolRef plain_ref = plain_ref_, packed_ref = packed_ref_;
    if (is_stale) {
      ++plain_ref.ord;
      ++packed_ref.ord;
      plan.expected = {StatusCode::kStaleOrd, -1};
    }
    const Status status = Call(job, rows, &plain_ref, &packed_ref, gathered);
    const int number = static_cast<int>(job);
    CHECK(status.code == plan.expected.code && status.row == plan.expected.row,
          "job %d: code %d row %ld, expected %d row %ld", number, static_cast<int>(status.code),
          status.row, static_cast<int>(plan.expected.code), plan.expected.row);
    if (status.ok()) Model(job, plan, &plain, &packed, &out);
    CHECK(plain_.values() == plain, "job %d: plain memory", number);
    CHECK(packed_.values() == packed, "job %d: packed memory", number);
    CHECK(gathered.values() == out, "job %d: gathered memory", number);
    if (is_stale) return;
    const bool writes_plain = job == Job::kUpload || job == Job::kMovePlain;
    const bool writes_packed = job == Job::kPack || job == Job::kMovePacked;
    CHECK(plain_ref.ord == plain_ref_.ord + (status.ok() && writes_plain ? 1 : 0), "plain ord");
    CHECK(packed_ref.ord == packed_ref_.ord + (status.ok() && writes_packed ? 1 : 0), "packed ord");
    plain_ref_ = plain_ref;
    packed_ref_ = packed_ref;
  }

  Status Call(Job job, const Rows& rows, PoolRef* plain, PoolRef* packed, Memory& gathered) {
    const World& w = world_;
    const int64_t region_bytes = w.region() * w.bytes;
    switch (job) {
      case Job::kPack:
        return PoolPack(*plain, packed, rows, SerialFor);
      case Job::kUpload:
        return PoolUpload(*packed, plain, rows, SerialFor);
      case Job::kMovePlain:
        return PoolBlockMove(plain, rows, SerialFor);
      case Job::kMovePacked:
        return PoolBlockMove(packed, rows, SerialFor);
      default:
        return PoolGather(
            *plain,
            {{reinterpret_cast<std::byte*>(gathered.data())},
             rows.num_rows,
             {w.heads, w.tokens, w.dims, w.bytes},
             {w.heads * region_bytes, 2 * w.heads * region_bytes, region_bytes, w.dims * w.bytes}},
            rows, SerialFor);
    }
  }

  void Model(Job job, const Plan& plan, std::vector<uint8_t>* plain, std::vector<uint8_t>* packed,
             std::vector<uint8_t>* out) const {
    const World& w = world_;
    const std::vector<uint8_t> old_plain = *plain, old_packed = *packed;
    const auto copy = [&](std::vector<uint8_t>* to, int64_t place, const std::vector<uint8_t>& from,
                          int64_t from_place) {
      std::copy_n(from.begin() + from_place * w.bytes, w.bytes, to->begin() + place * w.bytes);
    };
    for (size_t i = 0; i < plan.from.size(); ++i) {
      const int64_t l = plan.layer[i], from = plan.from[i], to = plan.to[i];
      const int64_t first = static_cast<int64_t>(i) * 2 * w.heads * w.region();
      if (job == Job::kGather && from == -1) {
        std::fill_n(out->begin() + first * w.bytes, 2 * w.heads * w.region() * w.bytes, uint8_t{0});
      }
      if (from == -1) continue;
      const int64_t num_tokens = job == Job::kUpload ? plan.valid[i] : w.tokens;
      w.ForElements(num_tokens, [&](int64_t kv, int64_t h, int64_t t, int64_t d) {
        switch (job) {
          case Job::kPack:
            return copy(packed, w.Packed(l, to, kv, h, t, d), old_plain,
                        w.Plain(l, from, kv, h, t, d));
          case Job::kUpload:
            return copy(plain, w.Plain(l, to, kv, h, t, d), old_packed,
                        w.Packed(l, from, kv, h, t, d));
          case Job::kMovePlain:
            return copy(plain, w.Plain(l, to, kv, h, t, d), old_plain,
                        w.Plain(l, from, kv, h, t, d));
          case Job::kMovePacked:
            return copy(packed, w.Packed(l, to, kv, h, t, d), old_packed,
                        w.Packed(l, from, kv, h, t, d));
          default:
            return copy(out, first + ((kv * w.heads + h) * w.tokens + t) * w.dims + d, old_plain,
                        w.Plain(l, from, kv, h, t, d));
        }
      });
    }
  }

  Random random_;
  World world_;
  Memory plain_, packed_;
  PoolRef plain_ref_, packed_ref_;
};

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, int64_t> options = {{"--seconds", 3}, {"--seed", 1}, {"--rounds", 0}};
  for (int i = 1; i + 1 < argc; i += 2) {
    CHECK(options.count(argv[i]) == 1, "unknown option %s", argv[i]);
    options[argv[i]] = std::atoll(argv[i + 1]);
  }
  CHECK(argc % 2 == 1, "every option needs a value");
  std::atexit(PrintReplay);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(PrintReplay);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options["--seconds"]);
  const int64_t num_rounds = options["--rounds"];
  int64_t round = 0;
  const auto is_last = [&] {
    return num_rounds > 0 ? round >= num_rounds : std::chrono::steady_clock::now() >= end;
  };
  for (; round == 0 || !is_last(); ++round) {
    round_seed = static_cast<uint32_t>(options["--seed"] + round);
    Round(round_seed).Run();
  }
  is_done = true;
  std::printf("%ld rounds: ok\n", static_cast<long>(round));
  return 0;
}
