// Products of few rows with int8 weights, where the time is that of reading the weights.
//
// Memory gives most to threads that each read long runs, one after the other without a pause. So a
// weight is cut along its depth, not its columns, and a thread that computes one part fetches the
// next. The sums of several threads are integers: whichever computes a part, the product is the
// same to the bit.
#ifndef GROK1_BY_DEPTH_H_
#define GROK1_BY_DEPTH_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "integer.h"
#include "parallel.h"
#include "workspace.h"

namespace grok1 {

struct PackedProduct {
  const void* packed;  // rows
  int64_t rows;
  Matrix weight;
};

class ProductsByDepth {
 public:
  // Whether products of at most `rows` rows are faster this way.
  static bool Fits(const Matrix& weight, int64_t rows);

  // Computes the sums; what is packed must stay as it is until the last FinishRow.
  ProductsByDepth(std::vector<PackedProduct> products, Parallel& parallel);

  // A row of product `product`: all columns.
  void FinishRow(int64_t product, int64_t row, float* out) const;

 private:
  // A strip of columns of a group of a product; each worker has sums of its own for it.
  struct Strip {
    int64_t product;
    int64_t group;
    int64_t column;
    int64_t count;
  };
  // Some rows of a strip.
  struct Task {
    int64_t strip;
    int64_t start;
    int64_t depth;
  };

  void Cut();
  void Allocate();
  void Work(int64_t worker);
  IntegerPart PartOfTask(const Task& task) const;
  WeightPart Weights(int64_t task) const;

  const IntegerProducts& integer_;
  const int64_t workers_;
  const std::vector<PackedProduct> products_;
  std::vector<Strip> strips_;         // of a product: by column, then group
  std::vector<int64_t> first_strip_;  // of each product, and the end
  std::vector<Task> tasks_;
  std::atomic<int64_t> next_task_{0};
  std::vector<int32_t*> sums_;        // [strips, workers]
  std::vector<char> filled_;          // [strips, workers]: whether the sums are set
  Workspace workspace_;
};

}  // namespace grok1

#endif  // GROK1_BY_DEPTH_H_
