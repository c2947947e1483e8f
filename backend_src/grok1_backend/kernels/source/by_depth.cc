#include "by_depth.h"

#include <algorithm>
#include <utility>

namespace grok1 {
namespace {

constexpr int64_t kMostRows = 16;  // beyond, arithmetic counts more than memory
constexpr int64_t kWideStrip = 4096;
// Of a part, where its columns are not too many: two of them stay in the second cache.
constexpr int64_t kPartBytes = 96 * 1024;
constexpr int64_t kDepthStep = 64;

int64_t PartDepth(int64_t columns) {
  const int64_t depth = kPartBytes / columns / kDepthStep * kDepthStep;
  return std::max(depth, kDepthStep);
}

}  // namespace

bool ProductsByDepth::Fits(const Matrix& weight, int64_t rows) {
  return rows <= kMostRows && BestInteger() && &BestProducts(weight) == &BestInteger()->products;
}

ProductsByDepth::ProductsByDepth(std::vector<PackedProduct> products, Parallel& parallel)
    : integer_(*BestInteger()), workers_(parallel.threads()), products_(std::move(products)) {
  Cut();
  Allocate();
  parallel.For(workers_, [&](int64_t worker) { Work(worker); });
}

void ProductsByDepth::Cut() {
  for (size_t i = 0; i < products_.size(); ++i) {
    first_strip_.push_back(strips_.size());
    const Matrix& weight = products_[i].weight;
    const int64_t group_depth = weight.depth / weight.groups;
    for (int64_t column = 0; column < weight.columns; column += kWideStrip) {
      const int64_t count = std::min(kWideStrip, weight.columns - column);
      const int64_t depth = PartDepth(count);
      for (int64_t group = 0; group < weight.groups; ++group) {
        const int64_t strip = strips_.size();
        strips_.push_back({static_cast<int64_t>(i), group, column, count});
        for (int64_t start = 0; start < group_depth; start += depth) {
          tasks_.push_back({strip, start, std::min(depth, group_depth - start)});
        }
      }
    }
  }
  first_strip_.push_back(strips_.size());
}

void ProductsByDepth::Allocate() {
  const auto num_sums = [&](const Strip& strip) {
    return integer_.num_sums(products_[strip.product].rows, strip.count);
  };
  int64_t total = 0;
  for (const Strip& strip : strips_) total += workers_ * num_sums(strip);
  const int64_t bytes = total * static_cast<int64_t>(sizeof(int32_t));
  auto* sums = reinterpret_cast<int32_t*>(workspace_.AtLeast(bytes));
  for (const Strip& strip : strips_) {
    for (int64_t worker = 0; worker < workers_; ++worker) {
      sums_.push_back(sums);
      sums += num_sums(strip);
    }
  }
  filled_.assign(sums_.size(), 0);
}

IntegerPart ProductsByDepth::PartOfTask(const Task& task) const {
  const Strip& strip = strips_[task.strip];
  return {strip.group, task.start, task.depth, strip.column, strip.count};
}

WeightPart ProductsByDepth::Weights(int64_t task) const {
  if (task >= static_cast<int64_t>(tasks_.size())) return {};
  const Task& of = tasks_[task];
  return PartOf(products_[strips_[of.strip].product].weight, PartOfTask(of));
}

void ProductsByDepth::Work(int64_t worker) {
  const int64_t num_tasks = tasks_.size();
  void* const scratch = ThreadMemory(integer_.products.scratch_bytes);
  int64_t next = next_task_.fetch_add(1, std::memory_order_relaxed);
  integer_.fetch(Weights(next));
  while (next < num_tasks) {
    const Task& task = tasks_[next];
    // Taken before it is due, so that its weights are there when it is.
    next = next_task_.fetch_add(1, std::memory_order_relaxed);
    const PackedProduct& product = products_[strips_[task.strip].product];
    const int64_t place = task.strip * workers_ + worker;
    integer_.add_products(product.packed, product.rows, product.weight, PartOfTask(task),
                          Weights(next), !filled_[place], sums_[place], scratch);
    filled_[place] = 1;
  }
}

void ProductsByDepth::FinishRow(int64_t product, int64_t row, float* out) const {
  const PackedProduct& of = products_[product];
  const int64_t groups = of.weight.groups;
  std::vector<const int32_t*> sums;
  std::vector<int64_t> first(groups + 1);
  for (int64_t s = first_strip_[product]; s < first_strip_[product + 1]; s += groups) {
    sums.clear();
    for (int64_t g = 0; g < groups; ++g) {
      first[g] = sums.size();
      for (int64_t i = (s + g) * workers_; i < (s + g + 1) * workers_; ++i) {
        if (filled_[i]) sums.push_back(sums_[i]);
      }
    }
    first[groups] = sums.size();
    const Strip& strip = strips_[s];
    integer_.finish_row(of.packed, of.rows, row, of.weight, strip.column, strip.count, sums.data(),
                        first.data(), out + strip.column);
  }
}

}  // namespace grok1
