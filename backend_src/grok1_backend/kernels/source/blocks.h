// Weights in the order in which products read them: one run of memory, line after line, which memory
// gives fastest.
//
// A matrix [depth, columns] is cut into blocks of 32 columns, one after the other in memory, the last
// one as narrow as what is left. A block is rows, [depth, columns]; or where instructions add four
// products of bytes at a time, quads, [depth / 4, columns, 4]: four rows of a column side by side. Of
// whole blocks 16 quads lie together as tiles are loaded, [2, 16, 16, 4]: those of the first 16
// columns, then of the others; as many as are left in a group of rows that share scales make the
// last such run.
#ifndef GROK1_BLOCKS_H_
#define GROK1_BLOCKS_H_

#include <cstdint>
#include <cstring>

#include "compute.h"

namespace grok1 {

constexpr int64_t kBlockColumns = 32;
constexpr int64_t kQuad = 4;  // bytes whose products are added at a time
constexpr int64_t kPlanes = 2;
constexpr int64_t kPlaneColumns = kBlockColumns / kPlanes;
constexpr int64_t kLineBytes = kQuad * kPlaneColumns;  // of a quad in a plane: a line of memory
constexpr int64_t kRunQuads = 16;
constexpr int64_t kRunBytes = kRunQuads * kPlanes * kLineBytes;

// `quad` of a weight in blocks as this CPU's products take it; 0 where they take it in rows: its
// groups of rows that share their scales are no whole quads.
int64_t QuadOf(Storage storage, int64_t depth, int64_t groups);

// Brings a matrix to blocks, in place.
void ToBlocks(void* data, Storage storage, int64_t depth, int64_t columns, int64_t groups);

namespace {

inline int64_t Quads(int64_t depth) { return (depth + kQuad - 1) / kQuad; }

// Quads of the run that begins with quad `first`, of so many.
inline int64_t QuadsOfRun(int64_t first, int64_t quads) {
  return quads - first < kRunQuads ? quads - first : kRunQuads;
}

// A quad of 32 columns to its place in a whole block of so many quads.
inline void PutQuad(const int8_t* from, int64_t quad, int64_t quads, int8_t* block) {
  const int64_t first = quad / kRunQuads * kRunQuads;
  int8_t* const to = block + first * kPlanes * kLineBytes + (quad - first) * kLineBytes;
  memcpy(to, from, kLineBytes);
  memcpy(to + QuadsOfRun(first, quads) * kLineBytes, from + kLineBytes, kLineBytes);
}

// Up to four rows, `width` values of each, to a quad; what is not there is 0.
inline void MakeQuad(const int8_t* rows, int64_t stride, int64_t count, int64_t width,
                     int8_t* quad) {
  int8_t lines[kQuad][kBlockColumns] = {};
  for (int64_t r = 0; r < kQuad && r < count; ++r) memcpy(lines[r], rows + r * stride, width);
  for (int64_t c = 0; c < kBlockColumns; ++c) {
    for (int64_t r = 0; r < kQuad; ++r) quad[kQuad * c + r] = lines[r][c];
  }
}

// A block of a group of a weight: its `width` columns from `column` on, a multiple of kBlockColumns.
// A whole one is read where it lies; a narrow one, and one of a weight in rows, is brought to
// `scratch`, as a whole one.
inline const int8_t* BlockOf(const Matrix& weight, int64_t group, int64_t column, int64_t width,
                             int8_t* scratch) {
  const auto* const data = static_cast<const int8_t*>(weight.data);
  const int64_t depth = weight.depth / weight.groups;
  const int64_t row = group * depth;
  const int64_t left = weight.columns - column;
  const int64_t columns = left < kBlockColumns ? left : kBlockColumns;
  const int8_t* const block = data + column * weight.depth + row * columns;
  if (weight.quad && width == kBlockColumns) return block;
  for (int64_t i = 0; i < Quads(depth); ++i) {
    int8_t quad[kQuad * kBlockColumns] = {};
    if (weight.quad) {
      memcpy(quad, block + i * kQuad * columns, kQuad * width);
    } else {
      const int64_t at = i * kQuad;
      MakeQuad(data + (row + at) * weight.columns + column, weight.columns, depth - at, width,
               quad);
    }
    PutQuad(quad, i, Quads(depth), scratch);
  }
  return scratch;
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_BLOCKS_H_
