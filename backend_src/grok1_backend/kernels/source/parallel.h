// Runs tasks on XLA's own threads.
#ifndef GROK1_PARALLEL_H_
#define GROK1_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace grok1 {

// This thread's working memory of at least `floats`; lives on between calls.
inline float* ThreadScratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

class Parallel {
 public:
  explicit Parallel(xla::ffi::ThreadPool pool)
      : pool_(pool), threads_(std::max<int64_t>(1, pool.num_threads())) {}

  int64_t threads() const { return threads_; }

  // Runs task(0) to task(count - 1) in any order and returns when all are done.
  //
  // The caller works too and waits only for tasks that a helper has begun: when all threads of the
  // pool are busy, or waiting for other devices, it does everything itself.
  template <typename Task>
  void For(int64_t count, const Task& task) {
    struct Progress {
      std::atomic<int64_t> next{0};
      std::atomic<int64_t> done{0};
    };
    const auto progress = std::make_shared<Progress>();
    // A helper that comes late finds nothing left and never touches `task`.
    const auto work = [progress, count, &task] {
      for (int64_t i; (i = progress->next.fetch_add(1)) < count;) {
        task(i);
        progress->done.fetch_add(1, std::memory_order_release);
      }
    };
    for (int64_t i = 1; i < std::min(threads_, count); ++i) pool_.Schedule([work] { work(); });
    work();
    while (progress->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
  }

 private:
  xla::ffi::ThreadPool pool_;
  int64_t threads_;
};

}  // namespace grok1

#endif  // GROK1_PARALLEL_H_
