// Products of a few rows with a panel of columns, in registers, and the panels themselves.
#ifndef GROK1_TILES_H_
#define GROK1_TILES_H_

#include "vector.h"

namespace grok1 {
namespace {

constexpr int kLine = 64;           // bytes of a cache line
constexpr int kPanel = 2 * kLanes;  // columns of a converted panel
constexpr int64_t kDepthBlock = 2048 / kLanes;  // rows of a panel: it stays in the first cache
constexpr int64_t kAheadBytes = 4096;  // how far ahead weights are brought to the second cache

// sums[m, c] += sum over d of x[m, d] · weight[d, c] for kRows rows and a panel of columns. x is
// packed, [depth, kRows], or has rows of kRowStride. kAhead: weights come from memory.
template <int kRows, int64_t kRowStride, bool kAhead, typename Element>
void Tile(const float* x, const Element* weight, int64_t stride, int64_t depth, float* sums,
          int64_t sums_stride) {
  constexpr int kVectors = kPanel / kLanes;
  constexpr int kBytes = kPanel * sizeof(Element);
  Vector sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[m][v] = Load(sums + m * sums_stride + v * kLanes);
  }
  for (int64_t d = 0; d < depth; ++d) {
    const Element* row = weight + d * stride;
#pragma GCC unroll 16
    for (int byte = 0; kAhead && byte < kBytes; byte += kLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(row) + kAheadBytes + byte, 0, 2);
    }
    Vector w[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) w[v] = Load(row + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Vector factor = Splat(x[kRowStride ? m * kRowStride + d : d * kRows + m]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[m][v] += factor * w[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) Store(sums + m * sums_stride + v * kLanes, sum[m][v]);
  }
}

template <typename Element>
using TileFunction = void (*)(const float*, const Element*, int64_t, int64_t, float*, int64_t);

// The tile functions for 1 to kMaxRows rows, entry 0 unused.
template <int64_t kRowStride, bool kAhead, typename Element>
struct Tiles {
  TileFunction<Element> of[kMaxRows + 1];
  constexpr Tiles() : of{} { Fill<kMaxRows>(); }

 private:
  template <int kRows>
  constexpr void Fill() {
    if constexpr (kRows > 0) {
      of[kRows] = Tile<kRows, kRowStride, kAhead, Element>;
      Fill<kRows - 1>();
    }
  }
};

// Rows go in blocks of at most kMaxRows, as equal as can be.
int64_t NumBlocks(int64_t rows) { return (rows + kMaxRows - 1) / kMaxRows; }
int64_t BlockStart(int64_t rows, int64_t block) { return rows * block / NumBlocks(rows); }

// Row `row` of `rows` to where its block has it: a block of `height` rows is [depth, height].
void PackRow(const float* x, int64_t row, int64_t rows, int64_t depth, float* packed) {
  int64_t block = 0;
  while (BlockStart(rows, block + 1) <= row) ++block;
  const int64_t first = BlockStart(rows, block);
  const int64_t height = BlockStart(rows, block + 1) - first;
  float* const to = packed + first * depth + row - first;
  for (int64_t d = 0; d < depth; ++d) to[d * height] = x[d];
}

void Pack(const float* const* rows_of, int64_t rows, int64_t depth, float* packed) {
  for (int64_t r = 0; r < rows; ++r) PackRow(rows_of[r], r, rows, depth, packed);
}

// `depth` rows by `width` columns (at most kPanel) as floats, 0 beyond.
template <typename Element>
void FillPanel(const Element* data, int64_t stride, int64_t depth, int64_t width, float* panel) {
  for (int64_t d = 0; d < depth; ++d, data += stride, panel += kPanel) {
    if (width == kPanel) {
      Store(panel, Load(data));
      Store(panel + kLanes, Load(data + kLanes));
    } else {
      for (int64_t c = 0; c < kPanel; ++c) panel[c] = c < width ? data[c] : 0.0f;
    }
  }
}

// The same of columns that lie as rows in memory. `between` is called once a tile.
template <typename Between>
inline void FillTransposed(const float* const* columns, int64_t depth, const Between& between,
                           float* panel) {
  const int64_t whole = depth - depth % kLanes;
  for (int64_t d = 0; d < whole; d += kLanes) {
    for (int v = 0; v < 2; ++v) {
      TransposeTile(columns + v * kLanes, d, panel + d * kPanel + v * kLanes, kPanel);
      between();
    }
  }
  for (int64_t d = whole; d < depth; ++d) {
    for (int64_t c = 0; c < kPanel; ++c) panel[d * kPanel + c] = columns[c][d];
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_TILES_H_
