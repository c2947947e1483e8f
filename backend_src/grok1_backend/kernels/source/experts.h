// The chosen experts of a step's rows, grouped: an expert's weights serve all rows that chose it.
#ifndef GROK1_EXPERTS_H_
#define GROK1_EXPERTS_H_

#include <cstdint>

#include "compute.h"
#include "parallel.h"

namespace grok1 {

// The matrices of one kind of all layers and experts: [layers, experts, depth, columns].
struct Stack {
  Matrix first;         // of the chosen layer's first expert
  int64_t scale_bytes;  // of a scale; 0 without scales

  Matrix At(int64_t index) const {
    Matrix matrix = first;
    matrix.data = static_cast<const char*>(matrix.data) + index * Bytes();
    if (matrix.scales) {
      const int64_t scales = matrix.groups * matrix.columns * scale_bytes;
      matrix.scales = static_cast<const char*>(matrix.scales) + index * scales;
    }
    return matrix;
  }

  int64_t Bytes() const { return first.depth * first.columns * ItemBytes(first.storage); }
};

// What one call computes; see the handler for the shapes.
struct ExpertStep {
  const float* x;
  const int32_t* experts;
  const float* gates;
  const bool* valid;
  int64_t rows;
  int64_t selected;
  int64_t num_experts;
  Stack linear;
  Stack linear_v;
  Stack linear_1;
  float* out;
};

// What was done since the library was loaded; tests read it.
struct Counters {
  int64_t expert_rows;   // (row, expert) pairs computed
  int64_t weight_bytes;  // of expert weights read, scales not counted
};
Counters ReadCounters();

void ComputeExperts(const ExpertStep& step, Parallel& parallel);

}  // namespace grok1

#endif  // GROK1_EXPERTS_H_
