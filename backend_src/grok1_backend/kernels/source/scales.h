// The scales of int8 weights.
#ifndef GROK1_SCALES_H_
#define GROK1_SCALES_H_

#include <cstdint>
#include <cstring>

#include "compute.h"

namespace grok1 {
namespace {

// Those of a group of rows, columns `column`... as floats; 1 for a weight without scales.
inline void ReadScales(const Matrix& weight, int64_t group, int64_t column, int64_t count,
                       float* to) {
  const int64_t first = group * weight.columns + column;
  for (int64_t c = 0; c < count; ++c) {
    if (!weight.scales) {
      to[c] = 1.0f;
    } else if (weight.scales_bfloat16) {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(weight.scales)[first + c]} << 16;
      memcpy(to + c, &bits, sizeof bits);
    } else {
      to[c] = static_cast<const float*>(weight.scales)[first + c];
    }
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_SCALES_H_
