#include "integer.h"

#include "combine.h"
#include "interleave.h"
#include "scales.h"
#if defined(__AMX_INT8__)
#include "tile_block.h"
#else
#include "vnni.h"
#endif

namespace grok1 {
namespace {

// How many lines the digits of some rows take: tiles are filled up beyond the first.
int64_t Lines(int64_t rows) {
  const int64_t lines = rows * kDigits;
  return lines < kTileLines ? lines : (lines + kTileLines - 1) / kTileLines * kTileLines;
}

constexpr int64_t kRowBlock = 32;  // rows of a block whose sums stay in the first cache
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

  const int8_t* Group(int64_t group) const { return digits + group * PaddedDepth(group_depth); }
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

// What one thread works in.
struct Scratch {
  static constexpr int64_t kPlanesBytes = kMaxIntegerDepth * kColumnBlock;
  static constexpr int64_t kMaxLines = kMaxGroup * kDigits;
  int8_t* planes;        // of a column block
  int32_t* corrections;  // of each line
  int32_t* sums;         // of a block of rows and a column block
  static constexpr int64_t kBytes =
      kPlanesBytes + kMaxLines * static_cast<int64_t>(sizeof(int32_t)) +
      kRowBlock * kDigits * kBlockSums * static_cast<int64_t>(sizeof(int32_t));

  explicit Scratch(void* memory)
      : planes(static_cast<int8_t*>(memory)),
        corrections(reinterpret_cast<int32_t*>(planes + kPlanesBytes)),
        sums(corrections + kMaxLines) {}
};

#if defined(__AMX_INT8__)

void Correct(const int8_t*, int64_t, int64_t, int64_t, int32_t*) {}

void AddBlock(const int8_t* digits, int64_t stride, int64_t lines, const int8_t* planes,
              int64_t depth, const int32_t*, bool set, FetchAhead& ahead, int32_t* sums) {
  TileBlock(digits, stride, lines, planes, depth, set, ahead, sums);
}

#else

void Correct(const int8_t* digits, int64_t stride, int64_t lines, int64_t depth,
             int32_t* corrections) {
  for (int64_t i = 0; i < lines; ++i) corrections[i] = Correction(digits + i * stride, depth);
}

constexpr auto& AddBlock = DotBlock;

struct TileRegisters {
  explicit TileRegisters(int64_t) {}
};

#endif

void Fetch(const WeightPart& part) { FetchAhead(part).Fetch(part.depth * part.columns); }

void AddProducts(const void* x, int64_t rows, const Matrix& weight, const IntegerPart& part,
                 const WeightPart& next, bool set, int32_t* sums, void* memory) {
  const Packed packed(x, rows, weight.depth, weight.groups);
  const Scratch scratch(memory);
  const TileRegisters registers(packed.lines);
  const int8_t* const digits = packed.Group(part.group) + part.start;
  const int64_t padded = PaddedDepth(part.depth);
  Correct(digits, packed.stride, packed.lines, padded, scratch.corrections);
  const WeightPart here = PartOf(weight, part);
  FetchAhead ahead(next);
  for (int64_t c = 0; c < part.count; c += kColumnBlock) {
    const int64_t width = part.count - c < kColumnBlock ? part.count - c : kColumnBlock;
    Interleave(here.data + c, here.stride, part.depth, width, kFlip, ahead, scratch.planes);
    AddBlock(digits, packed.stride, packed.lines, scratch.planes, padded, scratch.corrections, set,
             ahead, sums + c / kColumnBlock * kBlockSums * packed.lines);
  }
  ahead.Fetch(next.depth * next.columns);
}

void FinishRow(const void* x, int64_t rows, int64_t row, const Matrix& weight, int64_t column,
               int64_t count, const int32_t* const* sums, const int64_t* first, float* out) {
  const Packed packed(x, rows, weight.depth, weight.groups);
  for (int64_t c = 0; c < count; c += kColumnBlock) {
    const int64_t width = count - c < kColumnBlock ? count - c : kColumnBlock;
    const int64_t offset =
        c / kColumnBlock * kBlockSums * packed.lines + row * kDigits * kPlaneColumns;
    for (int64_t g = 0; g < weight.groups; ++g) {
      float scales[kColumnBlock];
      ReadScales(weight, g, column + c, width, scales);
      CombineRow(sums + first[g], first[g + 1] - first[g], offset, packed.lines,
                 packed.scales[row * packed.groups + g], scales, width, g == 0, out + c);
    }
  }
}

// One group's product of all rows with a column block, set or added to out. The weights are brought
// to their order once; blocks of rows are so small that their sums stay in the first cache.
void MultiplyBlock(const Packed& packed, int64_t rows, const Matrix& weight,
                   const IntegerPart& part, const WeightPart& next, const Scratch& scratch,
                   float* out, int64_t out_stride) {
  const int8_t* const digits = packed.Group(part.group);
  const int64_t padded = PaddedDepth(part.depth);
  const WeightPart here = PartOf(weight, part);
  FetchAhead ahead(next);
  Interleave(here.data, here.stride, part.depth, part.count, kFlip, ahead, scratch.planes);
  Correct(digits, packed.stride, packed.lines, padded, scratch.corrections);
  float scales[kColumnBlock];
  ReadScales(weight, part.group, part.column, part.count, scales);
  for (int64_t first = 0; first < rows; first += kRowBlock) {
    const int64_t left = packed.lines - first * kDigits;
    const int64_t lines = left < kRowBlock * kDigits ? left : kRowBlock * kDigits;
    for (int64_t d = 0; d < padded; d += kDepthBlock) {
      const int64_t depth = padded - d < kDepthBlock ? padded - d : kDepthBlock;
      AddBlock(digits + first * kDigits * packed.stride + d, packed.stride, lines,
               scratch.planes + d * kColumnBlock, depth, scratch.corrections + first * kDigits,
               d == 0, ahead, scratch.sums);
    }
    for (int64_t r = first; r < rows && r < first + kRowBlock; ++r) {
      CombineRow(&scratch.sums, 1, (r - first) * kDigits * kPlaneColumns, lines,
                 packed.scales[r * packed.groups + part.group], scales, part.count,
                 part.group == 0, out + r * out_stride);
    }
  }
}

void Multiply(const void* x, int64_t rows, const Matrix& weight, int64_t column, int64_t count,
              float* out, int64_t out_stride, void* memory) {
  const Packed packed(x, rows, weight.depth, weight.groups);
  const Scratch scratch(memory);
  const TileRegisters registers(packed.lines);
  const int64_t depth = packed.group_depth;
  for (int64_t c = 0; c < count; c += kColumnBlock) {
    const int64_t left = count - c;
    const int64_t width = left < kColumnBlock ? left : kColumnBlock;
    const int64_t right = left - width < kColumnBlock ? left - width : kColumnBlock;
    for (int64_t g = 0; g < weight.groups; ++g) {
      const WeightPart next = PartOf(weight, {g, 0, right ? depth : 0, column + c + width, right});
      MultiplyBlock(packed, rows, weight, {g, 0, depth, column + c, width}, next, scratch, out + c,
                    out_stride);
    }
  }
}

}  // namespace

const IntegerProducts& GROK1_COMPUTE() {
  static constexpr IntegerProducts integer = {
      {Scratch::kBytes, PackedBytes, Pack, Multiply}, NumSums, AddProducts, Fetch, FinishRow};
  return integer;
}

}  // namespace grok1
