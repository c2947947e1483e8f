// The arithmetic of the kernels, compiled once for each instruction set and chosen at run time.
//
// A row's result does not depend on its neighbours, to the bit: each element of a product is one
// chain of fused multiply-adds over the depth, in order, for any number of rows and on any path;
// or, with int8 weights, where the CPU multiplies bytes, a sum of integers (integer.h).
#ifndef GROK1_COMPUTE_H_
#define GROK1_COMPUTE_H_

#include <cstdint>

namespace grok1 {

constexpr int64_t kMaxStrip = 256;      // columns that one product computes at most
constexpr int64_t kMaxGroup = 240;      // rows that it takes at most
constexpr int64_t kMaxAttention = 128;  // query rows of a head that one call of `attend` takes at most

enum class Storage { kInt8, kFloat32 };
inline int64_t ItemBytes(Storage storage) { return storage == Storage::kInt8 ? 1 : 4; }

// A weight [depth, columns] where it lies in memory.
struct Matrix {
  const void* data;
  Storage storage;
  int64_t depth;
  int64_t columns;
  int64_t quad;           // in blocks, with so many rows side by side (blocks.h); 0: in rows
  const void* scales;     // [groups, columns], or null
  bool scales_bfloat16;   // or float32
  int64_t groups;         // runs of depth / groups rows that share their scales; 1 without scales
};

// One step's attention of some query rows, the same of each of some KV heads that lie side by side.
struct AttentionRows {
  const float* queries;
  float* outputs;
  const int64_t* offsets;      // [rows]: of each row of the first head in queries and in outputs
  int64_t head_stride;         // between those of one head and the next
  int64_t heads;
  const int64_t* lengths;      // [rows]: positions that the row sees, at least 1
  int64_t rows;
  const float* keys;           // the first head's first page; see the strides
  const float* values;
  const int32_t* pages;        // of the context, in order
  int64_t page_size;
  int64_t page_stride;         // between pages
  int64_t position_stride;     // between positions of a page
  int64_t size;                // of a head
  float multiplier;
  float cap;
};

// Products with weights of one kind.
struct Products {
  int64_t scratch_bytes;  // that `multiply` needs to work in

  // How many bytes `rows` rows of a depth with so many groups take as `multiply` reads them.
  int64_t (*packed_bytes)(int64_t rows, int64_t depth, int64_t groups);

  // Brings a row of x, row `row` of `rows`, to that order.
  void (*pack)(const float* x, int64_t row, int64_t rows, int64_t depth, int64_t groups,
               void* packed);

  // out[r, c] = sum over d of x[r, d] · weight[d, column + c], r below `rows` (at most kMaxGroup), c
  // below `count` (at most kMaxStrip); out has rows of `out_stride`.
  void (*multiply)(const void* packed, int64_t rows, const Matrix& weight, int64_t column,
                   int64_t count, float* out, int64_t out_stride, void* scratch);
};

struct Compute {
  Products products;  // in float32, with all weights

  // gate[i] = gelu(gate[i]) · up[i].
  void (*gate)(float* gate, const float* up, int64_t count);

  // Attention with capped logits and a running softmax over blocks of positions, and the floats that
  // it needs to work in.
  void (*attend)(const AttentionRows& rows, float* scratch);
  int64_t (*attend_scratch)(int64_t size, int64_t heads);
};

// The best one that this CPU has.
const Compute& BestCompute();
const Products& BestProducts(const Matrix& weight);

}  // namespace grok1

#endif  // GROK1_COMPUTE_H_
