// Which cores threads run on.
#ifndef GROK1_CORES_H_
#define GROK1_CORES_H_

#ifdef __linux__
#include <sched.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <vector>

namespace grok1 {

// Keeps threads off the core of the one that they help. Linux may put both on one core: when its
// neighbour falls idle the one that waits there is moved only after milliseconds, since it has run a
// moment ago. Not thread-safe.
class Cores {
 public:
#ifdef __linux__
  Cores() { sched_getaffinity(0, sizeof allowed_, &allowed_); }

  // From here on this thread keeps off, until it leaves.
  void Join() {
    threads_.push_back(gettid());
    KeepOff(threads_.back());
  }

  void Leave() {
    threads_.erase(std::remove(threads_.begin(), threads_.end(), gettid()), threads_.end());
  }

  // The others keep off the core of this thread.
  void Claim() {
    const int core = sched_getcpu();
    if (core == claimed_) return;
    claimed_ = core;
    for (const pid_t thread : threads_) {
      if (thread != gettid()) KeepOff(thread);
    }
  }

 private:
  void KeepOff(pid_t thread) const {
    cpu_set_t rest = allowed_;
    if (claimed_ >= 0) CPU_CLR(claimed_, &rest);
    if (CPU_COUNT(&rest) > 0) sched_setaffinity(thread, sizeof rest, &rest);
  }

  cpu_set_t allowed_{};  // none where they are more than it has room for
  int claimed_ = -1;
  std::vector<pid_t> threads_;
#else
  void Join() {}
  void Leave() {}
  void Claim() {}
#endif
};

}  // namespace grok1

#endif  // GROK1_CORES_H_
