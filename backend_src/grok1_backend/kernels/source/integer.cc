#include "integer.h"

#include "combine.h"
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

// Rows packed: lines of digits, digit i of row r in line kDigits · r + i, each group padded; then
// the scales, [rows, groups], and where weights count as unsigned what corrects a line's sums,
// [groups, lines].
struct Packed {
  int64_t lines;
  int64_t group_depth;
  int64_t stride;  // of a line
  int64_t groups;
  int8_t* digits;
  float* scales;
  int32_t* corrections;
  int64_t bytes;

  Packed(void* memory, int64_t rows, int64_t depth, int64_t groups)
      : lines(Lines(rows)),
        group_depth(depth / groups),
        stride(groups * PaddedDepth(group_depth)),
        groups(groups),
        digits(static_cast<int8_t*>(memory)),
        scales(reinterpret_cast<float*>(digits + lines * stride)),
        corrections(reinterpret_cast<int32_t*>(scales + rows * groups)),
        bytes(reinterpret_cast<int8_t*>(corrections + groups * lines) - digits) {}

  int8_t* Group(int64_t group) const { return digits + group * PaddedDepth(group_depth); }
};

int64_t PackedBytes(int64_t rows, int64_t depth, int64_t groups) {
  return Packed(nullptr, rows, depth, groups).bytes;
}

void Pack(const float* x, int64_t row, int64_t rows, int64_t depth, int64_t groups, void* to) {
  const Packed packed(to, rows, depth, groups);
  const int64_t line = row * kDigits;
  for (int64_t g = 0; g < groups; ++g) {
    int8_t* const digits = packed.Group(g) + line * packed.stride;
    packed.scales[row * groups + g] =
        ToDigits(x + g * packed.group_depth, packed.group_depth, digits, packed.stride);
    for (int64_t i = 0; i < kDigits; ++i) {
      packed.corrections[g * packed.lines + line + i] =
          Correction(digits + i * packed.stride, PaddedDepth(packed.group_depth));
    }
  }
}

// What one thread works in.
struct Scratch {
  static constexpr int64_t kRowBlock = 32;  // rows whose sums stay in the first cache
  static constexpr int64_t kBlockBytes = kMaxIntegerDepth * kBlockColumns;
  int8_t* block;
  int32_t* sums;  // [plane, lines of a block of rows, 16]
  static constexpr int64_t kBytes =
      kBlockBytes +
      kRowBlock * kDigits * kBlockColumns * static_cast<int64_t>(sizeof(int32_t));

  explicit Scratch(void* memory)
      : block(static_cast<int8_t*>(memory)),
        sums(reinterpret_cast<int32_t*>(block + kBlockBytes)) {}
};

// One group's product of all rows with a block, set or added to out. Blocks of rows are so small
// that their sums stay in the first cache; the first of them brings the weights there.
void MultiplyBlock(const Packed& packed, int64_t rows, const Matrix& weight, int64_t group,
                   int64_t column, int64_t width, const Scratch& scratch, float* out,
                   int64_t out_stride) {
  const int8_t* const block = BlockOf(weight, group, column, width, scratch.block);
  float scales[kBlockColumns];
  ReadScales(weight, group, column, width, scales);
  for (int64_t first = 0; first < rows; first += Scratch::kRowBlock) {
    const int64_t line = first * kDigits;
    const int64_t left = packed.lines - line;
    const int64_t most = Scratch::kRowBlock * kDigits;
    const int64_t lines = left < most ? left : most;
    MultiplyLines(packed.Group(group) + line * packed.stride, packed.stride, lines, block,
                  packed.group_depth, packed.corrections + group * packed.lines + line,
                  scratch.sums);
    for (int64_t r = first; r < rows && r < first + Scratch::kRowBlock; ++r) {
      CombineRow(scratch.sums + (r - first) * kDigits * kPlaneColumns, lines * kPlaneColumns,
                 packed.scales[r * packed.groups + group], scales, width, group == 0,
                 out + r * out_stride);
    }
  }
}

void Multiply(const void* x, int64_t rows, const Matrix& weight, int64_t column, int64_t count,
              float* out, int64_t out_stride, void* memory) {
  const Packed packed(const_cast<void*>(x), rows, weight.depth, weight.groups);
  const Scratch scratch(memory);
  const TileRegisters registers(packed.lines);
  for (int64_t c = 0; c < count; c += kBlockColumns) {
    const int64_t width = count - c < kBlockColumns ? count - c : kBlockColumns;
    for (int64_t g = 0; g < weight.groups; ++g) {
      MultiplyBlock(packed, rows, weight, g, column + c, width, scratch, out + c, out_stride);
    }
  }
}

}  // namespace

const Products& GROK1_COMPUTE() {
  static constexpr Products products = {Scratch::kBytes, PackedBytes, Pack, Multiply};
  return products;
}

}  // namespace grok1
