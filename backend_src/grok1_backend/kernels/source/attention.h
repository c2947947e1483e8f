// Attention of query rows that share a KV head to the positions of their context, read from pages.
#ifndef GROK1_ATTENTION_H_
#define GROK1_ATTENTION_H_

#include "compute.h"
#include "tiles.h"

namespace grok1 {
namespace {

constexpr int64_t kPositions = 128;  // of context in a block; blocks start at its multiples
constexpr int64_t kAhead = 64;       // positions whose keys are brought to the cache beforehand
constexpr int64_t kInPlacePages = 16;  // positions of a page, from which on values stay in place
constexpr float kMasked = -1e30f;

int64_t Padded(int64_t size) { return (size + kPanel - 1) / kPanel * kPanel; }

// The state of all rows between blocks, and room for one block.
struct AttentionState {
  float* packed;   // queries
  float* panel;    // [max(size, kPositions), kPanel]
  float* scores;   // [kMaxAttention, kPositions]
  float* sums;     // [kMaxAttention, Padded(size)]
  float* top;      // [kMaxAttention]: the largest score so far
  float* total;    // [kMaxAttention]: the sum of exp(score - top)
  int64_t offsets[kPositions + kAhead];  // of the block's positions, and more, in the pages
  int64_t start;   // the block's first position
  int64_t count;   // positions in the block
  int64_t known;   // positions with offsets

  AttentionState(float* scratch, int64_t size) {
    packed = scratch;
    panel = packed + kMaxAttention * size;
    scores = panel + (size > kPositions ? size : kPositions) * kPanel;
    sums = scores + kMaxAttention * kPositions;
    top = sums + kMaxAttention * Padded(size);
    total = top + kMaxAttention;
  }

  static int64_t Floats(int64_t size) {
    const AttentionState state(nullptr, size);
    return state.total - state.packed + kMaxAttention;
  }
};

void FindBlock(const AttentionRows& rows, int64_t start, int64_t end, AttentionState& state) {
  state.start = start;
  state.count = end - start < kPositions ? end - start : kPositions;
  state.known = end - start < kPositions + kAhead ? end - start : kPositions + kAhead;
  int64_t page = start / rows.page_size;
  int64_t place = start % rows.page_size;
  for (int64_t c = 0; c < state.known; ++c) {
    state.offsets[c] = rows.pages[page] * rows.page_stride + place * rows.position_stride;
    if (++place == rows.page_size) {
      place = 0;
      ++page;
    }
  }
}

void Prefetch(const AttentionRows& rows, const AttentionState& state, const float* from,
              int64_t first) {
  for (int64_t c = first; c < first + kPanel && c < state.known; ++c) {
    for (int64_t d = 0; d < rows.size; d += kLine / sizeof(float)) {
      __builtin_prefetch(from + state.offsets[c] + d, 0, 2);
    }
  }
}

void Score(const AttentionRows& rows, AttentionState& state) {
  static constexpr Tiles<0, false, float> tiles;
  memset(state.scores, 0, sizeof(float) * rows.rows * kPositions);
  for (int64_t c = 0; c < state.count; c += kPanel) {
    const float* keys[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t last = state.count - 1;
      keys[i] = rows.keys + state.offsets[c + i < last ? c + i : last];
    }
    Prefetch(rows, state, rows.keys, c + kAhead);
    Prefetch(rows, state, rows.values, c);
    FillTransposed(keys, 0, rows.size, state.panel);
    for (int64_t block = 0; block < NumBlocks(rows.rows); ++block) {
      const int64_t first = BlockStart(rows.rows, block);
      const int64_t height = BlockStart(rows.rows, block + 1) - first;
      tiles.of[height](state.packed + first * rows.size, state.panel, kPanel, rows.size,
                       state.scores + first * kPositions + c, kPositions);
    }
  }
}

// One row's scores become weights; what it has summed so far is brought to the new largest score.
void Weigh(const AttentionRows& rows, int64_t row, AttentionState& state) {
  float* scores = state.scores + row * kPositions;
  const int64_t seen = rows.lengths[row] - state.start;
  if (seen <= 0) {
    memset(scores, 0, sizeof(float) * kPositions);
    return;
  }
  IntVector index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  Vector top = Splat(state.top[row]);
  const int32_t end = seen < state.count ? seen : state.count;
  for (int32_t c = 0; c < kPositions; c += kLanes) {
    const Vector score = rows.cap * Tanh(Load(scores + c) * rows.multiplier / rows.cap);
    const Vector shown = index + c < end ? score : Splat(kMasked);
    Store(scores + c, shown);
    top = Max(top, shown);
  }
  const float new_top = Largest(top);
  Vector total{};
  for (int32_t c = 0; c < kPositions; c += kLanes) {
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
void AddRun(const AttentionRows& rows, AttentionState& state, int64_t first, int64_t count,
            int64_t d, const float* values, int64_t stride) {
  static constexpr Tiles<kPositions, false, float> tiles;
  const int64_t padded = Padded(rows.size);
  for (int64_t block = 0; block < NumBlocks(rows.rows); ++block) {
    const int64_t row = BlockStart(rows.rows, block);
    const int64_t height = BlockStart(rows.rows, block + 1) - row;
    tiles.of[height](state.scores + row * kPositions + first, values, stride, count,
                     state.sums + row * padded + d, padded);
  }
}

void AddValues(const AttentionRows& rows, AttentionState& state) {
  for (int64_t d = 0; d < rows.size; d += kPanel) {
    const int64_t width = rows.size - d < kPanel ? rows.size - d : kPanel;
    if (width == kPanel && rows.page_size >= kInPlacePages) {
      const int64_t place = state.start % rows.page_size;
      for (int64_t c = 0, end; c < state.count; c = end) {
        const int64_t left = rows.page_size - (place + c) % rows.page_size;
        end = c + left < state.count ? c + left : state.count;
        AddRun(rows, state, c, end - c, d, rows.values + state.offsets[c] + d,
               rows.position_stride);
      }
      continue;
    }
    for (int64_t c = 0; c < state.count; ++c) {
      const float* value = rows.values + state.offsets[c] + d;
      float* to = state.panel + c * kPanel;
      for (int64_t i = 0; i < kPanel; ++i) to[i] = i < width ? value[i] : 0.0f;
    }
    AddRun(rows, state, 0, state.count, d, state.panel, kPanel);
  }
}

void Attend(const AttentionRows& rows, float* scratch) {
  AttentionState state(scratch, rows.size);
  const int64_t padded = Padded(rows.size);
  const float* queries[kMaxAttention];
  int64_t longest = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    queries[r] = rows.queries + rows.offsets[r];
    longest = rows.lengths[r] > longest ? rows.lengths[r] : longest;
    state.top[r] = 2 * kMasked;
    state.total[r] = 0;
  }
  Pack(queries, rows.rows, rows.size, state.packed);
  memset(state.sums, 0, sizeof(float) * rows.rows * padded);
  for (int64_t start = 0; start < longest; start += kPositions) {
    FindBlock(rows, start, longest, state);
    Score(rows, state);
    for (int64_t r = 0; r < rows.rows; ++r) Weigh(rows, r, state);
    AddValues(rows, state);
  }
  for (int64_t r = 0; r < rows.rows; ++r) {
    const float* from = state.sums + r * padded;
    float* to = rows.outputs + rows.offsets[r];
    for (int64_t d = 0; d < rows.size; ++d) to[d] = from[d] / state.total[r];
  }
}

}  // namespace
}  // namespace grok1

#endif  // GROK1_ATTENTION_H_
