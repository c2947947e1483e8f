// Sums of digits become floats.
#ifndef GROK1_COMBINE_H_
#define GROK1_COMBINE_H_

#include "interleave.h"

namespace grok1 {
namespace {

#if defined(__AVX512F__)
// Two quarters of a, then two of b.
template <int kChoice>
inline Vector Quarters(Vector a, Vector b) {
  return (Vector)_mm512_shuffle_f32x4((__m512)a, (__m512)b, kChoice);
}
#endif

// Brings planes [plane, 16] to the order of columns, in place.
inline void OrderColumns(Vector* planes) {
#if defined(__AVX512F__)
  constexpr int kLow = 0x44, kHigh = 0xEE;  // the first, last two quarters of each
  constexpr int kEven = 0x88, kOdd = 0xDD;
  const Vector low[2] = {Quarters<kLow>(planes[0], planes[1]),
                         Quarters<kLow>(planes[2], planes[3])};
  const Vector high[2] = {Quarters<kHigh>(planes[0], planes[1]),
                          Quarters<kHigh>(planes[2], planes[3])};
  planes[0] = Quarters<kEven>(low[0], low[1]);
  planes[1] = Quarters<kOdd>(low[0], low[1]);
  planes[2] = Quarters<kEven>(high[0], high[1]);
  planes[3] = Quarters<kOdd>(high[0], high[1]);
#else
  Vector ordered[2 * kPlanes];
  for (int half = 0; half < 2; ++half) {
    for (int pair = 0; pair < 2; ++pair) {
      const __m256 a = (__m256)planes[4 * pair + half], b = (__m256)planes[4 * pair + 2 + half];
      ordered[4 * half + pair] = (Vector)_mm256_permute2f128_ps(a, b, 0x20);
      ordered[4 * half + 2 + pair] = (Vector)_mm256_permute2f128_ps(a, b, 0x31);
    }
  }
  memcpy(planes, ordered, sizeof ordered);
#endif
}

// One row's product with a column block, of the sums of one group, set or added to out.
//
// sums[i] + offset is the row's first digit in the first plane.
void CombineRow(const int32_t* const* sums, int64_t num_sums, int64_t offset, int64_t lines,
                float scale, const float* scales, int64_t count, bool set, float* out) {
  constexpr int kVectors = kColumnBlock / kLanes;
  constexpr int kInPlane = kPlaneColumns / kLanes;
  Vector products[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t place = offset + v / kInPlane * lines * kPlaneColumns + v % kInPlane * kLanes;
    IntVector digits[kDigits] = {};
    for (int64_t i = 0; i < num_sums; ++i) {
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit) {
        IntVector part;
        memcpy(&part, sums[i] + place + digit * kPlaneColumns, sizeof part);
        digits[digit] += part;
      }
    }
    // The factors are powers of two, so that only the two sums and the conversions round.
    Vector product = __builtin_convertvector(digits[kDigits - 1], Vector);
#pragma GCC unroll 3
    for (int digit = kDigits - 2; digit >= 0; --digit) {
      product = product * 256.0f + __builtin_convertvector(digits[digit], Vector);
    }
    products[v] = product * scale;
  }
  OrderColumns(products);
  if (count == kColumnBlock) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* const to = out + v * kLanes;
      const Vector before = set ? Vector{} : Load(to);
      Store(to, before + products[v] * Load(scales + v * kLanes));
    }
  } else {
    float narrow[kColumnBlock];
    memcpy(narrow, products, sizeof narrow);
    for (int64_t c = 0; c < count; ++c) {
      const float before = set ? 0.0f : out[c];
      out[c] = before + narrow[c] * scales[c];
    }
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_COMBINE_H_
