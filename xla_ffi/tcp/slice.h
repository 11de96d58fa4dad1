// Scheduling of threads that share processors with computing threads.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxcgx::tcp {

// Requests a short time slice for the calling thread. So it runs soon after it wakes, before computing threads. Bytes
// wait for this thread's work, which is short. This needs Linux 6.12. Earlier versions ignore the request.
inline void run_soon() {
#if defined(__linux__) && defined(SYS_sched_getattr)
  struct {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  constexpr uint32_t kOther = 0, kBatch = 3;  // in other policies, `runtime` has another meaning
  if (attributes.policy != kOther && attributes.policy != kBatch) return;
  attributes.runtime = 100'000;  // ns of a time slice, the shortest that Linux allows
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

}  // namespace jaxcgx::tcp
