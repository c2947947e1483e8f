#include "by_depth.h"

#include <algorithm>
#include <utility>

namespace grok1 {
namespace {

constexpr int64_t kMostRows = 16;            // beyond, arithmetic counts more than memory
constexpr int64_t kTasksEach = 8;            // for a thread, so that all end together
constexpr int64_t kLeastBytes = 128 * 1024;  // of a task: less is lost in its beginning
constexpr int64_t kDepthStep = 64;

}  // namespace

bool ProductsByDepth::Fits(const Matrix& weight, int64_t rows) {
  return rows <= kMostRows && BestInteger() && &BestProducts(weight) == &BestInteger()->products;
}

ProductsByDepth::ProductsByDepth(std::vector<PackedProduct> products, Parallel& parallel)
    : integer_(*BestInteger()), products_(std::move(products)) {
  const std::vector<Task> tasks = Cut(parallel.threads());
  places_each_ = std::min<int64_t>(parallel.threads(), tasks.size());
  Allocate();
  parallel.For(tasks.size(), [&](int64_t i) { Add(tasks[i]); });
}

std::vector<ProductsByDepth::Task> ProductsByDepth::Cut(int64_t threads) {
  int64_t bytes = 0;
  for (const PackedProduct& p : products_) bytes += p.weight.depth * p.weight.columns;
  const int64_t task_bytes = std::max(kLeastBytes, bytes / (kTasksEach * threads));
  std::vector<Task> tasks;
  for (size_t i = 0; i < products_.size(); ++i) {
    first_strip_.push_back(strips_.size());
    const Matrix& weight = products_[i].weight;
    const int64_t group_depth = weight.depth / weight.groups;
    for (int64_t column = 0; column < weight.columns; column += kWideStrip) {
      const int64_t count = std::min(kWideStrip, weight.columns - column);
      const int64_t depth = std::max(kDepthStep, task_bytes / count / kDepthStep * kDepthStep);
      for (int64_t group = 0; group < weight.groups; ++group) {
        for (int64_t start = 0; start < group_depth; start += depth) {
          const int64_t strip = strips_.size();
          tasks.push_back({strip, start, std::min(depth, group_depth - start)});
        }
        strips_.push_back({static_cast<int64_t>(i), group, column, count});
      }
    }
  }
  first_strip_.push_back(strips_.size());
  return tasks;
}

void ProductsByDepth::Allocate() {
  int64_t total = 0;
  for (const Strip& strip : strips_) {
    total += places_each_ * integer_.num_sums(products_[strip.product].rows, strip.count);
  }
  const int64_t bytes = total * static_cast<int64_t>(sizeof(int32_t));
  auto* sums = reinterpret_cast<int32_t*>(workspace_.AtLeast(bytes));
  places_ = std::vector<Place>(strips_.size() * places_each_);
  for (size_t i = 0; i < places_.size(); ++i) {
    const Strip& strip = strips_[i / places_each_];
    places_[i].sums = sums;
    sums += integer_.num_sums(products_[strip.product].rows, strip.count);
  }
}

void ProductsByDepth::Add(const Task& task) {
  const Strip& strip = strips_[task.strip];
  const PackedProduct& product = products_[strip.product];
  // There are as many places as threads that work here, so one is free.
  int64_t free = 0;
  Place* const places = &places_[task.strip * places_each_];
  while (places[free].busy.exchange(true, std::memory_order_acquire)) {
    free = (free + 1) % places_each_;
  }
  Place& place = places[free];
  integer_.add_products(product.packed, product.rows, product.weight,
                        {strip.group, task.start, task.depth, strip.column, strip.count},
                        place.empty, place.sums,
                        ThreadMemory(integer_.products.scratch_bytes));
  place.empty = false;
  place.busy.store(false, std::memory_order_release);
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
      for (int64_t i = 0; i < places_each_; ++i) {
        const Place& place = places_[(s + g) * places_each_ + i];
        if (!place.empty) sums.push_back(place.sums);
      }
    }
    first[groups] = sums.size();
    const Strip& strip = strips_[s];
    integer_.finish_row(of.packed, of.rows, row, of.weight, strip.column, strip.count, sums.data(),
                        first.data(), out + strip.column);
  }
}

}  // namespace grok1
