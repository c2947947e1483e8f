// Runs tasks on XLA's own threads.
#ifndef GROK1_PARALLEL_H_
#define GROK1_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "cores.h"
#include "xla/ffi/api/ffi.h"

namespace grok1 {

// The tasks of one call, for whichever threads work on them. A thread takes those of a run, one after
// the other, since neighbours often read neighbouring memory; then what is left of other runs.
class Job {
 public:
  template <typename Task>
  Job(int64_t count, int64_t runs, const Task& task)
      : count_(count), runs_(runs), next_(new std::atomic<int64_t>[runs]), task_(&task),
        run_([](const void* erased, int64_t i) { (*static_cast<const Task*>(erased))(i); }) {
    for (int64_t run = 0; run < runs; ++run) next_[run] = Start(run);
  }

  // Runs tasks until none is left. Who comes late finds none and never touches what they refer to.
  void Work() {
    const int64_t first = workers_.fetch_add(1);
    for (int64_t k = 0; k < runs_; ++k) {
      const int64_t run = (first + k) % runs_;
      for (int64_t i; (i = next_[run].fetch_add(1)) < Start(run + 1);) {
        run_(task_, i);
        done_.fetch_add(1, std::memory_order_release);
      }
    }
  }

  bool Done() const { return done_.load(std::memory_order_acquire) >= count_; }

 private:
  int64_t Start(int64_t run) const { return count_ * run / runs_; }

  const int64_t count_;
  const int64_t runs_;
  const std::unique_ptr<std::atomic<int64_t>[]> next_;  // of each run
  const void* const task_;
  void (*const run_)(const void*, int64_t);
  std::atomic<int64_t> workers_{0};
  std::atomic<int64_t> done_{0};
};

// Threads that have helped stay a moment for the next job of the step: to wake one takes as long as
// many a job. Between steps none stays.
class Crew {
 public:
  // That of the process; never destroyed, as its threads may outlive what the process ends.
  static Crew& Get() {
    static Crew* const crew = new Crew;
    return *crew;
  }

  // Gives a job to the threads that stay; returns how many they are.
  int64_t Offer(std::shared_ptr<Job> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    cores_.Claim();
    job_ = std::move(job);
    offers_.fetch_add(1, std::memory_order_release);
    return staying_;
  }

  // Helps with a job, then with those that are offered next.
  void Help(std::shared_ptr<Job> job) {
    thread_local const Member member;
    job->Work();
    int64_t seen = Arrive();
    auto leaves = Clock::now() + kStay;
    for (;;) {
      if (offers_.load(std::memory_order_acquire) != seen) {
        Take(seen)->Work();
        leaves = Clock::now() + kStay;
      } else if (Clock::now() < leaves) {
        Pause();
      } else if (Leave(seen)) {
        return;
      }
    }
  }

 private:
  // A thread that helps at times, as long as it lives.
  struct Member {
    Member() {
      std::lock_guard<std::mutex> lock(Get().mutex_);
      Get().cores_.Join();
    }
    ~Member() {
      std::lock_guard<std::mutex> lock(Get().mutex_);
      Get().cores_.Leave();
    }
  };

  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kStay{50};

  // Not a yield: the core would go to whoever else wants it for much longer than a job takes.
  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int64_t Arrive() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++staying_;
    return offers_.load(std::memory_order_relaxed);
  }

  std::shared_ptr<Job> Take(int64_t& seen) {
    std::lock_guard<std::mutex> lock(mutex_);
    seen = offers_.load(std::memory_order_relaxed);
    return job_;
  }

  // False if there is an offer that counted on this thread.
  bool Leave(int64_t seen) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (offers_.load(std::memory_order_relaxed) != seen) return false;
    --staying_;
    return true;
  }

  std::mutex mutex_;
  Cores cores_;
  std::shared_ptr<Job> job_;  // the last one offered
  int64_t staying_ = 0;
  std::atomic<int64_t> offers_{0};
};

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
    if (count <= 0) return;
    const int64_t helpers = std::min(threads_, count) - 1;
    const auto job = std::make_shared<Job>(count, helpers + 1, task);
    if (helpers > 0) {
      for (int64_t i = Crew::Get().Offer(job); i < helpers; ++i) {
        pool_.Schedule([job] { Crew::Get().Help(job); });
      }
    }
    job->Work();
    while (!job->Done()) std::this_thread::yield();
  }

 private:
  xla::ffi::ThreadPool pool_;
  int64_t threads_;
};

}  // namespace grok1

#endif  // GROK1_PARALLEL_H_
