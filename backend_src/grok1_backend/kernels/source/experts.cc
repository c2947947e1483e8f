#include "experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace grok1 {
namespace {

std::atomic<int64_t> expert_rows{0};
std::atomic<int64_t> weight_bytes{0};

// Rows that use one expert.
struct Group {
  int64_t expert;
  int64_t first;  // pair
  int64_t rows;
};

// The (row, expert) pairs in order of expert, then row.
struct Pairs {
  std::vector<int64_t> row;
  std::vector<float> gate;
  std::vector<Group> groups;

  explicit Pairs(const ExpertStep& step) {
    for (int64_t expert = 0; expert < step.num_experts; ++expert) {
      const int64_t first = static_cast<int64_t>(row.size());
      for (int64_t i = 0; i < step.rows * step.selected; ++i) {
        if (step.experts[i] == expert && step.valid[i / step.selected]) {
          row.push_back(i / step.selected);
          gate.push_back(step.gates[i]);
        }
      }
      const int64_t count = static_cast<int64_t>(row.size()) - first;
      for (int64_t part = 0; part < NumParts(count); ++part) {
        const int64_t start = PartStart(count, part);
        groups.push_back({expert, first + start, PartStart(count, part + 1) - start});
      }
    }
  }
};

int64_t Strips(int64_t columns, int64_t strip) { return (columns + strip - 1) / strip; }

}  // namespace

int64_t StripOf(int64_t columns, int64_t others, int64_t threads) {
  int64_t strip = kMaxStrip;
  while (strip > 64 && Strips(columns, strip) * others < 4 * threads) strip /= 2;
  return strip;
}

Counters ReadCounters() { return {expert_rows.load(), weight_bytes.load()}; }

void ComputeExperts(const ExpertStep& step, Parallel& parallel) {
  const Compute& compute = BestCompute();
  const Pairs pairs(step);
  const int64_t num_groups = static_cast<int64_t>(pairs.groups.size());
  const int64_t width = step.linear.first.depth;
  const int64_t ffn = step.linear.first.columns;
  float* const packed_x = step.scratch;
  float* const packed_gated = packed_x + static_cast<int64_t>(pairs.row.size()) * width;
  memset(step.out, 0, sizeof(float) * step.rows * width);

  const auto pack = [&](int64_t i) {
    const Group& group = pairs.groups[i];
    const float* rows_of[kMaxGroup];
    for (int64_t r = 0; r < group.rows; ++r) {
      rows_of[r] = step.x + pairs.row[group.first + r] * width;
    }
    compute.pack(rows_of, group.rows, width, packed_x + group.first * width);
  };

  const int64_t strip = StripOf(ffn, num_groups, parallel.threads());
  const auto gate = [&](int64_t i) {
    const Group& group = pairs.groups[i / Strips(ffn, strip)];
    const int64_t column = i % Strips(ffn, strip) * strip;
    const int64_t count = std::min(strip, ffn - column);
    const int64_t size = group.rows * kMaxStrip;
    float* const gates = ThreadScratch(2 * size + compute.multiply_scratch);
    float* const scratch = gates + 2 * size;
    const float* const x = packed_x + group.first * width;
    compute.multiply(x, group.rows, step.linear.At(group.expert), column, count, gates, kMaxStrip,
                     scratch);
    compute.multiply(x, group.rows, step.linear_v.At(group.expert), column, count, gates + size,
                     kMaxStrip, scratch);
    compute.gate_and_pack(gates, gates + size, group.rows, column, count, ffn,
                          packed_gated + group.first * ffn);
  };

  const int64_t out_strip = StripOf(width, 1, parallel.threads());
  const auto mix = [&](int64_t i) {
    const int64_t column = i * out_strip;
    const int64_t count = std::min(out_strip, width - column);
    for (const Group& group : pairs.groups) {
      const int64_t size = group.rows * kMaxStrip;
      float* const part = ThreadScratch(size + compute.multiply_scratch);
      compute.multiply(packed_gated + group.first * ffn, group.rows,
                       step.linear_1.At(group.expert), column, count, part, kMaxStrip,
                       part + size);
      // Experts ascend, so that a row's sum has its order from the row alone.
      for (int64_t r = 0; r < group.rows; ++r) {
        const float share = pairs.gate[group.first + r];
        float* const out = step.out + pairs.row[group.first + r] * width + column;
        for (int64_t c = 0; c < count; ++c) out[c] += share * part[r * kMaxStrip + c];
      }
    }
  };

  parallel.For(num_groups, pack);
  parallel.For(num_groups * Strips(ffn, strip), gate);
  parallel.For(Strips(width, out_strip), mix);
  expert_rows += static_cast<int64_t>(pairs.row.size());
  weight_bytes += num_groups * (step.linear.Bytes() + step.linear_v.Bytes() + step.linear_1.Bytes());
}

}  // namespace grok1
