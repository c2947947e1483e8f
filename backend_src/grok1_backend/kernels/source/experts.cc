#include "experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "products.h"
#include "workspace.h"

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
  std::vector<int64_t> group;
  std::vector<Group> groups;

  explicit Pairs(const ExpertStep& step) {
    for (int64_t expert = 0; expert < step.num_experts; ++expert) {
      const int64_t first = size();
      for (int64_t i = 0; i < step.rows * step.selected; ++i) {
        if (step.experts[i] == expert && step.valid[i / step.selected]) {
          row.push_back(i / step.selected);
          gate.push_back(step.gates[i]);
        }
      }
      AddGroups(expert, first);
    }
  }

  int64_t size() const { return static_cast<int64_t>(row.size()); }

 private:
  void AddGroups(int64_t expert, int64_t first) {
    const int64_t count = size() - first;
    for (int64_t part = 0; part < NumParts(count); ++part) {
      const int64_t start = PartStart(count, part);
      const int64_t rows = PartStart(count, part + 1) - start;
      group.insert(group.end(), rows, groups.size());
      groups.push_back({expert, first + start, rows});
    }
  }
};

// The pairs' rows as weights of one stack take them.
class PackedPairs {
 public:
  PackedPairs(const Pairs& pairs, const Matrix& weight)
      : pairs_(pairs), kind_(BestProducts(weight)), weight_(weight), offsets_{0} {
    for (const Group& group : pairs.groups) {
      const int64_t bytes = kind_.packed_bytes(group.rows, weight.depth, weight.groups);
      offsets_.push_back(offsets_.back() + WholeLines(bytes));
    }
    data_ = workspace_.AtLeast(offsets_.back());
  }

  void Pack(int64_t pair, const float* x) {
    const Group& group = pairs_.groups[pairs_.group[pair]];
    kind_.pack(x, pair - group.first, group.rows, weight_.depth, weight_.groups,
               data_ + offsets_[pairs_.group[pair]]);
  }

  // Columns of the group's rows times its expert's matrix in `stack`: [rows, kMaxStrip].
  void Multiply(int64_t group, const Stack& stack, int64_t column, int64_t count, float* out,
                void* scratch) const {
    const Group& of = pairs_.groups[group];
    kind_.multiply(data_ + offsets_[group], of.rows, stack.At(of.expert), column, count, out,
                   kMaxStrip, scratch);
  }

  int64_t scratch_bytes() const { return kind_.scratch_bytes; }

 private:
  const Pairs& pairs_;
  const Products& kind_;
  const Matrix weight_;
  std::vector<int64_t> offsets_;
  Workspace workspace_;
  char* data_;
};

void AddWeighted(float share, const float* part, int64_t count, float* out) {
  for (int64_t c = 0; c < count; ++c) out[c] += share * part[c];
}

float* ThreadFloats(int64_t floats, int64_t more_bytes) {
  return reinterpret_cast<float*>(ThreadMemory(sizeof(float) * floats + more_bytes));
}

// gelu(linear(x)) · linear_v(x) of all pairs, packed for linear_1.
void Gate(const ExpertStep& step, const Pairs& pairs, const PackedPairs& x, PackedPairs& gated,
          Parallel& parallel) {
  const int64_t ffn = step.linear.first.columns;
  const int64_t groups = static_cast<int64_t>(pairs.groups.size());
  const int64_t strip = StripOf(ffn, groups, parallel.threads());
  const int64_t strips = NumStrips(ffn, strip);
  Workspace workspace;
  const int64_t bytes = pairs.size() * ffn * static_cast<int64_t>(sizeof(float));
  auto* const rows = reinterpret_cast<float*>(workspace.AtLeast(bytes));
  parallel.For(groups * strips, [&](int64_t i) {
    const Group& group = pairs.groups[i / strips];
    const int64_t column = i % strips * strip;
    const int64_t count = std::min(strip, ffn - column);
    const int64_t size = group.rows * kMaxStrip;
    float* const gate = ThreadFloats(2 * size, x.scratch_bytes());
    float* const up = gate + size;
    x.Multiply(i / strips, step.linear, column, count, gate, up + size);
    x.Multiply(i / strips, step.linear_v, column, count, up, up + size);
    for (int64_t r = 0; r < group.rows; ++r) {
      BestCompute().gate(gate + r * kMaxStrip, up + r * kMaxStrip, count);
      memcpy(rows + (group.first + r) * ffn + column, gate + r * kMaxStrip, sizeof(float) * count);
    }
  });
  parallel.For(pairs.size(), [&](int64_t pair) { gated.Pack(pair, rows + pair * ffn); });
}

// The pairs' products with linear_1, weighted, are added to their rows. Experts ascend, so that a
// row's sum has its order from the row alone.
void Mix(const ExpertStep& step, const Pairs& pairs, const PackedPairs& gated,
         Parallel& parallel) {
  const int64_t width = step.linear.first.depth;
  const int64_t strip = StripOf(width, 1, parallel.threads());
  parallel.For(NumStrips(width, strip), [&](int64_t i) {
    const int64_t column = i * strip;
    const int64_t count = std::min(strip, width - column);
    for (size_t g = 0; g < pairs.groups.size(); ++g) {
      const Group& group = pairs.groups[g];
      const int64_t size = group.rows * kMaxStrip;
      float* const part = ThreadFloats(size, gated.scratch_bytes());
      gated.Multiply(g, step.linear_1, column, count, part, part + size);
      for (int64_t r = 0; r < group.rows; ++r) {
        AddWeighted(pairs.gate[group.first + r], part + r * kMaxStrip, count,
                    step.out + pairs.row[group.first + r] * width + column);
      }
    }
  });
}

}  // namespace

Counters ReadCounters() { return {expert_rows.load(), weight_bytes.load()}; }

void ComputeExperts(const ExpertStep& step, Parallel& parallel) {
  const Pairs pairs(step);
  const int64_t width = step.linear.first.depth;
  memset(step.out, 0, sizeof(float) * step.rows * width);
  PackedPairs x(pairs, step.linear.first);
  PackedPairs gated(pairs, step.linear_1.first);
  parallel.For(pairs.size(), [&](int64_t pair) { x.Pack(pair, step.x + pairs.row[pair] * width); });
  Gate(step, pairs, x, gated, parallel);
  Mix(step, pairs, gated, parallel);
  expert_rows += pairs.size();
  const int64_t expert = step.linear.Bytes() + step.linear_v.Bytes() + step.linear_1.Bytes();
  weight_bytes += static_cast<int64_t>(pairs.groups.size()) * expert;
}

}  // namespace grok1
