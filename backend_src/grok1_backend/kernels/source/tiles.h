// Products of a few rows with a panel of columns, in registers, and the panels themselves.
#ifndef GROK1_TILES_H_
#define GROK1_TILES_H_

#include "vector.h"

namespace grok1 {
namespace {

constexpr int kLine = 64;           // bytes of a cache line
constexpr int kPanel = 2 * kLanes;  // columns of a converted panel
constexpr int64_t kDepthBlock = 2048 / kLanes;  // rows of a panel: it stays in the first cache
constexpr int64_t kPrefetchRows = 64;  // how far ahead weights are brought to the second cache

// How many vectors of columns `rows` rows take at once: enough independent sums to hide the
// latency of the multiply-adds, no more than there are registers.
constexpr int Vectors(int rows) {
  if (kLanes == 16) return rows <= 2 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
}

// sums[m, c] += sum over d of x[m, d] · weight[d, c] for kRows rows and kVectors vectors of columns.
// x is packed, [depth, kRows], or has rows of kRowStride.
template <int kRows, int kVectors, int64_t kRowStride, bool kAhead, typename Element>
void Tile(const float* x, const Element* weight, int64_t stride, int64_t depth, float* sums,
          int64_t sums_stride) {
  constexpr int kBytes = kVectors * kLanes * sizeof(Element);
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
      __builtin_prefetch(reinterpret_cast<const char*>(row + kPrefetchRows * stride) + byte, 0, 2);
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

// The tile functions for 1 to kMaxRows rows, entry 0 unused; two vectors wide or `Vectors(rows)`.
template <bool kWide, int64_t kRowStride, bool kAhead, typename Element>
struct Tiles {
  TileFunction<Element> of[kMaxRows + 1];
  constexpr Tiles() : of{} { Fill<kMaxRows>(); }

 private:
  template <int kRows>
  constexpr void Fill() {
    if constexpr (kRows > 0) {
      of[kRows] = Tile<kRows, kWide ? Vectors(kRows) : 2, kRowStride, kAhead, Element>;
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

// Columns `column` to `column + width` (at most kPanel) of rows `row`... as floats, 0 beyond.
template <typename Element>
void FillPanel(const Element* data, int64_t stride, int64_t row, int64_t depth, int64_t column,
               int64_t width, float* panel) {
  for (int64_t d = 0; d < depth; ++d) {
    const Element* from = data + (row + d) * stride + column;
    float* to = panel + d * kPanel;
    // The next panel of these rows.
    for (int64_t c = kPanel; c < 2 * kPanel; c += kLine / sizeof(Element)) {
      __builtin_prefetch(from + c, 0, 2);
    }
    if (width == kPanel) {
      Store(to, Load(from));
      Store(to + kLanes, Load(from + kLanes));
    } else {
      for (int64_t c = 0; c < kPanel; ++c) to[c] = c < width ? from[c] : 0.0f;
    }
  }
}

// The same of columns that lie as rows in memory.
inline void FillTransposed(const float* const* columns, int64_t row, int64_t depth, float* panel) {
  const int64_t whole = depth - depth % kLanes;
  for (int64_t d = 0; d < whole; d += kLanes) {
    for (int v = 0; v < 2; ++v) {
      TransposeTile(columns + v * kLanes, row + d, panel + d * kPanel + v * kLanes, kPanel);
    }
  }
  for (int64_t d = whole; d < depth; ++d) {
    for (int64_t c = 0; c < kPanel; ++c) panel[d * kPanel + c] = columns[c][row + d];
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_TILES_H_
