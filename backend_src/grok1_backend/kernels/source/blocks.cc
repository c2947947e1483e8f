#include "blocks.h"

#include <algorithm>
#include <vector>

#include "integer.h"

namespace grok1 {

int64_t QuadOf(Storage storage, int64_t depth, int64_t groups) {
  const bool integer = storage == Storage::kInt8 && BestInteger();
  if (!integer || depth / groups > kMaxIntegerDepth) return 1;
  return depth % (groups * kQuad) == 0 ? kQuad : 0;
}

void ToBlocks(void* data, Storage storage, int64_t depth, int64_t columns, int64_t quad) {
  const int64_t item = ItemBytes(storage);
  auto* const to = static_cast<int8_t*>(data);
  const std::vector<int8_t> from(to, to + depth * columns * item);
  for (int64_t column = 0; column < columns; column += kBlockColumns) {
    const int64_t width = std::min(kBlockColumns, columns - column);
    const int8_t* const rows = from.data() + column * item;
    int8_t* const block = to + column * depth * item;
    if (quad == kQuad) {
      Interleave(rows, columns, depth, width, kQuad * width, block);
      continue;
    }
    for (int64_t d = 0; d < depth; ++d) {
      memcpy(block + d * width * item, rows + d * columns * item, width * item);
    }
  }
}

}  // namespace grok1
