// Memory to work in that lives on between calls, since fresh memory costs a page fault each 4 KB.
#ifndef GROK1_WORKSPACE_H_
#define GROK1_WORKSPACE_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace grok1 {

// Some bytes at a whole cache line, grown as needed; what was in them is lost then.
class Memory {
 public:
  char* AtLeast(int64_t bytes) {
    if (bytes > size_) {
      const int64_t size = (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
      data_.reset();
      data_.reset(static_cast<char*>(std::aligned_alloc(kLineBytes, size)));
      size_ = data_ ? size : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

// This thread's, for one task.
inline char* ThreadMemory(int64_t bytes) {
  thread_local Memory memory;
  return memory.AtLeast(bytes);
}

// That of a whole call, which several threads share. There are as many as calls run at a time.
class Workspace {
 public:
  Workspace() {
    std::lock_guard<std::mutex> lock(Idle().mutex);
    if (Idle().memories.empty()) {
      memory_ = std::make_unique<Memory>();
    } else {
      memory_ = std::move(Idle().memories.back());
      Idle().memories.pop_back();
    }
  }
  ~Workspace() {
    std::lock_guard<std::mutex> lock(Idle().mutex);
    Idle().memories.push_back(std::move(memory_));
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  char* AtLeast(int64_t bytes) { return memory_->AtLeast(bytes); }

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<std::unique_ptr<Memory>> memories;
  };
  // Never destroyed: calls may still run when the process ends.
  static Kept& Idle() {
    static Kept* const kept = new Kept;
    return *kept;
  }
  std::unique_ptr<Memory> memory_;
};

}  // namespace grok1

#endif  // GROK1_WORKSPACE_H_
