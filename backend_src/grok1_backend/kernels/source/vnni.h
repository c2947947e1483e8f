// Sums of byte products in vector registers (VNNI).
//
// The instruction multiplies unsigned with signed bytes: 128 is added to the weights, and the sums
// begin with what takes that off again.
#ifndef GROK1_VNNI_H_
#define GROK1_VNNI_H_

#include <immintrin.h>

#include "combine.h"

namespace grok1 {
namespace {

constexpr int64_t kTileLines = 1;  // lines come in any number

#if defined(__AVX512VNNI__)
typedef __m512i Bytes;
constexpr int kDotLines = 4 * kDigits;  // lines whose sums fit in the registers
inline Bytes LoadBytes(const void* from) { return _mm512_loadu_si512(from); }
inline void StoreBytes(void* to, Bytes v) { _mm512_storeu_si512(to, v); }
inline Bytes SplatBytes(int8_t x) { return _mm512_set1_epi8(x); }
inline Bytes SplatInt(int32_t x) { return _mm512_set1_epi32(x); }
inline Bytes AddDot(Bytes sum, Bytes weights, Bytes digits) {
  return _mm512_dpbusd_epi32(sum, weights, digits);
}
#else
typedef __m256i Bytes;
constexpr int kDotLines = kDigits;
inline Bytes LoadBytes(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline void StoreBytes(void* to, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }
inline Bytes SplatBytes(int8_t x) { return _mm256_set1_epi8(x); }
inline Bytes SplatInt(int32_t x) { return _mm256_set1_epi32(x); }
inline Bytes AddDot(Bytes sum, Bytes weights, Bytes digits) {
  return _mm256_dpbusd_avx_epi32(sum, weights, digits);
}
#endif

constexpr int kVectors = kPlanes * kLineBytes / sizeof(Bytes);  // of a quad's columns

// The tile registers are another path's.
struct TileRegisters {
  explicit TileRegisters(int64_t) {}
};

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

// kLines lines by a block. kAhead: the weights come from memory, and what follows them is brought
// to the second cache.
template <int kLines, bool kAhead>
void DotLines(const int8_t* digits, int64_t stride, const int8_t* block, int64_t depth,
              const int32_t* corrections, int32_t* sums, int64_t plane_sums) {
  Bytes sum[kLines][kVectors];
#pragma GCC unroll 12
  for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[line][v] = SplatInt(corrections[line]);
  }
  const int64_t quads = Quads(depth);
  for (int64_t first = 0; first < quads; first += kRunQuads, block += kRunBytes) {
    const int64_t of_run = QuadsOfRun(first, quads);
    for (int64_t q = 0; q < of_run; ++q) {
      if (kAhead) {
        __builtin_prefetch(block + kRunBytes + 2 * q * kLineBytes, 0, 2);
        __builtin_prefetch(block + kRunBytes + (2 * q + 1) * kLineBytes, 0, 2);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        constexpr int kInPlane = kVectors / kPlanes;
        const int64_t line = v / kInPlane * of_run + q;
        const int64_t place = v % kInPlane * sizeof(Bytes);
        const Bytes w = LoadBytes(block + line * kLineBytes + place) ^ SplatBytes(-128);
#pragma GCC unroll 12
        for (int i = 0; i < kLines; ++i) {
          int32_t four;
          memcpy(&four, digits + i * stride + (first + q) * kQuad, sizeof four);
          sum[i][v] = AddDot(sum[i][v], w, SplatInt(four));
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = v * sizeof(Bytes) / kQuad;
      StoreBytes(sums + column / kPlaneColumns * plane_sums + line * kPlaneColumns +
                     column % kPlaneColumns,
                 sum[line][v]);
    }
  }
}

// The sums of all lines with a block, [plane, line, 16].
inline void MultiplyLines(const int8_t* digits, int64_t stride, int64_t lines, const int8_t* block,
                          int64_t depth, const int32_t* corrections, int32_t* sums) {
  const int64_t plane_sums = lines * kPlaneColumns;
  int64_t line = 0;
  const auto dot = [&](const auto& kernel, int64_t count) {
    kernel(digits + line * stride, stride, block, depth, corrections + line,
           sums + line * kPlaneColumns, plane_sums);
    line += count;
  };
  if (lines >= kDotLines) {
    dot(DotLines<kDotLines, true>, kDotLines);
  } else {
    dot(DotLines<kDigits, true>, kDigits);
  }
  while (line + kDotLines <= lines) dot(DotLines<kDotLines, false>, kDotLines);
  while (line < lines) dot(DotLines<kDigits, false>, kDigits);
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_VNNI_H_
