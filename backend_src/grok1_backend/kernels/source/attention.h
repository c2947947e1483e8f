// Attention of query rows to the positions of their context, read from pages. The rows of a KV head
// go together; several heads take turns, block of positions by block, as their keys and values lie
// side by side.
#ifndef GROK1_ATTENTION_H_
#define GROK1_ATTENTION_H_

#include "compute.h"
#include "tiles.h"

namespace grok1 {
namespace {

constexpr int64_t kPositions = 128;  // of context in a block; blocks start at its multiples
constexpr int64_t kInPlacePages = 16;  // positions of a page, from which on values stay in place
constexpr int64_t kFetch = 6;          // lines of the next block that are fetched at a time
constexpr float kMasked = -1e30f;

int64_t Padded(int64_t size) { return (size + kPanel - 1) / kPanel * kPanel; }

// What a head's rows keep between blocks.
struct HeadState {
  float* packed;  // queries
  float* sums;    // [kMaxAttention, Padded(size)]
  float* top;     // [kMaxAttention]: the largest score so far
  float* total;   // [kMaxAttention]: the sum of exp(score - top)

  HeadState(float* at, int64_t size) {
    packed = at;
    sums = packed + kMaxAttention * size;
    top = sums + kMaxAttention * Padded(size);
    total = top + kMaxAttention;
  }

  static int64_t Floats(int64_t size) { return kMaxAttention * (size + Padded(size) + 2); }
};

// Room for one block, which heads use in turn.
struct BlockState {
  float* panel;    // [max(size, kPositions), kPanel]
  float* scores;   // [kMaxAttention, kPositions]
  int64_t offsets[2 * kPositions];  // of the positions of this block and the next, in the pages
  int64_t start;   // the block's first position
  int64_t count;   // positions in the block
  int64_t known;   // positions with offsets

  BlockState(float* at, int64_t size) {
    panel = at;
    scores = panel + (size > kPositions ? size : kPositions) * kPanel;
  }

  static int64_t Floats(int64_t size) {
    return (size > kPositions ? size : kPositions) * kPanel + kMaxAttention * kPositions;
  }
};

int64_t AttentionFloats(int64_t size, int64_t heads) {
  return BlockState::Floats(size) + heads * HeadState::Floats(size);
}

void FindBlock(const AttentionRows& rows, int64_t start, int64_t end, BlockState& block) {
  block.start = start;
  block.count = end - start < kPositions ? end - start : kPositions;
  block.known = end - start < 2 * kPositions ? end - start : 2 * kPositions;
  int64_t page = start / rows.page_size;
  int64_t place = start % rows.page_size;
  for (int64_t c = 0; c < block.known; ++c) {
    block.offsets[c] = rows.pages[page] * rows.page_stride + place * rows.position_stride;
    if (++place == rows.page_size) {
      place = 0;
      ++page;
    }
  }
}

// Brings keys and values of all heads to the second cache, a few lines at a time: memory takes few
// requests at once, and who asks for more stands still.
class FetchAhead {
 public:
  // Of positions `first`... that the block knows.
  FetchAhead(const AttentionRows& rows, const BlockState& block, int64_t first)
      : rows_(rows), block_(block), end_(block.known), position_(first) {}

  // The next `lines` of each.
  void Fetch(int64_t lines) {
    for (; lines > 0 && position_ < end_; --lines) {
      const int64_t at = block_.offsets[position_] + element_;
      __builtin_prefetch(rows_.keys + at, 0, 2);
      __builtin_prefetch(rows_.values + at, 0, 2);
      element_ += kLine / static_cast<int64_t>(sizeof(float));
      if (element_ >= rows_.heads * rows_.size) {
        element_ = 0;
        ++position_;
      }
    }
  }

 private:
  const AttentionRows& rows_;
  const BlockState& block_;
  const int64_t end_;
  int64_t position_;
  int64_t element_ = 0;
};

void Score(const AttentionRows& rows, int64_t head, const HeadState& state, FetchAhead& ahead,
           BlockState& block) {
  static constexpr Tiles<0, false, float> tiles;
  memset(block.scores, 0, sizeof(float) * rows.rows * kPositions);
  for (int64_t c = 0; c < block.count; c += kPanel) {
    const float* keys[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t last = block.count - 1;
      keys[i] = rows.keys + head * rows.size + block.offsets[c + i < last ? c + i : last];
    }
    FillTransposed(keys, rows.size, [&] { ahead.Fetch(kFetch); }, block.panel);
    for (int64_t part = 0; part < NumBlocks(rows.rows); ++part) {
      const int64_t first = BlockStart(rows.rows, part);
      const int64_t height = BlockStart(rows.rows, part + 1) - first;
      tiles.of[height](state.packed + first * rows.size, block.panel, kPanel, rows.size,
                       block.scores + first * kPositions + c, kPositions);
    }
  }
}

// One row's scores become weights; what it has summed so far is brought to the new largest score.
void Weigh(const AttentionRows& rows, int64_t row, const HeadState& state, FetchAhead& ahead,
           BlockState& block) {
  float* scores = block.scores + row * kPositions;
  const int64_t seen = rows.lengths[row] - block.start;
  if (seen <= 0) {
    memset(scores, 0, sizeof(float) * kPositions);
    return;
  }
  IntVector index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  Vector top = Splat(state.top[row]);
  const int32_t end = seen < block.count ? seen : block.count;
  for (int32_t c = 0; c < kPositions; c += kLanes) {
    ahead.Fetch(kFetch);
    const Vector score = rows.cap * Tanh(Load(scores + c) * rows.multiplier / rows.cap);
    const Vector shown = index + c < end ? score : Splat(kMasked);
    Store(scores + c, shown);
    top = Max(top, shown);
  }
  const float new_top = Largest(top);
  Vector total{};
  for (int32_t c = 0; c < kPositions; c += kLanes) {
    ahead.Fetch(kFetch);
    const Vector weight = Exp(Load(scores + c) - new_top);
    const Vector shown = index + c < end ? weight : Vector{};
    Store(scores + c, shown);
    total += shown;
  }
  const float decay = Exp(Splat(state.top[row] - new_top))[0];
  state.top[row] = new_top;
  state.total[row] = state.total[row] * decay + Sum(total);
  float* sums = state.sums + row * Padded(rows.size);
  for (int64_t d = 0; d < rows.size; ++d) sums[d] *= decay;
}

// Adds the values of positions `first`... of the block, elements `d` to d + kPanel of each, which lie
// `stride` apart.
void AddRun(const AttentionRows& rows, const HeadState& state, const BlockState& block,
            int64_t first, int64_t count, int64_t d, const float* values, int64_t stride) {
  static constexpr Tiles<kPositions, false, float> tiles;
  const int64_t padded = Padded(rows.size);
  for (int64_t part = 0; part < NumBlocks(rows.rows); ++part) {
    const int64_t row = BlockStart(rows.rows, part);
    const int64_t height = BlockStart(rows.rows, part + 1) - row;
    tiles.of[height](block.scores + row * kPositions + first, values, stride, count,
                     state.sums + row * padded + d, padded);
  }
}

void AddValues(const AttentionRows& rows, int64_t head, const HeadState& state,
               BlockState& block) {
  const float* const values = rows.values + head * rows.size;
  for (int64_t d = 0; d < rows.size; d += kPanel) {
    const int64_t width = rows.size - d < kPanel ? rows.size - d : kPanel;
    if (width == kPanel && rows.page_size >= kInPlacePages) {
      const int64_t place = block.start % rows.page_size;
      for (int64_t c = 0, end; c < block.count; c = end) {
        const int64_t left = rows.page_size - (place + c) % rows.page_size;
        end = c + left < block.count ? c + left : block.count;
        AddRun(rows, state, block, c, end - c, d, values + block.offsets[c] + d,
               rows.position_stride);
      }
      continue;
    }
    for (int64_t c = 0; c < block.count; ++c) {
      const float* value = values + block.offsets[c] + d;
      float* to = block.panel + c * kPanel;
      for (int64_t i = 0; i < kPanel; ++i) to[i] = i < width ? value[i] : 0.0f;
    }
    AddRun(rows, state, block, 0, block.count, d, block.panel, kPanel);
  }
}

// Where the queries and outputs of a head's row are.
int64_t Offset(const AttentionRows& rows, int64_t head, int64_t row) {
  return rows.offsets[row] + head * rows.head_stride;
}

void Begin(const AttentionRows& rows, int64_t head, const HeadState& state) {
  const float* queries[kMaxAttention];
  for (int64_t r = 0; r < rows.rows; ++r) {
    queries[r] = rows.queries + Offset(rows, head, r);
    state.top[r] = 2 * kMasked;
    state.total[r] = 0;
  }
  Pack(queries, rows.rows, rows.size, state.packed);
  memset(state.sums, 0, sizeof(float) * rows.rows * Padded(rows.size));
}

void Finish(const AttentionRows& rows, int64_t head, const HeadState& state) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    const float* from = state.sums + r * Padded(rows.size);
    float* to = rows.outputs + Offset(rows, head, r);
    for (int64_t d = 0; d < rows.size; ++d) to[d] = from[d] / state.total[r];
  }
}

void Attend(const AttentionRows& rows, float* scratch) {
  BlockState block(scratch, rows.size);
  float* const states = scratch + BlockState::Floats(rows.size);
  const auto state = [&](int64_t head) {
    return HeadState(states + head * HeadState::Floats(rows.size), rows.size);
  };
  int64_t longest = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    longest = rows.lengths[r] > longest ? rows.lengths[r] : longest;
  }
  for (int64_t head = 0; head < rows.heads; ++head) Begin(rows, head, state(head));
  for (int64_t start = 0; start < longest; start += kPositions) {
    FindBlock(rows, start, longest, block);
    FetchAhead ahead(rows, block, start ? kPositions : 0);
    for (int64_t head = 0; head < rows.heads; ++head) {
      Score(rows, head, state(head), ahead, block);
      for (int64_t r = 0; r < rows.rows; ++r) Weigh(rows, r, state(head), ahead, block);
      AddValues(rows, head, state(head), block);
    }
  }
  for (int64_t head = 0; head < rows.heads; ++head) Finish(rows, head, state(head));
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_ATTENTION_H_
