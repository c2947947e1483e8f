#include "compute.h"

#include "attention.h"
#include "scales.h"
#include "tiles.h"

namespace grok1 {
namespace {

void Fill(const Matrix& weight, int64_t row, int64_t depth, int64_t column, int64_t width,
          float* panel) {
  if (weight.storage == Storage::kInt8) {
    FillPanel(static_cast<const int8_t*>(weight.data), weight.stride, row, depth, column, width,
              panel);
  } else {
    FillPanel(static_cast<const float*>(weight.data), weight.stride, row, depth, column, width,
              panel);
  }
}

// One run of rows of the weight and the sums that it adds to.
struct Part {
  const float* packed;  // all rows of x, whole depth
  int64_t rows;
  const Matrix& weight;
  int64_t row;          // first row of the run
  int64_t depth;        // of the run
  int64_t column;
  int64_t count;
  float* sums;          // [rows, kMaxStrip]
  float* panel;
};

// Panels converted once for all blocks of rows, from column `done` of the part on.
void PanelProduct(const Part& part, int64_t done) {
  static constexpr Tiles<false, 0, false, float> tiles;
  for (int64_t d = 0; d < part.depth; d += kDepthBlock) {
    const int64_t depth = part.depth - d < kDepthBlock ? part.depth - d : kDepthBlock;
    for (int64_t c = done; c < part.count; c += kPanel) {
      const int64_t width = part.count - c < kPanel ? part.count - c : kPanel;
      Fill(part.weight, part.row + d, depth, part.column + c, width, part.panel);
      for (int64_t block = 0; block < NumBlocks(part.rows); ++block) {
        const int64_t first = BlockStart(part.rows, block);
        const int64_t height = BlockStart(part.rows, block + 1) - first;
        const float* x = part.packed + first * part.weight.depth + (part.row + d) * height;
        tiles.of[height](x, part.panel, kPanel, depth, part.sums + first * kMaxStrip + c,
                         kMaxStrip);
      }
    }
  }
}

// One block of rows, the weights read as they lie. Returns how many columns are done.
template <typename Element>
int64_t DirectProduct(const Part& part) {
  constexpr int64_t kRun = 32;  // rows whose whole strip is read before the next rows
  static constexpr Tiles<true, 0, true, Element> wide;
  static constexpr Tiles<false, 0, true, Element> narrow;
  const int64_t rows = part.rows;
  const float* x = part.packed + part.row * rows;
  const Element* data = static_cast<const Element*>(part.weight.data) +
                        part.row * part.weight.stride + part.column;
  const int64_t step = Vectors(rows) * kLanes;
  int64_t c = 0;
  for (int64_t d = 0; d < part.depth; d += kRun) {
    const int64_t depth = part.depth - d < kRun ? part.depth - d : kRun;
    const Element* from = data + d * part.weight.stride;
    const float* xs = x + d * rows;
    for (c = 0; c + step <= part.count; c += step) {
      wide.of[rows](xs, from + c, part.weight.stride, depth, part.sums + c, kMaxStrip);
    }
    for (; c + kPanel <= part.count; c += kPanel) {
      narrow.of[rows](xs, from + c, part.weight.stride, depth, part.sums + c, kMaxStrip);
    }
  }
  return c;
}

int64_t ProductAsStored(const Part& part) {
  if (part.rows > kMaxRows) return 0;
  if (part.weight.storage == Storage::kInt8) return DirectProduct<int8_t>(part);
  return DirectProduct<float>(part);
}

int64_t PackedBytes(int64_t rows, int64_t depth, int64_t) {
  return rows * depth * static_cast<int64_t>(sizeof(float));
}

void PackFloats(const float* x, int64_t row, int64_t rows, int64_t depth, int64_t, void* packed) {
  PackRow(x, row, rows, depth, static_cast<float*>(packed));
}

void Multiply(const void* x, int64_t rows, const Matrix& weight, int64_t column, int64_t count,
              float* out, int64_t out_stride, void* scratch) {
  const float* const packed = static_cast<const float*>(x);
  float* panel = static_cast<float*>(scratch);
  float* scales = panel + kDepthBlock * kPanel;
  float* sums = scales + kMaxStrip;
  const int64_t depth = weight.depth / weight.groups;
  for (int64_t group = 0; group < weight.groups; ++group) {
    memset(sums, 0, sizeof(float) * rows * kMaxStrip);
    const Part part{packed, rows, weight, group * depth, depth, column, count, sums, panel};
    const int64_t done = ProductAsStored(part);
    if (done < count) PanelProduct(part, done);
    ReadScales(weight, group, column, count, scales);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * kMaxStrip;
      float* to = out + r * out_stride;
      if (group == 0) memset(to, 0, sizeof(float) * count);
      for (int64_t c = 0; c < count; ++c) to[c] += from[c] * scales[c];
    }
  }
}

void Gate(float* gate, const float* up, int64_t count) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) Store(gate + c, Gelu(Load(gate + c)) * Load(up + c));
  for (; c < count; ++c) gate[c] = Gelu(Splat(gate[c]))[0] * up[c];
}

}  // namespace

const Compute& GROK1_COMPUTE() {
  constexpr int64_t kScratch = kDepthBlock * kPanel + kMaxStrip + kMaxGroup * kMaxStrip;
  static constexpr Compute compute = {
      {kScratch * static_cast<int64_t>(sizeof(float)), PackedBytes, PackFloats, Multiply},
      Gate, Attend, AttentionState::Floats};
  return compute;
}

}  // namespace grok1
