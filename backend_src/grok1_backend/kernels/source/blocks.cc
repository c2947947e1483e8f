#include "blocks.h"

#include <algorithm>
#include <vector>

#include "integer.h"

namespace grok1 {
namespace {

// A block's rows of one group to quads.
void BlockToQuads(const int8_t* rows, int64_t stride, int64_t depth, int64_t width,
                  int8_t* block) {
  for (int64_t i = 0; i < Quads(depth); ++i) {
    int8_t quad[kQuad * kBlockColumns];
    MakeQuad(rows + i * kQuad * stride, stride, kQuad, width, quad);
    if (width == kBlockColumns) {
      PutQuad(quad, i, Quads(depth), block);
    } else {
      memcpy(block + i * kQuad * width, quad, kQuad * width);
    }
  }
}

}  // namespace

int64_t QuadOf(Storage storage, int64_t depth, int64_t groups) {
  const bool integer = storage == Storage::kInt8 && BestInteger();
  if (!integer || depth / groups > kMaxIntegerDepth) return 1;
  return depth % (groups * kQuad) == 0 ? kQuad : 0;
}

void ToBlocks(void* data, Storage storage, int64_t depth, int64_t columns, int64_t groups) {
  const int64_t item = ItemBytes(storage);
  auto* const to = static_cast<int8_t*>(data);
  const std::vector<int8_t> from(to, to + depth * columns * item);
  const int64_t quad = QuadOf(storage, depth, groups);
  for (int64_t column = 0; column < columns; column += kBlockColumns) {
    const int64_t width = std::min(kBlockColumns, columns - column);
    const int8_t* const rows = from.data() + column * item;
    int8_t* const block = to + column * depth * item;
    if (quad == kQuad) {
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = group * (depth / groups);
        BlockToQuads(rows + row * columns, columns, depth / groups, width, block + row * width);
      }
    } else if (quad == 1) {
      for (int64_t d = 0; d < depth; ++d) {
        memcpy(block + d * width * item, rows + d * columns * item, width * item);
      }
    }
  }
}

}  // namespace grok1
