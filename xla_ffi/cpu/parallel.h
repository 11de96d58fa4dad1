// Tasks over a pool, and the floating-point mode of the wire format.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "cpu/cpu.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxcgx::cpu {

// Sets this thread's floating-point mode to plain IEEE, as the wire format requires: round to nearest, denormals kept.
// The destructor restores the mode. It is needed because XLA's threads flush denormals.
class IeeeMode {
 public:
#if defined(__SSE__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~IeeeMode() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  IeeeMode() {}
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

// Runs task(0) .. task(count - 1) and returns when all are done. The caller runs tasks, too, and never waits for a task
// that has not begun. So a pool makes progress even if all of its threads are busy or wait in this function.
inline void parallel_for(const Pool& pool, int64_t count, const std::function<void(int64_t)>& task) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  const auto work = [count](Shared& shared, const std::function<void(int64_t)>* task) {
    // Helpers may start after the caller has returned. Then no index is left, so they do not use the dangling `task`.
    for (int64_t i; (i = shared.next.fetch_add(1)) < count;) {
      {
        IeeeMode mode;
        (*task)(i);
      }
      // The increment releases the task's stores to the caller. On x86 its lock prefix also drains the non-temporal
      // stores, which a release alone would not order.
      if (shared.done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(shared.mutex);
        shared.finished.notify_all();
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  const int64_t helpers = (pool.threads < count ? pool.threads : count) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    pool.schedule([shared, work, task = &task] { work(*shared, task); });
  }
  work(*shared, &task);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done.load() == count; });
}

}  // namespace jaxcgx::cpu
