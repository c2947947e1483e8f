// Sums of byte products in tile registers (AMX).
#ifndef GROK1_TILE_BLOCK_H_
#define GROK1_TILE_BLOCK_H_

#include "amx.h"
#include "interleave.h"

namespace grok1 {
namespace {

constexpr int8_t kFlip = 0;  // both sides are signed
constexpr int64_t kDepthBlock = 512;  // of which two planes and some lines stay in the first cache

// kTall · 16 lines by two planes.
template <int kTall>
void DotTiles(const int8_t* digits, int64_t stride, const int8_t* planes, int64_t depth, bool set,
              int32_t* sums, int64_t plane_sums) {
  constexpr int kBytes = 64;  // of a tile's row
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
    const int8_t* const weights = planes + d / 4 * kLineBytes;
    _tile_loadd(6, weights, kLineBytes);
    _tile_loadd(7, weights + kColumnBlock, kLineBytes);
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

// As DotBlock of vnni.h, for fewer lines than a tile has or whole tiles of them.
inline void TileBlock(const int8_t* digits, int64_t stride, int64_t lines, const int8_t* planes,
                      int64_t depth, bool set, FetchAhead& ahead, int32_t* sums) {
  const int64_t plane_sums = lines * kPlaneColumns;
  for (int plane = 0; plane < kPlanes; plane += 2) {
    ahead.Fetch(depth / 4);
    const int8_t* const weights = planes + plane * kColumnBlock;
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

#endif  // GROK1_TILE_BLOCK_H_
