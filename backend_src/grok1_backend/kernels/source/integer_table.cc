// Products with an int8 table in integer arithmetic; see fixed_point.h. Sums are exact, so that
// they are equal on all paths, whatever the rows.
#include "fixed_point.h"
#include "table.h"
#include "table_tiles.h"
#if defined(__AMX_INT8__)
#include "amx.h"
#endif

namespace grok1 {
namespace {

constexpr int64_t kStep = kDigitRun;  // of the depth

#if defined(__AMX_INT8__)
constexpr int64_t kTilesFrom = 4;  // rows, from which on tiles are faster
bool UsesTiles(int64_t rows, int64_t depth) { return rows >= kTilesFrom && depth % kStep == 0; }
#else
constexpr int64_t kTileLines = 16;
constexpr int64_t kTileBytes = 1024;
bool UsesTiles(int64_t, int64_t) { return false; }
#endif

int64_t RoundUp(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Rows packed. All rows in lines of digits; for tiles the same again in their order.
struct Packed {
  int64_t stride;       // of a digit's line
  int8_t* digits;       // [rows, kDigits, stride]
  int8_t* tiles;        // [rows / 16, depth / 64, kDigits, depth 16, rows 16, depth 4]
  float* scales;        // [rows, up to a multiple of 16]
  int32_t* corrections;  // [rows, kDigits]: -128 · the sum of the digits
  int64_t bytes;

  Packed(void* memory, int64_t rows, int64_t depth) : stride(PaddedDepth(depth)) {
    const int64_t padded = RoundUp(rows, kTileLines);
    digits = static_cast<int8_t*>(memory);
    tiles = digits + rows * kDigits * stride;
    int8_t* const after = tiles + (UsesTiles(rows, depth) ? padded * kDigits * stride : 0);
    scales = reinterpret_cast<float*>(after);
    corrections = reinterpret_cast<int32_t*>(scales + padded);
    bytes = reinterpret_cast<int8_t*>(corrections + rows * kDigits) - digits;
  }
};

int64_t PackedBytes(int64_t rows, int64_t depth) { return Packed(nullptr, rows, depth).bytes; }

void PackTiles(int64_t rows, int64_t depth, const Packed& packed) {
  const int64_t groups = RoundUp(rows, kTileLines) / kTileLines;
  memset(packed.tiles, 0, groups * kTileLines * kDigits * depth);
  for (int64_t r = 0; r < rows; ++r) {
    int8_t* const group = packed.tiles + r / kTileLines * kTileLines * kDigits * depth;
    for (int64_t i = 0; i < kDigits; ++i) {
      const int8_t* const line = packed.digits + (r * kDigits + i) * packed.stride;
      for (int64_t d = 0; d < depth; d += 4) {
        int8_t* const tile = group + (d / kStep * kDigits + i) * kTileBytes;
        memcpy(tile + d % kStep * kTileLines + r % kTileLines * 4, line + d, 4);
      }
    }
  }
}

void Pack(const float* x, int64_t rows, int64_t depth, void* to) {
  const Packed packed(to, rows, depth);
  for (int64_t r = 0; r < RoundUp(rows, kTileLines); ++r) packed.scales[r] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    int8_t* const digits = packed.digits + r * kDigits * packed.stride;
    packed.scales[r] = ToDigits(x + r * depth, depth, digits, packed.stride);
    for (int64_t i = 0; i < kDigits; ++i) {
      int32_t sum = 0;
      for (int64_t d = 0; d < packed.stride; ++d) sum += digits[i * packed.stride + d];
      packed.corrections[r * kDigits + i] = -128 * sum;
    }
  }
  if (UsesTiles(rows, depth)) PackTiles(rows, depth, packed);
}

// The sums of the three digits as one number, in units of the row's scale.
inline Vector Combine(IntVector low, IntVector middle, IntVector high) {
  const Vector sum = __builtin_convertvector(high, Vector) * 256.0f +
                     __builtin_convertvector(middle, Vector);
  return sum * 256.0f + __builtin_convertvector(low, Vector);
}

constexpr int kDotRows = 2;
constexpr int kDotColumns = 4;
constexpr __mmask64 kAll = ~__mmask64{0};

// kRows rows by kDotColumns rows of the table, in vector registers. The instruction multiplies
// unsigned with signed bytes: the table's are made 128 too large, and the corrections take it off.
template <int kRows>
void Dots(const Packed& packed, int64_t row, const int8_t* const* columns, int64_t depth,
          const float* scales, float* out, int64_t out_stride, int64_t width, Ahead& ahead) {
  const __m512i flip = _mm512_set1_epi8(-128);
  const int8_t* const digits = packed.digits + row * kDigits * packed.stride;
  __m512i sum[kRows * kLanes] = {};
  for (int64_t d = 0; d < depth; d += kStep) {
    ahead.Step();
    const __mmask64 mask = depth - d < kStep ? kAll >> (kStep - (depth - d)) : kAll;
    __m512i xs[kRows * kDigits];
#pragma GCC unroll 6
    for (int i = 0; i < kRows * kDigits; ++i) {
      xs[i] = _mm512_loadu_si512(digits + i * packed.stride + d);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kDotColumns; ++c) {
      const __m512i w = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, columns[c] + d), flip);
#pragma GCC unroll 6
      for (int i = 0; i < kRows * kDigits; ++i) {
        __m512i& to = sum[i / kDigits * kLanes + i % kDigits * kDotColumns + c];
        to = _mm512_dpbusd_epi32(to, w, xs[i]);
      }
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < kRows; ++m) {
    IntVector lanes[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) lanes[i] = (IntVector)sum[m * kLanes + i];
    const IntVector total = SumEach(lanes);
    IntVector digit[kDigits] = {};
    for (int i = 0; i < kDigits; ++i) {
      const int32_t correction = packed.corrections[(row + m) * kDigits + i];
      for (int c = 0; c < kDotColumns; ++c) digit[i][c] = total[i * kDotColumns + c] + correction;
    }
    const Vector product = Combine(digit[0], digit[1], digit[2]) * packed.scales[row + m];
    for (int64_t c = 0; c < width; ++c) out[m * out_stride + c] = product[c] * scales[c];
  }
}

void MultiplyDots(const Packed& packed, int64_t rows, const Table& table, int64_t first,
                  int64_t count, float* out) {
  const int64_t depth = table.depth;
  const int8_t* const data = static_cast<const int8_t*>(table.data) + first * depth;
  const int64_t steps = packed.stride / kStep * ((rows + kDotRows - 1) / kDotRows);
  for (int64_t c = 0; c < count; c += kDotColumns) {
    const int64_t width = count - c < kDotColumns ? count - c : kDotColumns;
    const int8_t* columns[kDotColumns];
    for (int64_t i = 0; i < kDotColumns; ++i) columns[i] = data + (c + (i < width ? i : 0)) * depth;
    Ahead ahead(data + (c + 2 * kDotColumns) * depth, kDotColumns * depth, steps);
    const float* const scales = table.scales + first + c;
    for (int64_t row = 0; row < rows; row += kDotRows) {
      float* const to = out + row * table.rows + first + c;
      if (rows - row >= kDotRows) {
        Dots<kDotRows>(packed, row, columns, depth, scales, to, table.rows, width, ahead);
      } else {
        Dots<1>(packed, row, columns, depth, scales, to, table.rows, width, ahead);
      }
    }
  }
}

#if defined(__AMX_INT8__)

constexpr int64_t kBlockRows = 2 * kTileLines;  // of the table

// 16 rows by kBlockRows rows of the table, which are read where they lie, in tile registers: sums
// [2, kDigits, 16 rows of the table, 16 rows].
void TileSums(const int8_t* block, const int8_t* tiles, int64_t depth, int32_t* sums, Ahead& ahead) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t d = 0; d < depth; d += kStep, tiles += kDigits * kTileBytes) {
    ahead.Step();
    _tile_loadd(6, block + d, depth);
    _tile_loadd(7, tiles, kStep);
    _tile_dpbssd(0, 6, 7);
    _tile_loadd(7, tiles + kTileBytes, kStep);
    _tile_dpbssd(1, 6, 7);
    _tile_loadd(7, tiles + 2 * kTileBytes, kStep);
    _tile_dpbssd(2, 6, 7);
    _tile_loadd(6, block + kTileLines * depth + d, depth);
    _tile_dpbssd(5, 6, 7);
    _tile_loadd(7, tiles + kTileBytes, kStep);
    _tile_dpbssd(4, 6, 7);
    _tile_loadd(7, tiles, kStep);
    _tile_dpbssd(3, 6, 7);
  }
  constexpr int64_t kSums = kTileLines * kTileLines;
  _tile_stored(0, sums, kStep);
  _tile_stored(1, sums + kSums, kStep);
  _tile_stored(2, sums + 2 * kSums, kStep);
  _tile_stored(3, sums + 3 * kSums, kStep);
  _tile_stored(4, sums + 4 * kSums, kStep);
  _tile_stored(5, sums + 5 * kSums, kStep);
}

// The sums of 16 rows of the table and `rows` rows to their places in out.
void FinishTile(const int32_t* sums, const float* row_scales, int64_t rows, const float* scales,
                float* out, int64_t out_stride) {
  const Vector by_row = Load(row_scales);
  float products[kTileLines * kTileLines];
  const float* lines[kTileLines];
  for (int64_t v = 0; v < kTileLines; ++v) {
    IntVector digit[kDigits];
    for (int i = 0; i < kDigits; ++i) {
      memcpy(&digit[i], sums + (i * kTileLines + v) * kTileLines, sizeof digit[i]);
    }
    lines[v] = products + v * kTileLines;
    Store(products + v * kTileLines, Combine(digit[0], digit[1], digit[2]) * by_row * scales[v]);
  }
  float transposed[kTileLines * kTileLines];
  TransposeTile(lines, 0, transposed, kTileLines);
  for (int64_t r = 0; r < rows; ++r) Store(out + r * out_stride, Load(transposed + r * kTileLines));
}

// Returns how many rows of the table are done: all but those that fill no block.
int64_t MultiplyTiles(const Packed& packed, int64_t rows, const Table& table, int64_t first,
                      int64_t count, float* out) {
  const int64_t depth = table.depth;
  const int64_t whole = count - count % kBlockRows;
  const int64_t steps = depth / kStep * (RoundUp(rows, kTileLines) / kTileLines);
  const TileRegisters registers;
  alignas(64) int32_t sums[2 * kDigits * kTileLines * kTileLines];
  for (int64_t v = 0; v < whole; v += kBlockRows) {
    const int8_t* const block = static_cast<const int8_t*>(table.data) + (first + v) * depth;
    Ahead ahead(block + kBlockRows * depth, kBlockRows * depth, steps);
    for (int64_t row = 0; row < rows; row += kTileLines) {
      TileSums(block, packed.tiles + row * kDigits * depth, depth, sums, ahead);
      const int64_t height = rows - row < kTileLines ? rows - row : kTileLines;
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t column = first + v + half * kTileLines;
        FinishTile(sums + half * kDigits * kTileLines * kTileLines, packed.scales + row, height,
                   table.scales + column, out + row * table.rows + column, table.rows);
      }
    }
  }
  return whole;
}

#else

int64_t MultiplyTiles(const Packed&, int64_t, const Table&, int64_t, int64_t, float*) { return 0; }

#endif

void Multiply(const void* x, int64_t rows, const Table& table, int64_t first, int64_t count,
              float* out) {
  const Packed packed(const_cast<void*>(x), rows, table.depth);
  int64_t done = 0;
  if (UsesTiles(rows, table.depth)) {
    done = MultiplyTiles(packed, rows, table, first, count, out);
  }
  if (done < count) MultiplyDots(packed, rows, table, first + done, count - done, out);
}

}  // namespace

const TableProduct& GROK1_COMPUTE() {
  static constexpr TableProduct product = {PackedBytes, Pack, Multiply};
  return product;
}

}  // namespace grok1
