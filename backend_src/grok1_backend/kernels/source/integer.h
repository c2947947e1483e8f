// Products of activations with int8 weights in integer arithmetic; see fixed_point.h.
//
// Compiled once for each instruction set that multiplies bytes. Sums are int32, exact, and so equal
// on all paths.
#ifndef GROK1_INTEGER_H_
#define GROK1_INTEGER_H_

#include "compute.h"

namespace grok1 {

// An int32 sum holds so many products of a digit and a weight.
constexpr int64_t kMaxIntegerDepth = 65536;

// The best that this CPU has; null where float32 is faster.
const Products* BestInteger();

}  // namespace grok1

#endif  // GROK1_INTEGER_H_
