// Weights in the order in which products read them: as one run of memory, which memory gives fastest.
//
// A matrix [depth, columns] is cut into blocks of 32 columns, one after the other in memory, the last
// one as narrow as what is left. A block is [depth / quad, columns, quad]: `quad` rows of a column
// side by side, four where instructions add four products of bytes at a time, else one.
#ifndef GROK1_BLOCKS_H_
#define GROK1_BLOCKS_H_

#include <cstdint>
#include <cstring>

#include "compute.h"

namespace grok1 {

constexpr int64_t kBlockColumns = 32;
constexpr int64_t kQuad = 4;  // bytes whose products are added at a time
constexpr int64_t kQuadBytes = kQuad * kBlockColumns;

// `quad` of a weight in blocks as this CPU's products take it; 0 where they take it in rows: its
// groups of rows that share their scales are no whole quads.
int64_t QuadOf(Storage storage, int64_t depth, int64_t groups);

// Brings a matrix to blocks, in place.
void ToBlocks(void* data, Storage storage, int64_t depth, int64_t columns, int64_t quad);

namespace {

inline int64_t Quads(int64_t depth) { return (depth + kQuad - 1) / kQuad; }

// `depth` rows by `width` columns to quads that are `quad_bytes` long; rows beyond are 0.
inline void Interleave(const int8_t* rows, int64_t stride, int64_t depth, int64_t width,
                       int64_t quad_bytes, int8_t* to) {
  for (int64_t d = 0; d < depth; d += kQuad, to += quad_bytes) {
    int8_t quad[kQuad][kBlockColumns] = {};
    for (int64_t r = 0; r < kQuad && d + r < depth; ++r) {
      memcpy(quad[r], rows + (d + r) * stride, width);
    }
    int8_t beside[kQuadBytes];
    for (int64_t c = 0; c < kBlockColumns; ++c) {
      for (int64_t r = 0; r < kQuad; ++r) beside[kQuad * c + r] = quad[r][c];
    }
    memcpy(to, beside, kQuad * width);
  }
}

// A block of a group of a weight: its `width` columns from `column` on, a multiple of kBlockColumns.
// A whole one is read where it lies; a narrow one, and one of a weight in rows, is brought to
// `scratch`, as wide as a whole one.
inline const int8_t* BlockOf(const Matrix& weight, int64_t group, int64_t column, int64_t width,
                             int8_t* scratch) {
  const auto* const data = static_cast<const int8_t*>(weight.data);
  const int64_t depth = weight.depth / weight.groups;
  const int64_t row = group * depth;
  if (!weight.quad) {
    const int8_t* const rows = data + row * weight.columns + column;
    Interleave(rows, weight.columns, depth, width, kQuadBytes, scratch);
    return scratch;
  }
  const int64_t left = weight.columns - column;
  const int64_t whole = left < kBlockColumns ? left : kBlockColumns;
  const int8_t* const block = data + column * weight.depth + row * whole;
  if (width == kBlockColumns) return block;
  for (int64_t quad = 0; quad < Quads(depth); ++quad) {
    memcpy(scratch + quad * kQuadBytes, block + quad * kQuad * whole, kQuad * width);
  }
  return scratch;
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_BLOCKS_H_
