// The tile registers (AMX).
#ifndef GROK1_AMX_H_
#define GROK1_AMX_H_

#include <immintrin.h>

#include <cstdint>

namespace grok1 {
namespace {

constexpr int64_t kTileLines = 16;
constexpr int64_t kTileBytes = 1024;

// The tile registers of this thread while this lives: of so many lines those that hold lines, whole
// those that hold weights (6 and 7).
class TileRegisters {
 public:
  explicit TileRegisters(int64_t lines = kTileLines) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.rows[i] = i < 6 && lines < kTileLines ? lines : kTileLines;
    _tile_loadconfig(&config);
  }
  // A thread that keeps its tiles makes each of its context switches dearer.
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

}  // namespace
}  // namespace grok1

#endif  // GROK1_AMX_H_
