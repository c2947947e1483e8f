// Products of activations with int8 weights in integer arithmetic; see fixed_point.h.
//
// Compiled once for each instruction set that multiplies bytes. The weights are read as they lie,
// [depth, columns], in blocks that are brought on the fly to the order of those instructions: four
// rows of a column side by side. Sums are int32, exact, and so equal on all paths.
#ifndef GROK1_INTEGER_H_
#define GROK1_INTEGER_H_

#include "compute.h"

namespace grok1 {

constexpr int64_t kColumnBlock = 64;  // columns that are computed together: a line of memory
// An int32 sum holds so many products of a digit and a weight.
constexpr int64_t kMaxIntegerDepth = 65536;

// Rows `start` to `start + depth` of a group of the weight, columns `column` to `column + count`.
struct IntegerPart {
  int64_t group;
  int64_t start;  // in the group; a multiple of 64
  int64_t depth;  // a multiple of 64, or up to the end of the group
  int64_t column;
  int64_t count;
};

// A part of a weight in memory.
struct WeightPart {
  const int8_t* data;
  int64_t stride;  // between rows
  int64_t depth;
  int64_t columns;
};

inline WeightPart PartOf(const Matrix& weight, const IntegerPart& part) {
  const int64_t row = part.group * (weight.depth / weight.groups) + part.start;
  const int8_t* const data = static_cast<const int8_t*>(weight.data);
  return {data + row * weight.stride + part.column, weight.stride, part.depth, part.count};
}

struct IntegerProducts {
  Products products;

  // How many sums `rows` rows by `columns` columns have.
  int64_t (*num_sums)(int64_t rows, int64_t columns);

  // The sums of a part, columns from `part.column` on, set or added to. Brings `next` to the second
  // cache meanwhile, where `fetch` should have brought this part.
  void (*add_products)(const void* packed, int64_t rows, const Matrix& weight,
                       const IntegerPart& part, const WeightPart& next, bool set, int32_t* sums,
                       void* scratch);
  void (*fetch)(const WeightPart& part);

  // One row of the product, columns from the first of the sums on, of sums in several places:
  // those of group g are sums[first[g]] to sums[first[g + 1]].
  void (*finish_row)(const void* packed, int64_t rows, int64_t row, const Matrix& weight,
                     int64_t column, int64_t count, const int32_t* const* sums,
                     const int64_t* first, float* out);
};

// The best one that this CPU has; null where float32 is faster.
const IntegerProducts* BestInteger();

}  // namespace grok1

#endif  // GROK1_INTEGER_H_
