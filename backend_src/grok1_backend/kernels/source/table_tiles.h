// What the products with a table share: sums over the lanes of many vectors, and reading ahead.
#ifndef GROK1_TABLE_TILES_H_
#define GROK1_TABLE_TILES_H_

#include "vector.h"

namespace grok1 {
namespace {

// Lane i of the result is the sum of the lanes of a[i], added in one order; a is overwritten.
template <int kCount = kLanes, typename Lanes>
inline Lanes SumEach(Lanes* a) {
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      const Vector first = (Vector)a[i], second = (Vector)a[i + kHalf];
      a[i] = (Lanes)Interleave<0>(first, second) + (Lanes)Interleave<1>(first, second);
    }
    return SumEach<kHalf>(a);
  } else {
    return a[0];
  }
}

// Brings the memory behind a block of the table to the cache, a few lines with each step of the
// computation with the block, so that reading never stops.
class Ahead {
 public:
  Ahead(const void* from, int64_t bytes, int64_t steps)
      : next_(static_cast<const char*>(from)), lines_((bytes / kLine + steps - 1) / steps) {}

  void Step() {
    for (int64_t i = 0; i < lines_; ++i, next_ += kLine) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int kLine = 64;
  const char* next_;
  int64_t lines_;
};

}  // namespace
}  // namespace grok1

#endif  // GROK1_TABLE_TILES_H_
