// Activations as fixed point: a scale that is a power of two, and signed digits of base 256.
//
// Products with int8 weights are then sums of integers, exact in any order and on any instruction
// set: a row's result does not depend on its neighbours, to the bit. Three digits hold 23 bits of
// the largest value of a run, about what a float32 sum keeps of it.
#ifndef GROK1_FIXED_POINT_H_
#define GROK1_FIXED_POINT_H_

#include "vector.h"

namespace grok1 {
namespace {

constexpr int kDigits = 3;
// Digits come in runs of so many values, 0 beyond the last: what one tile instruction takes.
constexpr int64_t kDigitRun = 64;

inline int64_t PaddedDepth(int64_t depth) {
  return (depth + kDigitRun - 1) / kDigitRun * kDigitRun;
}

inline IntVector Round(Vector x) {
#if defined(__AVX512F__)
  return (IntVector)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (IntVector)_mm256_cvtps_epi32((__m256)x);
#else
  IntVector rounded;
  for (int i = 0; i < kLanes; ++i) rounded[i] = static_cast<int32_t>(__builtin_lrintf(x[i]));
  return rounded;
#endif
}

// The largest magnitude of a run as the bits of a float, whose order is that of integers:
// infinities and what is not a number are above all numbers.
inline int32_t LargestBits(const float* x, int64_t depth) {
  IntVector top{};
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    const IntVector bits = (IntVector)Load(x + d) & 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = top[i] > largest ? top[i] : largest;
  for (; d < depth; ++d) {
    int32_t bits;
    memcpy(&bits, x + d, sizeof bits);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Digit i of x[d], the least first, goes to digits[i · stride + d], up to PaddedDepth(depth).
// Returns the scale: x[d] is about scale · sum over i of digit i · 256^i; not a number where a
// value is none or infinite.
inline float ToDigits(const float* x, int64_t depth, int8_t* digits, int64_t stride) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const int32_t largest = LargestBits(x, depth);
  // The factor brings the largest value to between 2²² and 127 · 2¹⁶, the largest first digit: a
  // mantissa near 2 counts as the next power. Tiny runs are held to what factors can be.
  int32_t exponent = (largest + (1 << 17)) >> 23;
  exponent = exponent < 23 ? 23 : exponent;
  const int32_t factor_bits = (276 - exponent) << 23;
  const int32_t scale_bits = largest >= 0x7F800000 ? 0x7FC00000 : (exponent - 22) << 23;
  float factor, scale;
  memcpy(&factor, &factor_bits, sizeof factor);
  memcpy(&scale, &scale_bits, sizeof scale);
  for (int64_t d = 0; d < PaddedDepth(depth); d += kLanes) {
    Vector values{};
    const int64_t width = depth - d < kLanes ? depth - d : kLanes;
    if (width == kLanes) {
      values = Load(x + d);
    } else {
      for (int64_t i = 0; i < width; ++i) values[i] = x[d + i];
    }
    // With 128 added to each byte the bytes are the digits, 128 too large.
    const IntVector biased = (Round(values * factor) + 0x808080) ^ 0x808080;
    for (int i = 0; i < kDigits; ++i) {
      const Bytes digit = __builtin_convertvector(biased >> (8 * i), Bytes);
      memcpy(digits + i * stride + d, &digit, sizeof digit);
    }
  }
  return scale;
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_FIXED_POINT_H_
