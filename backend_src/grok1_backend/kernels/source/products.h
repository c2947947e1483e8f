// Products of a step's rows with one or several weights.
#ifndef GROK1_PRODUCTS_H_
#define GROK1_PRODUCTS_H_

#include <cstdint>
#include <vector>

#include "compute.h"
#include "parallel.h"

namespace grok1 {

struct Product {
  Matrix weight;
  float* out;  // [rows, columns]
};

// x is [rows, depth]; all weights have its depth.
void ComputeProducts(const float* x, int64_t rows, const std::vector<Product>& products,
                     Parallel& parallel);

// The widest strip of columns, of at most kMaxStrip, that gives each thread some tasks.
int64_t StripOf(int64_t columns, int64_t others, int64_t threads);
inline int64_t NumStrips(int64_t columns, int64_t strip) { return (columns + strip - 1) / strip; }

// Rows go in equal parts of at most kMaxGroup; where part `part` starts.
inline int64_t NumParts(int64_t rows) { return (rows + kMaxGroup - 1) / kMaxGroup; }
inline int64_t PartStart(int64_t rows, int64_t part) { return rows * part / NumParts(rows); }

// Some bytes, in whole cache lines.
inline int64_t WholeLines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace grok1

#endif  // GROK1_PRODUCTS_H_
