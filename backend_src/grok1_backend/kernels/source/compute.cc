#include "compute.h"

#include "attention.h"
#include "blocks.h"
#include "scales.h"
#include "tiles.h"

namespace grok1 {
namespace {

// Rows of x and the columns of a weight that they are multiplied with, of one group of rows.
struct Part {
  const float* packed;  // all rows of x, whole depth
  int64_t rows;
  const Matrix& weight;
  int64_t row;     // first row of the group
  int64_t depth;   // of the group
  int64_t column;  // a multiple of kBlockColumns where the weight is in blocks
  int64_t count;
  float* sums;     // [rows, kMaxStrip]
  float* panel;
};

// Where a weight has element [row, column], of which columns up to the end of a block of 32 follow,
// and how far the next row is.
template <typename Element>
struct Place {
  const Element* data;
  int64_t stride;

  Place(const Matrix& weight, int64_t row, int64_t column) : stride(weight.columns) {
    data = static_cast<const Element*>(weight.data);
    if (!weight.quad) {
      data += row * stride + column;
      return;
    }
    const int64_t block = column / kBlockColumns * kBlockColumns;
    stride = stride - block < kBlockColumns ? stride - block : kBlockColumns;
    data += block * weight.depth + row * stride + column - block;
  }
};

// Panels brought to floats side by side once for all blocks of rows.
template <typename Element>
void PanelProduct(const Part& part, int64_t column, int64_t width) {
  static constexpr Tiles<0, false, float> tiles;
  for (int64_t d = 0; d < part.depth; d += kDepthBlock) {
    const int64_t depth = part.depth - d < kDepthBlock ? part.depth - d : kDepthBlock;
    const Place<Element> from(part.weight, part.row + d, part.column + column);
    FillPanel(from.data, from.stride, depth, width, part.panel);
    for (int64_t block = 0; block < NumBlocks(part.rows); ++block) {
      const int64_t first = BlockStart(part.rows, block);
      const int64_t height = BlockStart(part.rows, block + 1) - first;
      const float* x = part.packed + first * part.weight.depth + (part.row + d) * height;
      tiles.of[height](x, part.panel, kPanel, depth, part.sums + first * kMaxStrip + column,
                       kMaxStrip);
    }
  }
}

// A panel of one block of rows: the weights are read as they lie.
template <typename Element>
void DirectProduct(const Part& part, int64_t column) {
  static constexpr Tiles<0, true, Element> tiles;
  const Place<Element> from(part.weight, part.row, part.column + column);
  tiles.of[part.rows](part.packed + part.row * part.rows, from.data, from.stride, part.depth,
                      part.sums + column, kMaxStrip);
}

template <typename Element>
void AddProduct(const Part& part) {
  for (int64_t c = 0; c < part.count; c += kPanel) {
    const int64_t width = part.count - c < kPanel ? part.count - c : kPanel;
    if (part.rows <= kMaxRows && width == kPanel) {
      DirectProduct<Element>(part, c);
    } else {
      PanelProduct<Element>(part, c, width);
    }
  }
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
    if (weight.storage == Storage::kInt8) {
      AddProduct<int8_t>(part);
    } else {
      AddProduct<float>(part);
    }
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
      Gate, Attend, AttentionFloats};
  return compute;
}

}  // namespace grok1
