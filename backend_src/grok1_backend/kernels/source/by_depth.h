// Products of few rows with int8 weights, where the time is that of reading the weights.
//
// Memory gives most to threads that each read one long run, so a weight is cut along its depth, not
// its columns. The sums of several runs are integers: whichever thread adds them to which place, the
// product is the same to the bit.
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
  // Sums that a thread may add to when no other does.
  struct Place {
    std::atomic<bool> busy{false};
    bool empty = true;
    int32_t* sums = nullptr;
  };
  // A strip of columns of a group of a product, whose sums are those of all its places.
  struct Strip {
    int64_t product;
    int64_t group;
    int64_t column;
    int64_t count;
  };
  // A run of rows of a strip.
  struct Task {
    int64_t strip;
    int64_t start;
    int64_t depth;
  };

  std::vector<Task> Cut(int64_t threads);
  void Allocate();
  void Add(const Task& task);

  const IntegerProducts& integer_;
  std::vector<PackedProduct> products_;
  std::vector<Strip> strips_;         // of a product: by column, then group
  std::vector<int64_t> first_strip_;  // of each product, and the end
  int64_t places_each_ = 0;           // of a strip
  std::vector<Place> places_;
  Workspace workspace_;
};

}  // namespace grok1

#endif  // GROK1_BY_DEPTH_H_
