// Sums of byte products in tile registers (AMX).
#ifndef GROK1_TILE_BLOCK_H_
#define GROK1_TILE_BLOCK_H_

#include "amx.h"
#include "combine.h"

namespace grok1 {
namespace {

inline int32_t Correction(const int8_t*, int64_t) { return 0; }  // both sides are signed

static_assert(kDigitRun == kRunQuads * kQuad, "a step takes a run of quads");

// One step: kTall · 16 lines by a run of quads.
template <int kTall>
inline void TileStep(const int8_t* digits, int64_t stride, const int8_t* run) {
  _tile_loadd(6, run, kLineBytes);
  _tile_loadd(7, run + kRunBytes / kPlanes, kLineBytes);
  _tile_loadd(4, digits, stride);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  if (kTall > 1) {
    _tile_loadd(5, digits + kTileLines * stride, stride);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

// kTall · 16 lines by a block, whose sums are set or added to. kAhead: the weights come from memory,
// and what follows them is brought to the second cache.
template <int kTall, bool kAhead>
void TileLines(const int8_t* digits, int64_t stride, const int8_t* block, int64_t depth, bool set,
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
  const int64_t whole = depth / kDigitRun * kDigitRun;
  const int8_t* run = block;
  for (int64_t d = 0; d < whole; d += kDigitRun, run += kRunBytes) {
    for (int64_t i = 0; kAhead && i < kRunBytes; i += kLineBytes) {
      __builtin_prefetch(run + kRunBytes + i, 0, 2);
    }
    TileStep<kTall>(digits + d, stride, run);
  }
  if (whole < depth) {
    const int64_t bytes = Quads(depth - whole) * kLineBytes;
    int8_t rest[kRunBytes] = {};
    memcpy(rest, run, bytes);
    memcpy(rest + kRunBytes / kPlanes, run + bytes, bytes);
    TileStep<kTall>(digits + whole, stride, rest);
  }
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + plane_sums, kBytes);
  if (kTall > 1) _tile_stored(2, below, kBytes);
  if (kTall > 1) _tile_stored(3, below + plane_sums, kBytes);
}

// The sums of fewer lines than a tile has, or of whole tiles of them, with a block:
// [plane, line, 16].
inline void MultiplyLines(const int8_t* digits, int64_t stride, int64_t lines, const int8_t* block,
                          int64_t depth, const int32_t*, int32_t* sums) {
  const int64_t plane_sums = lines * kPlaneColumns;
  if (lines <= kTileLines) {
    TileLines<1, true>(digits, stride, block, depth, true, sums, plane_sums);
    return;
  }
  if (lines <= 2 * kTileLines) {
    TileLines<2, true>(digits, stride, block, depth, true, sums, plane_sums);
    return;
  }
  // Of a block so many rows stay in the first cache for all lines.
  constexpr int64_t kDepth = 512;
  for (int64_t d = 0; d < depth; d += kDepth) {
    const int64_t part = depth - d < kDepth ? depth - d : kDepth;
    const int8_t* const weights = block + d * kBlockColumns;
    int64_t line = 0;
    for (; line + 2 * kTileLines <= lines; line += 2 * kTileLines) {
      const auto& tiles = line ? TileLines<2, false> : TileLines<2, true>;
      tiles(digits + line * stride + d, stride, weights, part, d == 0, sums + line * kPlaneColumns,
            plane_sums);
    }
    if (line < lines) {
      TileLines<1, false>(digits + line * stride + d, stride, weights, part, d == 0,
                          sums + line * kPlaneColumns, plane_sums);
    }
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_TILE_BLOCK_H_
