#include "integer.h"

#include "interleave.h"
#include "scales.h"
#if defined(__AMX_INT8__)
#include "tile_block.h"
#else
#include "vnni.h"
#endif

namespace grok1 {
namespace {

#if defined(__AMX_INT8__)
int64_t Lines(int64_t rows) {
  const int64_t lines = rows * kDigits;
  return lines < kTileLines ? lines : (lines + kTileLines - 1) / kTileLines * kTileLines;
}
constexpr int64_t kMaxLines = (kMaxGroup * kDigits + kTileLines - 1) / kTileLines * kTileLines;
#else
int64_t Lines(int64_t rows) { return rows * kDigits; }
constexpr int64_t kMaxLines = kMaxGroup * kDigits;
#endif

constexpr int64_t kBlockSums = kPlanes * kPlaneColumns;  // of a line and a column block

// Rows packed: lines of digits, digit i of row r in line kDigits · r + i, each group padded; then
// the scales, [rows, groups].
struct Packed {
  int64_t lines;
  int64_t group_depth;
  int64_t stride;  // of a line
  int64_t groups;
  const int8_t* digits;
  const float* scales;

  Packed(const void* packed, int64_t rows, int64_t depth, int64_t groups)
      : lines(Lines(rows)),
        group_depth(depth / groups),
        stride(groups * PaddedDepth(group_depth)),
        groups(groups),
        digits(static_cast<const int8_t*>(packed)),
        scales(reinterpret_cast<const float*>(digits + lines * stride)) {}
};

int64_t PackedBytes(int64_t rows, int64_t depth, int64_t groups) {
  const Packed packed(nullptr, rows, depth, groups);
  return packed.lines * packed.stride + rows * groups * static_cast<int64_t>(sizeof(float));
}

void Pack(const float* x, int64_t row, int64_t rows, int64_t depth, int64_t groups, void* to) {
  const Packed packed(to, rows, depth, groups);
  int8_t* const digits = const_cast<int8_t*>(packed.digits) + row * kDigits * packed.stride;
  float* const scales = const_cast<float*>(packed.scales) + row * groups;
  for (int64_t g = 0; g < groups; ++g) {
    scales[g] = ToDigits(x + g * packed.group_depth, packed.group_depth,
                         digits + g * PaddedDepth(packed.group_depth), packed.stride);
  }
}

int64_t NumSums(int64_t rows, int64_t columns) {
  return (columns + kColumnBlock - 1) / kColumnBlock * kBlockSums * Lines(rows);
}

constexpr int64_t kPlanesBytes = kMaxPartDepth * kColumnBlock;
constexpr int64_t kScratchBytes = kPlanesBytes + kMaxLines * static_cast<int64_t>(sizeof(int32_t));

void Fetch(const WeightPart& part) { FetchAhead(part).Fetch(part.depth * part.columns); }

void AddProducts(const void* x, int64_t rows, const Matrix& weight, const IntegerPart& part,
                 const WeightPart& next, bool set, int32_t* sums, void* scratch) {
  const Packed packed(x, rows, weight.depth, weight.groups);
  const int8_t* const digits =
      packed.digits + part.group * PaddedDepth(packed.group_depth) + part.start;
  const int64_t padded = PaddedDepth(part.depth);
  int8_t* const planes = static_cast<int8_t*>(scratch);
#if defined(__AMX_INT8__)
  const TileRegisters registers(packed.lines);
#else
  int32_t* const corrections = reinterpret_cast<int32_t*>(planes + kPlanesBytes);
  for (int64_t line = 0; line < packed.lines; ++line) {
    corrections[line] = Correction(digits + line * packed.stride, padded);
  }
#endif
  const WeightPart here = PartOf(weight, part);
  FetchAhead ahead(next);
  for (int64_t c = 0; c < part.count; c += kColumnBlock) {
    const int64_t width = part.count - c < kColumnBlock ? part.count - c : kColumnBlock;
    int32_t* const to = sums + c / kColumnBlock * kBlockSums * packed.lines;
    Interleave(here.data + c, here.stride, part.depth, width, kFlip, ahead, planes);
#if defined(__AMX_INT8__)
    TileBlock(digits, packed.stride, packed.lines, planes, padded, set, ahead, to);
#else
    DotBlock(digits, packed.stride, packed.lines, planes, padded, corrections, set, ahead,
             to);
#endif
  }
  ahead.Fetch(next.depth * next.columns);
}

// One row's float product with a column block, of the sums of one group: [64] in order of columns.
void Combine(const int32_t* const* sums, int64_t num_sums, int64_t offset, int64_t lines,
             float scale, float* out) {
  for (int plane = 0; plane < kPlanes; ++plane) {
    float products[kPlaneColumns];
    for (int c = 0; c < kPlaneColumns; c += kLanes) {
      IntVector digits[kDigits] = {};
      for (int64_t i = 0; i < num_sums; ++i) {
        const int32_t* const from = sums[i] + offset + plane * lines * kPlaneColumns + c;
        for (int digit = 0; digit < kDigits; ++digit) {
          IntVector part;
          memcpy(&part, from + digit * kPlaneColumns, sizeof part);
          digits[digit] += part;
        }
      }
      // The factors are powers of two, so that only the two sums and the conversions round.
      Vector product = __builtin_convertvector(digits[kDigits - 1], Vector);
      for (int digit = kDigits - 2; digit >= 0; --digit) {
        product = product * 256.0f + __builtin_convertvector(digits[digit], Vector);
      }
      Store(products + c, product * scale);
    }
    for (int quarter = 0; quarter < 4; ++quarter) {
      memcpy(out + quarter * kPlaneColumns + plane * 4, products + quarter * 4, 4 * sizeof(float));
    }
  }
}

// out[c] (+)= products[c] · scales[c].
void Scale(const float* products, const float* scales, int64_t count, bool set, float* out) {
  for (int64_t c = 0; c < count; ++c) {
    const float product = products[c] * scales[c];
    out[c] = set ? product : out[c] + product;
  }
}

void FinishRow(const void* x, int64_t rows, int64_t row, const Matrix& weight, int64_t column,
               int64_t count, const int32_t* const* sums, const int64_t* first, float* out) {
  const Packed packed(x, rows, weight.depth, weight.groups);
  for (int64_t c = 0; c < count; c += kColumnBlock) {
    const int64_t width = count - c < kColumnBlock ? count - c : kColumnBlock;
    const int64_t offset =
        c / kColumnBlock * kBlockSums * packed.lines + row * kDigits * kPlaneColumns;
    for (int64_t g = 0; g < weight.groups; ++g) {
      float products[kColumnBlock], scales[kColumnBlock];
      Combine(sums + first[g], first[g + 1] - first[g], offset, packed.lines,
              packed.scales[row * packed.groups + g], products);
      ReadScales(weight, g, column + c, width, scales);
      Scale(products, scales, width, g == 0, out + c);
    }
  }
}

void Multiply(const void* x, int64_t rows, const Matrix& weight, int64_t column, int64_t count,
              float* out, int64_t out_stride, void* scratch) {
  const Packed packed(x, rows, weight.depth, weight.groups);
  int32_t* const sums = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + kScratchBytes);
  for (int64_t c = 0; c < count; c += kColumnBlock) {
    const int64_t width = count - c < kColumnBlock ? count - c : kColumnBlock;
    for (int64_t g = 0; g < weight.groups; ++g) {
      for (int64_t start = 0; start < packed.group_depth; start += kMaxPartDepth) {
        const int64_t left = packed.group_depth - start;
        const int64_t depth = left < kMaxPartDepth ? left : kMaxPartDepth;
        const IntegerPart part{g, start, depth, column + c, width};
        const int64_t right = count - c - width < kColumnBlock ? count - c - width : kColumnBlock;
        const IntegerPart next{g, start, right > 0 ? depth : 0, column + c + width, right};
        AddProducts(x, rows, weight, part, PartOf(weight, next), start == 0, sums, scratch);
      }
      float products[kColumnBlock], scales[kColumnBlock];
      ReadScales(weight, g, column + c, width, scales);
      for (int64_t r = 0; r < rows; ++r) {
        Combine(&sums, 1, r * kDigits * kPlaneColumns, packed.lines,
                packed.scales[r * packed.groups + g], products);
        Scale(products, scales, width, g == 0, out + r * out_stride + c);
      }
    }
  }
}

}  // namespace

const IntegerProducts& GROK1_COMPUTE() {
  static constexpr IntegerProducts integer = {
      {kScratchBytes + kBlockSums * kMaxLines * static_cast<int64_t>(sizeof(int32_t)), PackedBytes,
       Pack, Multiply},
      NumSums, AddProducts, Fetch, FinishRow};
  return integer;
}

}  // namespace grok1
