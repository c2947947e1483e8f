// int8 weights in the order of the instructions that add products of four bytes at a time.
//
// A block of 64 columns becomes four planes, [plane, depth / 4, 64 bytes]. Unpacking works within
// 128 bits, so that a plane holds four columns of each quarter of the block: byte 16·q + 4·i + r of
// line d of plane p is the weight of row 4·d + r, column 16·q + 4·p + i.
#ifndef GROK1_INTERLEAVE_H_
#define GROK1_INTERLEAVE_H_

#include <immintrin.h>

#include "fixed_point.h"
#include "integer.h"

namespace grok1 {
namespace {

constexpr int kPlanes = 4;
constexpr int kPlaneColumns = 16;
constexpr int64_t kBand = 16;  // rows that are read together: they and the next fit in the caches

#if defined(__AVX512BW__)
typedef __m512i Bytes;
inline Bytes LoadBytes(const void* from) { return _mm512_loadu_si512(from); }
inline void StoreBytes(void* to, Bytes v) { _mm512_storeu_si512(to, v); }
inline Bytes SplatBytes(int8_t x) { return _mm512_set1_epi8(x); }
inline Bytes Low8(Bytes a, Bytes b) { return _mm512_unpacklo_epi8(a, b); }
inline Bytes High8(Bytes a, Bytes b) { return _mm512_unpackhi_epi8(a, b); }
inline Bytes Low16(Bytes a, Bytes b) { return _mm512_unpacklo_epi16(a, b); }
inline Bytes High16(Bytes a, Bytes b) { return _mm512_unpackhi_epi16(a, b); }
#else
typedef __m256i Bytes;
inline Bytes LoadBytes(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline void StoreBytes(void* to, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }
inline Bytes SplatBytes(int8_t x) { return _mm256_set1_epi8(x); }
inline Bytes Low8(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
inline Bytes High8(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
inline Bytes Low16(Bytes a, Bytes b) { return _mm256_unpacklo_epi16(a, b); }
inline Bytes High16(Bytes a, Bytes b) { return _mm256_unpackhi_epi16(a, b); }
#endif

// Rows at rows_of[0..3] of one column block to one line of each plane.
inline void InterleaveLine(const int8_t* const* rows_of, Bytes flip, int64_t plane_bytes,
                           int8_t* to) {
#pragma GCC unroll 2
  for (int64_t c = 0; c < kColumnBlock; c += sizeof(Bytes)) {
    const Bytes a = LoadBytes(rows_of[0] + c) ^ flip;
    const Bytes b = LoadBytes(rows_of[1] + c) ^ flip;
    const Bytes e = LoadBytes(rows_of[2] + c) ^ flip;
    const Bytes f = LoadBytes(rows_of[3] + c) ^ flip;
    const Bytes low[2] = {Low8(a, b), Low8(e, f)};
    const Bytes high[2] = {High8(a, b), High8(e, f)};
    StoreBytes(to + c, Low16(low[0], low[1]));
    StoreBytes(to + plane_bytes + c, High16(low[0], low[1]));
    StoreBytes(to + 2 * plane_bytes + c, Low16(high[0], high[1]));
    StoreBytes(to + 3 * plane_bytes + c, High16(high[0], high[1]));
  }
}

// `depth` rows by `columns` columns of a weight, and as many lines as PaddedDepth(depth) needs: what
// lies beyond the depth is the last row again, and meets digits that are 0. Each byte is xored with
// `flip`.
//
// Bands of few rows are read from end to end, for memory gives most to long runs.
inline void Interleave(const int8_t* weight, int64_t stride, int64_t depth, int64_t columns,
                       int8_t flip, int8_t* planes) {
  const int64_t plane_bytes = PaddedDepth(depth) * kPlaneColumns;
  const Bytes flips = SplatBytes(flip);
  for (int64_t band = 0; band < PaddedDepth(depth); band += kBand) {
    for (int64_t column = 0; column < columns; column += kColumnBlock) {
      const int64_t width = columns - column < kColumnBlock ? columns - column : kColumnBlock;
      int8_t* const block = planes + column * PaddedDepth(depth);
      for (int64_t d = band; d < band + kBand; d += 4) {
        const int8_t* rows_of[4];
        int8_t narrow[4][kColumnBlock];
        for (int64_t r = 0; r < 4; ++r) {
          rows_of[r] = weight + (d + r < depth ? d + r : depth - 1) * stride + column;
          __builtin_prefetch(rows_of[r] + kBand * stride, 0, 2);
          if (width < kColumnBlock) {
            memcpy(narrow[r], rows_of[r], width);
            rows_of[r] = narrow[r];
          }
        }
        InterleaveLine(rows_of, flips, plane_bytes, block + d * kPlaneColumns);
      }
    }
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_INTERLEAVE_H_
