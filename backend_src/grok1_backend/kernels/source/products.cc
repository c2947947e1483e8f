#include "products.h"

#include <algorithm>

#include "workspace.h"

namespace grok1 {
namespace {

// Rows that are packed together.
struct Part {
  int64_t first;
  int64_t rows;
  char* packed;
};

bool Alike(const Matrix& a, const Matrix& b) {
  return &BestProducts(a) == &BestProducts(b) && a.groups == b.groups;
}

// Packs the rows as weights like this one take them.
std::vector<Part> PackParts(const float* x, int64_t rows, const Matrix& weight,
                            Workspace& workspace, Parallel& parallel) {
  const Products& kind = BestProducts(weight);
  std::vector<Part> parts;
  std::vector<int64_t> offsets{0};
  for (int64_t part = 0; part < NumParts(rows); ++part) {
    const int64_t first = PartStart(rows, part);
    const int64_t height = PartStart(rows, part + 1) - first;
    parts.push_back({first, height, nullptr});
    const int64_t bytes = kind.packed_bytes(height, weight.depth, weight.groups);
    offsets.push_back(offsets.back() + WholeLines(bytes));
  }
  char* const packed = workspace.AtLeast(offsets.back());
  for (size_t i = 0; i < parts.size(); ++i) parts[i].packed = packed + offsets[i];
  parallel.For(rows, [&](int64_t row) {
    const Part* part = parts.data();
    while (row >= part->first + part->rows) ++part;
    kind.pack(x + row * weight.depth, row - part->first, part->rows, weight.depth, weight.groups,
              part->packed);
  });
  return parts;
}

void Multiply(const Product* products, int64_t count, const std::vector<Part>& parts,
              Parallel& parallel) {
  struct Task {
    const Product* product;
    const Part* part;
    int64_t column;
    int64_t count;
  };
  std::vector<Task> tasks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t columns = products[i].weight.columns;
    const int64_t strip = StripOf(columns, parts.size(), parallel.threads());
    for (int64_t column = 0; column < columns; column += strip) {
      for (const Part& part : parts) {
        tasks.push_back({products + i, &part, column, std::min(strip, columns - column)});
      }
    }
  }
  parallel.For(tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    const Matrix& weight = task.product->weight;
    const Products& kind = BestProducts(weight);
    kind.multiply(task.part->packed, task.part->rows, weight, task.column, task.count,
                  task.product->out + task.part->first * weight.columns + task.column,
                  weight.columns, ThreadMemory(kind.scratch_bytes));
  });
}

}  // namespace

int64_t StripOf(int64_t columns, int64_t others, int64_t threads) {
  int64_t strip = kMaxStrip;
  while (strip > 64 && NumStrips(columns, strip) * others < 16 * threads) strip /= 2;
  return strip;
}

void ComputeProducts(const float* x, int64_t rows, const std::vector<Product>& products,
                     Parallel& parallel) {
  const Product* const end = products.data() + products.size();
  for (const Product* first = products.data(); first < end;) {
    const Matrix& weight = first->weight;
    const auto differs = [&](const Product& other) { return !Alike(weight, other.weight); };
    const int64_t count = std::find_if(first, end, differs) - first;
    Workspace workspace;
    const std::vector<Part> parts = PackParts(x, rows, weight, workspace, parallel);
    Multiply(first, count, parts, parallel);
    first += count;
  }
}

}  // namespace grok1
