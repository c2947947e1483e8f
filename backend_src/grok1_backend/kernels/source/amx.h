// Sums of byte products in tiles of 16 × 16 (AMX), for many rows.
#ifndef GROK1_AMX_H_
#define GROK1_AMX_H_

#include "interleave.h"

namespace grok1 {
namespace {

constexpr int64_t kTileLines = 16;
constexpr int64_t kTileBytes = 1024;

// The tile registers of this thread while this lives: eight whole tiles.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  // A thread that keeps its tiles makes each of its context switches dearer.
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// kTall · 16 lines by two planes.
template <int kTall>
void DotTiles(const int8_t* digits, int64_t stride, const int8_t* planes, int64_t depth, bool set,
              int32_t* sums, int64_t plane_sums) {
  constexpr int kBytes = 64;  // of a tile's row
  const int64_t plane_bytes = depth * kPlaneColumns;
  int32_t* const below = sums + kTileLines * kPlaneColumns;
  if (set) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kBytes);
    _tile_loadd(1, sums + plane_sums, kBytes);
    if (kTall > 1) _tile_loadd(2, below, kBytes);
    if (kTall > 1) _tile_loadd(3, below + plane_sums, kBytes);
  }
  for (int64_t d = 0; d < depth; d += kDigitRun) {
    _tile_loadd(6, planes + d * kPlaneColumns, kBytes);
    _tile_loadd(7, planes + plane_bytes + d * kPlaneColumns, kBytes);
    _tile_loadd(4, digits + d, stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if (kTall > 1) {
      _tile_loadd(5, digits + kTileLines * stride + d, stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + plane_sums, kBytes);
  if (kTall > 1) _tile_stored(2, below, kBytes);
  if (kTall > 1) _tile_stored(3, below + plane_sums, kBytes);
}

// As DotBlock of vnni.h, for lines in whole tiles and weights that are not flipped.
inline void TileBlock(const int8_t* digits, int64_t stride, int64_t lines, const int8_t* planes,
                      int64_t depth, bool set, int32_t* sums) {
  const int64_t plane_sums = lines * kPlaneColumns;
  for (int plane = 0; plane < kPlanes; plane += 2) {
    const int8_t* const weights = planes + plane * depth * kPlaneColumns;
    int32_t* const to = sums + plane * plane_sums;
    int64_t line = 0;
    for (; line + 2 * kTileLines <= lines; line += 2 * kTileLines) {
      DotTiles<2>(digits + line * stride, stride, weights, depth, set, to + line * kPlaneColumns,
                  plane_sums);
    }
    if (line < lines) {
      DotTiles<1>(digits + line * stride, stride, weights, depth, set, to + line * kPlaneColumns,
                  plane_sums);
    }
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_AMX_H_
