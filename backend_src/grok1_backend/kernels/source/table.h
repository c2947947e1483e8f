// Products of rows with the rows of an embedding table, both of which lie as the sums run.
#ifndef GROK1_TABLE_H_
#define GROK1_TABLE_H_

#include <cstdint>

namespace grok1 {

// An embedding table [rows, depth].
struct Table {
  const void* data;     // float32, or int8 if there are scales
  const float* scales;  // [rows], or null
  int64_t rows;
  int64_t depth;
};

// For one kind of arithmetic; compiled for each instruction set.
struct TableProduct {
  // Bytes of `rows` rows of x as `multiply` reads them, and what brings them to that order.
  int64_t (*packed_bytes)(int64_t rows, int64_t depth);
  void (*pack)(const float* x, int64_t rows, int64_t depth, void* packed);

  // out[r, v] = sum over d of x[r, d] · table[v, d], v from `first` to first + count; out has rows of
  // table.rows. A row's result does not depend on its neighbours, to the bit.
  void (*multiply)(const void* packed, int64_t rows, const Table& table, int64_t first,
                   int64_t count, float* out);
};

// The best one that this CPU has for a table.
const TableProduct& BestTableProduct(const Table& table);

}  // namespace grok1

#endif  // GROK1_TABLE_H_
