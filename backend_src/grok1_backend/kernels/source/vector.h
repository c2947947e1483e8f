// A vector of floats of the instruction set that the file is compiled for.
//
// Only what no compiler finds by itself is written with intrinsics. Nothing from the standard
// library is used here or in compute.cc: an inline function compiled for one instruction set could
// be the copy that the linker keeps for all of them.
#ifndef GROK1_VECTOR_H_
#define GROK1_VECTOR_H_

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace grok1 {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxRows = 12;  // rows of a product that fit in the registers beside two vectors
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;
#else
constexpr int kLanes = 4;
constexpr int kMaxRows = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVector __attribute__((vector_size(4 * kLanes)));

inline Vector Load(const float* from) {
  Vector v;
  memcpy(&v, from, sizeof v);
  return v;
}

inline Vector Load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  Vector v;
  for (int i = 0; i < kLanes; ++i) v[i] = from[i];
  return v;
#endif
}

inline void Store(float* to, Vector v) { memcpy(to, &v, sizeof v); }

inline Vector Splat(float x) { return x - Vector{}; }

inline Vector Max(Vector a, Vector b) { return a > b ? a : b; }
inline Vector Min(Vector a, Vector b) { return a < b ? a : b; }

// exp with an error below 2 units in the last place; the argument is held to ±87.
inline Vector Exp(Vector x) {
  x = Min(Max(x, Splat(-87.0f)), Splat(87.0f));
  // x = n·ln 2 + r: adding and taking off 1.5·2²³ rounds to the nearest integer.
  const Vector magic = Splat(12582912.0f);
  const Vector shifted = x * 1.44269504f + magic;
  const Vector n = shifted - magic;
  Vector r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = Splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const IntVector exponent = (((IntVector)shifted) - 0x4B400000) << 23;
  return (Vector)((IntVector)p + exponent);
}

// Near 0 by its series, so that small values keep their relative precision.
inline Vector Tanh(Vector x) {
  const Vector square = x * x;
  Vector p = Splat(62.0f / 2835);
  p = Splat(-1382.0f / 155925) * square + p;
  p = p * square - 17.0f / 315;
  p = p * square + 2.0f / 15;
  p = p * square - 1.0f / 3;
  const Vector near = x + x * square * p;
  const Vector far = 1.0f - 2.0f / (Exp(2.0f * x) + 1.0f);
  const Vector size = Max(x, -x);
  return size < 0.25f ? near : far;
}

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2, as jax.nn.gelu.
inline Vector Gelu(Vector x) {
  const Vector inner = x + 0.044715f * x * x * x;
  return x / (1.0f + Exp(-1.59576912f * inner));
}

inline float Sum(Vector v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

inline float Largest(Vector v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// The first (kHigh 0) or second half of a0 b0 a1 b1 ...
template <int kHigh>
inline Vector Interleave(Vector a, Vector b) {
#if defined(__AVX512F__)
  const __m512i index =
      kHigh ? _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8)
            : _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Vector)_mm512_permutex2var_ps((__m512)a, index, (__m512)b);
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b);
  const __m256 high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  return (Vector)_mm256_permute2f128_ps(low, high, kHigh ? 0x31 : 0x20);
#else
  Vector v;
  for (int i = 0; i < kLanes / 2; ++i) {
    v[2 * i] = a[i + kHigh * kLanes / 2];
    v[2 * i + 1] = b[i + kHigh * kLanes / 2];
  }
  return v;
#endif
}

// to[i, j] = from[j][column + i], kLanes × kLanes.
inline void TransposeTile(const float* const* from, int64_t column, float* to, int64_t to_stride) {
  Vector a[kLanes];
  Vector b[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) a[i] = Load(from[i] + column);
  // Each stage interleaves row i with row i + kLanes / 2: a rotation of the bits of an element's
  // address by one, and as many stages as an index has bits swap rows with columns.
#pragma GCC unroll 4
  for (int width = 1; width < kLanes; width *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      b[2 * i] = Interleave<0>(a[i], a[i + kLanes / 2]);
      b[2 * i + 1] = Interleave<1>(a[i], a[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) Store(to + i * to_stride, a[i]);
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_VECTOR_H_
