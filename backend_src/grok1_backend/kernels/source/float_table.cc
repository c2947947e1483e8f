// Products with a table in float32. An element is the sum of kLanes chains of fused multiply-adds
// over the depth, added up in one order, whatever the tile it is computed in.
#include "table.h"
#include "table_tiles.h"

namespace grok1 {
namespace {

constexpr int kTileRows = kLanes == 16 ? 4 : 2;
constexpr int kTileColumns = kLanes == 16 ? 6 : 4;
constexpr int kTileSums = (kTileRows * kTileColumns + kLanes - 1) / kLanes * kLanes;

// The first `count` elements, zeros beyond.
template <typename Element>
inline Vector LoadPart(const Element* from, int64_t count) {
  Element part[kLanes] = {};
  memcpy(part, from, count * sizeof *from);
  return Load(part);
}

// out[m, c] for kRows rows of x and the rows of the table that `columns` point to.
template <int kRows, typename Element>
void Tile(const float* x, const Element* const* columns, int64_t depth, float* out,
          int64_t out_stride, int64_t width, Ahead& ahead) {
  Vector sum[kTileSums] = {};
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    ahead.Step();
    Vector xs[kRows];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) xs[m] = Load(x + m * depth + d);
#pragma GCC unroll 6
    for (int c = 0; c < kTileColumns; ++c) {
      const Vector w = Load(columns[c] + d);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) sum[m * kTileColumns + c] += xs[m] * w;
    }
  }
  if (d < depth) {
#pragma GCC unroll 6
    for (int c = 0; c < kTileColumns; ++c) {
      const Vector w = LoadPart(columns[c] + d, depth - d);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        sum[m * kTileColumns + c] += LoadPart(x + m * depth + d, depth - d) * w;
      }
    }
  }
  float sums[kTileSums];
#pragma GCC unroll 4
  for (int i = 0; i < kTileSums; i += kLanes) Store(sums + i, SumEach(sum + i));
  for (int m = 0; m < kRows; ++m) {
    for (int64_t c = 0; c < width; ++c) out[m * out_stride + c] = sums[m * kTileColumns + c];
  }
}

template <int kRows, typename Element>
void TileOf(int64_t rows, const float* x, const Element* const* columns, int64_t depth, float* out,
            int64_t out_stride, int64_t width, Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      Tile<kRows>(x, columns, depth, out, out_stride, width, ahead);
    } else {
      TileOf<kRows - 1>(rows, x, columns, depth, out, out_stride, width, ahead);
    }
  }
}

template <typename Element>
void MultiplyAs(const float* x, int64_t rows, const Table& table, int64_t first, int64_t count,
                float* out) {
  const int64_t depth = table.depth;
  const Element* const data = static_cast<const Element*>(table.data) + first * depth;
  const int64_t steps = depth / kLanes * ((rows + kTileRows - 1) / kTileRows);
  const int64_t bytes = kTileColumns * depth * static_cast<int64_t>(sizeof(Element));
  for (int64_t c = 0; c < count; c += kTileColumns) {
    const int64_t width = count - c < kTileColumns ? count - c : kTileColumns;
    const Element* columns[kTileColumns];
    // Beyond the last row of the table it is computed again, and not used.
    for (int64_t i = 0; i < kTileColumns; ++i) columns[i] = data + (c + (i < width ? i : 0)) * depth;
    Ahead ahead(data + (c + kTileColumns) * depth, bytes, steps > 0 ? steps : 1);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t height = rows - row < kTileRows ? rows - row : kTileRows;
      TileOf<kTileRows>(height, x + row * depth, columns, depth,
                        out + row * table.rows + first + c, table.rows, width, ahead);
    }
  }
}

void Multiply(const void* packed, int64_t rows, const Table& table, int64_t first, int64_t count,
              float* out) {
  const float* const x = static_cast<const float*>(packed);
  if (!table.scales) {
    MultiplyAs<float>(x, rows, table, first, count, out);
    return;
  }
  MultiplyAs<int8_t>(x, rows, table, first, count, out);
  for (int64_t r = 0; r < rows; ++r) {
    float* const to = out + r * table.rows + first;
    for (int64_t c = 0; c < count; ++c) to[c] *= table.scales[first + c];
  }
}

int64_t PackedBytes(int64_t rows, int64_t depth) {
  return rows * depth * static_cast<int64_t>(sizeof(float));
}

void Pack(const float* x, int64_t rows, int64_t depth, void* packed) {
  memcpy(packed, x, PackedBytes(rows, depth));
}

}  // namespace

const TableProduct& GROK1_COMPUTE() {
  static constexpr TableProduct product = {PackedBytes, Pack, Multiply};
  return product;
}

}  // namespace grok1
