// int8 weights in the order of the instructions that add products of four bytes at a time.
//
// A block of 64 columns becomes four planes, [depth / 4, plane, 64 bytes]. Unpacking works within
// 128 bits, so that a plane holds four columns of each quarter of the block: byte 16·q + 4·i + r of
// plane p at d is the weight of row 4·d + r, column 16·q + 4·p + i.
#ifndef GROK1_INTERLEAVE_H_
#define GROK1_INTERLEAVE_H_

#include <immintrin.h>

#include "fixed_point.h"
#include "integer.h"

namespace grok1 {
namespace {

constexpr int kPlanes = 4;
constexpr int kPlaneColumns = 16;
constexpr int64_t kLineBytes = kPlanes * kColumnBlock;  // of four rows of a block

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

// Brings a part of a weight to the second cache, line by line in the order of memory, which gives
// most to long runs.
class FetchAhead {
 public:
  explicit FetchAhead(const WeightPart& part)
      : row_(part.data), stride_(part.stride), left_(part.depth), columns_(part.columns) {}

  void Fetch(int64_t lines) {
    for (int64_t i = 0; i < lines && left_ > 0; ++i) {
      __builtin_prefetch(row_ + column_, 0, 2);
      column_ += kColumnBlock;
      if (column_ >= columns_) {
        column_ = 0;
        row_ += stride_;
        --left_;
      }
    }
  }

 private:
  const int8_t* row_;
  int64_t column_ = 0;
  int64_t stride_;
  int64_t left_;
  int64_t columns_;
};

// Rows at rows_of[0..3] of a column block to one line of all planes.
inline void InterleaveLine(const int8_t* const* rows_of, Bytes flip, int8_t* to) {
#pragma GCC unroll 2
  for (int64_t c = 0; c < kColumnBlock; c += sizeof(Bytes)) {
    const Bytes a = LoadBytes(rows_of[0] + c) ^ flip;
    const Bytes b = LoadBytes(rows_of[1] + c) ^ flip;
    const Bytes e = LoadBytes(rows_of[2] + c) ^ flip;
    const Bytes f = LoadBytes(rows_of[3] + c) ^ flip;
    const Bytes low[2] = {Low8(a, b), Low8(e, f)};
    const Bytes high[2] = {High8(a, b), High8(e, f)};
    StoreBytes(to + c, Low16(low[0], low[1]));
    StoreBytes(to + kColumnBlock + c, High16(low[0], low[1]));
    StoreBytes(to + 2 * kColumnBlock + c, Low16(high[0], high[1]));
    StoreBytes(to + 3 * kColumnBlock + c, High16(high[0], high[1]));
  }
}

// `depth` rows by `width` columns (at most a block) of a weight, and as many lines as
// PaddedDepth(depth) needs: what lies beyond meets digits that are 0. Each byte is xored with
// `flip`.
//
// Half of what is ahead is fetched here, half where the block is used: few requests to memory are
// kept at a time, and they should never run out.
inline void Interleave(const int8_t* weight, int64_t stride, int64_t depth, int64_t width,
                       int8_t flip, FetchAhead& ahead, int8_t* planes) {
  const Bytes flips = SplatBytes(flip);
  const int64_t whole = width == kColumnBlock ? depth / 4 * 4 : 0;
  for (int64_t d = 0; d < whole; d += 4) {
    const int8_t* const row = weight + d * stride;
    const int8_t* const rows_of[4] = {row, row + stride, row + 2 * stride, row + 3 * stride};
    ahead.Fetch(2);
    InterleaveLine(rows_of, flips, planes + d / 4 * kLineBytes);
  }
  for (int64_t d = whole; d < PaddedDepth(depth); d += 4) {
    int8_t rows[4][kColumnBlock] = {};
    const int8_t* const rows_of[4] = {rows[0], rows[1], rows[2], rows[3]};
    for (int64_t r = 0; r < 4 && d + r < depth; ++r) {
      memcpy(rows[r], weight + (d + r) * stride, width);
    }
    ahead.Fetch(2);
    InterleaveLine(rows_of, flips, planes + d / 4 * kLineBytes);
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_INTERLEAVE_H_
