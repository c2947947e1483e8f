// Sums of digits become floats.
#ifndef GROK1_COMBINE_H_
#define GROK1_COMBINE_H_

#include "blocks.h"
#include "fixed_point.h"

namespace grok1 {
namespace {

// One row's product with a block, of the sums of one group, set or added to out. Sums are
// [plane, line, 16]: `sums` is the row's first digit in the first plane; planes are `plane_sums` apart.
inline void CombineRow(const int32_t* sums, int64_t plane_sums, float scale, const float* scales,
                       int64_t count, bool set, float* out) {
  float products[kBlockColumns];
  for (int64_t c = 0; c < kBlockColumns; c += kLanes) {
    const int32_t* const from = sums + c / kPlaneColumns * plane_sums + c % kPlaneColumns;
    IntVector digits[kDigits];
    for (int i = 0; i < kDigits; ++i) memcpy(digits + i, from + i * kPlaneColumns, sizeof *digits);
    // The factors are powers of two, so that only the two sums and the conversions round.
    Vector product = __builtin_convertvector(digits[kDigits - 1], Vector);
#pragma GCC unroll 3
    for (int i = kDigits - 2; i >= 0; --i) {
      product = product * 256.0f + __builtin_convertvector(digits[i], Vector);
    }
    Store(products + c, product * scale);
  }
  for (int64_t c = 0; c < count; ++c) {
    out[c] = (set ? 0.0f : out[c]) + products[c] * scales[c];
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_COMBINE_H_
