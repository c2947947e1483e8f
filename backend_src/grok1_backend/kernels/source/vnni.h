// Sums of byte products in vector registers (VNNI).
//
// The instruction multiplies unsigned with signed bytes: the weights come flipped, 128 too large,
// and the sums begin with what takes that off again.
#ifndef GROK1_VNNI_H_
#define GROK1_VNNI_H_

#include "interleave.h"

namespace grok1 {
namespace {

constexpr int8_t kFlip = -128;  // makes 128 + w, unsigned, of w
constexpr int64_t kTileLines = 1;  // lines come in any number
constexpr int64_t kDepthBlock = kMaxIntegerDepth;  // corrections are those of the whole depth

#if defined(__AVX512VNNI__)
constexpr int kDotLines = 2 * kDigits;  // lines whose sums fit in the registers
inline Bytes SplatInt(int32_t x) { return _mm512_set1_epi32(x); }
inline Bytes AddInts(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline Bytes AddDot(Bytes sum, Bytes weights, Bytes digits) {
  return _mm512_dpbusd_epi32(sum, weights, digits);
}
#else
constexpr int kDotLines = kDigits;
inline Bytes SplatInt(int32_t x) { return _mm256_set1_epi32(x); }
inline Bytes AddInts(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline Bytes AddDot(Bytes sum, Bytes weights, Bytes digits) {
  return _mm256_dpbusd_avx_epi32(sum, weights, digits);
}
#endif

constexpr int kVectors = 4;  // of a block's columns that are summed together
constexpr int kInPlane = kColumnBlock / sizeof(Bytes);  // vectors in a plane's line

// -128 · the sum of a line's digits.
inline int32_t Correction(const int8_t* digits, int64_t depth) {
  Bytes sum = SplatInt(0);
  for (int64_t d = 0; d < depth; d += sizeof(Bytes)) {
    sum = AddDot(sum, SplatBytes(1), LoadBytes(digits + d));
  }
  int32_t sums[sizeof(Bytes) / 4];
  StoreBytes(sums, sum);
  int32_t total = 0;
  for (const int32_t part : sums) total += part;
  return -128 * total;
}

// kLines lines by kVectors vectors of columns, from vector `first` of the block on.
template <int kLines>
void DotVectors(const int8_t* digits, int64_t stride, const int8_t* planes, int64_t depth,
                int first, const int32_t* corrections, bool set, int32_t* sums,
                int64_t plane_sums) {
  const int8_t* weights[kVectors];
  int32_t* to[kVectors];
  Bytes sum[kLines][kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t plane = (first + v) / kInPlane;
    const int64_t place = (first + v) % kInPlane * sizeof(Bytes);
    weights[v] = planes + plane * kColumnBlock + place;
    to[v] = sums + plane * plane_sums + place / sizeof(int32_t);
  }
#pragma GCC unroll 6
  for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[line][v] = SplatInt(corrections[line]);
  }
  for (int64_t d = 0; d < depth; d += 4) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Bytes w = LoadBytes(weights[v] + d / 4 * kLineBytes);
#pragma GCC unroll 6
      for (int line = 0; line < kLines; ++line) {
        int32_t four;
        memcpy(&four, digits + line * stride + d, sizeof four);
        sum[line][v] = AddDot(sum[line][v], w, SplatInt(four));
      }
    }
  }
#pragma GCC unroll 6
  for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      int32_t* const at = to[v] + line * kPlaneColumns;
      StoreBytes(at, set ? sum[line][v] : AddInts(sum[line][v], LoadBytes(at)));
    }
  }
}

// Adds the products of all lines with one column block to its sums, [plane, line, 16].
inline void DotBlock(const int8_t* digits, int64_t stride, int64_t lines, const int8_t* planes,
                     int64_t depth, const int32_t* corrections, bool set, FetchAhead& ahead,
                     int32_t* sums) {
  const int64_t plane_sums = lines * kPlaneColumns;
  ahead.Fetch(depth / 2);
  int64_t line = 0;
  for (; line + kDotLines <= lines; line += kDotLines) {
    for (int first = 0; first < kPlanes * kInPlane; first += kVectors) {
      DotVectors<kDotLines>(digits + line * stride, stride, planes, depth, first,
                            corrections + line, set, sums + line * kPlaneColumns, plane_sums);
    }
  }
  if (line < lines) {
    for (int first = 0; first < kPlanes * kInPlane; first += kVectors) {
      DotVectors<kDigits>(digits + line * stride, stride, planes, depth, first, corrections + line,
                          set, sums + line * kPlaneColumns, plane_sums);
    }
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_VNNI_H_
