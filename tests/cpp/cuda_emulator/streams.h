// The streams, events and memory of CUDA on the CPU, with CUDA's names. cuda_runtime.h includes this.
//
// Each stream has a thread that does its work in order. It waits a random time before each piece of work, so that
// streams overtake each other wherever CUDA lets them. A missing event or synchronization gives wrong bytes, or a race
// that ThreadSanitizer sees, because the emulator orders hardly more than CUDA does: cudaStreamDestroy waits for the
// stream's work, and each stream orders the threads that use it. Work on the null stream runs at once, in the caller's
// thread.
//
// The program ends with a message if a host function calls CUDA, if a copy runs past an allocation or is not of the
// kind that it says, and if it is between the device and memory of the host that is not from cudaHostAlloc. A GPU makes
// such a copy synchronously.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <thread>
#include <utility>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventWaitDefault = 0;
constexpr unsigned cudaHostAllocPortable = 1;
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaMemPool_t = struct CUmemPool_st*;
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
enum cudaMemAllocationType { cudaMemAllocationTypePinned = 1 };
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1 };
struct cudaMemPoolProps {
  cudaMemAllocationType allocType;
  struct {
    cudaMemLocationType type;
    int id;
  } location;
};
using cudaHostFn_t = void (*)(void*);

namespace cuda_emulator {

// Counters and flags are relaxed, and lookups share their lock, because they must not order the threads that call.
inline std::atomic<int64_t> made{0}, failing{0};
inline std::atomic<cudaError_t> failing_with{cudaSuccess};
inline thread_local bool in_host_function = false;

[[noreturn]] inline void die(const char* call, const char* what) {
  std::fprintf(stderr, "cuda_emulator: %s: %s\n", call, what);
  std::abort();
}

// Lets the n-th call from now on return `error` and do nothing. Calls are launches and all functions here that return a
// cudaError_t.
inline void fail(int64_t n, cudaError_t error) {
  failing_with.store(error, std::memory_order_relaxed);
  failing.store(made.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}
// Every call begins with this. Returns the error that the call must return.
inline cudaError_t begin_call(const char* name) {
  if (in_host_function) die(name, "a host function must not call CUDA");
  const int64_t number = made.fetch_add(1, std::memory_order_relaxed) + 1;
  return number == failing.load(std::memory_order_relaxed) ? failing_with.load(std::memory_order_relaxed) : cudaSuccess;
}

struct Allocation {
  size_t bytes;
  bool device;
};
inline std::map<const char*, Allocation> allocations;  // by their first byte
inline std::shared_mutex allocations_mutex;
constexpr std::align_val_t kAlignment{256};

inline cudaError_t allocate(void** memory, size_t bytes, bool device) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  void* const p = ::operator new(bytes, kAlignment, std::nothrow);
  if (p == nullptr) return cudaErrorMemoryAllocation;
  std::memset(p, 0x54, bytes);  // garbage
  const std::lock_guard<std::shared_mutex> lock(allocations_mutex);
  allocations[static_cast<const char*>(p)] = {bytes, device};
  *memory = p;
  return cudaSuccess;
}
inline cudaError_t release(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  const std::lock_guard<std::shared_mutex> lock(allocations_mutex);
  const auto found = allocations.find(static_cast<const char*>(memory));
  if (found == allocations.end() || !found->second.device) return cudaErrorInvalidValue;
  allocations.erase(found);
  ::operator delete(memory, kAlignment);
  return cudaSuccess;
}

// Returns the allocation that the memory is in, or nullptr for pageable memory of the host.
inline const Allocation* allocation_of(const void* memory, size_t bytes) {
  const auto* const p = static_cast<const char*>(memory);
  const std::shared_lock<std::shared_mutex> lock(allocations_mutex);
  auto found = allocations.upper_bound(p);
  if (found == allocations.begin()) return nullptr;
  const auto& [first, allocation] = *--found;
  if (p >= first + allocation.bytes) return nullptr;
  if (p + bytes > first + allocation.bytes) die("cudaMemcpyAsync", "it runs past the end of an allocation");
  return &allocation;
}
inline void check_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const Allocation *const target = allocation_of(to, bytes), *const source = allocation_of(from, bytes);
  const bool to_device = target != nullptr && target->device, from_device = source != nullptr && source->device;
  if (kind != cudaMemcpyDefault && kind != 2 * from_device + to_device)
    die("cudaMemcpyAsync", "the kind of copy does not fit its memory");
  if (to_device != from_device && (target == nullptr || source == nullptr))
    die("cudaMemcpyAsync", "memory of the host is not from cudaHostAlloc: a GPU would copy synchronously");
}

// Waits until `ready` returns something. A mutex or a semaphore would also order the thread that waits before the one
// that it waits for.
template <class Ready>
auto wait_until(Ready ready) {
  for (;;) {
    if (const auto result = ready()) return result;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// Whether a stream has reached an event. Records are kept until the program ends: counting who still uses one would
// order the streams that do.
struct Record {
  std::atomic<bool> reached{false};
  Record* other = nullptr;
  bool is_reached() const { return reached.load(std::memory_order_acquire); }
  void wait() const {
    wait_until([this] { return is_reached(); });
  }
};
inline std::atomic<Record*> records{nullptr};

struct Work {
  std::function<void()> run;
  std::atomic<Work*> next{nullptr};
};

inline std::atomic<uint64_t> seed{1};  // of the next stream

}  // namespace cuda_emulator

struct CUstream_st {
  ~CUstream_st() {
    push(nullptr);
    thread.join();
  }
  void push(std::function<void()> run) {
    auto* const work = new cuda_emulator::Work{std::move(run)};
    last.exchange(work)->next.store(work, std::memory_order_release);
  }

 private:
  // Mostly none, sometimes a few turns of other threads, rarely up to 300 us.
  static void wait_a_while(uint64_t& lot) {
    lot = lot * 6364136223846793005u + 1442695040888963407u;
    const auto drawn = static_cast<unsigned>(lot >> 33);
    if (drawn % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn / 32 % 300));
    for (unsigned i = 24; i < drawn % 32; ++i) std::this_thread::yield();
  }
  void run(cuda_emulator::Work* done, uint64_t lot) {
    for (;;) {
      auto* const work = cuda_emulator::wait_until([&] { return done->next.load(std::memory_order_acquire); });
      delete std::exchange(done, work);
      if (!work->run) return delete work;
      wait_a_while(lot);
      work->run();
    }
  }

  std::atomic<cuda_emulator::Work*> last{new cuda_emulator::Work};
  std::thread thread{&CUstream_st::run, this, last.load(), cuda_emulator::seed++};
};

struct CUevent_st {
  cuda_emulator::Record* recorded = nullptr;
};

namespace cuda_emulator {

inline void submit(cudaStream_t stream, std::function<void()> work) {
  stream == nullptr ? work() : stream->push(std::move(work));
}
inline Record* record(cudaStream_t stream) {
  auto* const r = new Record;
  r->other = records.exchange(r, std::memory_order_relaxed);
  submit(stream, [r] { r->reached.store(true, std::memory_order_release); });
  return r;
}

}  // namespace cuda_emulator

// Returns from the function if this call must fail.
#define CUDA_EMULATOR_CALL() \
  if (const cudaError_t error = cuda_emulator::begin_call(__func__)) return error

inline cudaError_t cudaSetDevice(int device) {
  CUDA_EMULATOR_CALL();
  return device >= 0 && device < 8 ? cudaSuccess : cudaErrorInvalidDevice;
}

template <class T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  CUDA_EMULATOR_CALL();
  return cuda_emulator::allocate(reinterpret_cast<void**>(memory), bytes, true);
}
inline cudaError_t cudaFree(void* memory) {
  CUDA_EMULATOR_CALL();
  return cuda_emulator::release(memory);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, size_t bytes, unsigned) {
  CUDA_EMULATOR_CALL();
  return cuda_emulator::allocate(reinterpret_cast<void**>(memory), bytes, false);
}

// Memory in the order of a stream.
template <class T>
cudaError_t cudaMallocFromPoolAsync(T** memory, size_t bytes, cudaMemPool_t, cudaStream_t) {
  CUDA_EMULATOR_CALL();
  return cuda_emulator::allocate(reinterpret_cast<void**>(memory), bytes, true);
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  CUDA_EMULATOR_CALL();
  cuda_emulator::submit(stream, [=] { cuda_emulator::release(memory); });
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  CUDA_EMULATOR_CALL();
  *pool = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  CUDA_EMULATOR_CALL();
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  CUDA_EMULATOR_CALL();
  if (bytes == 0) return cudaSuccess;
  cuda_emulator::check_copy(to, from, bytes, kind);
  cuda_emulator::submit(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr) {
  CUDA_EMULATOR_CALL();
  cuda_emulator::submit(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  CUDA_EMULATOR_CALL();
  cuda_emulator::submit(stream, [=] {
    cuda_emulator::in_host_function = true;
    function(data);
    cuda_emulator::in_host_function = false;
  });
  return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  CUDA_EMULATOR_CALL();
  if (flags != cudaStreamNonBlocking) cuda_emulator::die(__func__, "the emulator has only cudaStreamNonBlocking");
  *stream = new CUstream_st;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CUDA_EMULATOR_CALL();
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CUDA_EMULATOR_CALL();
  cuda_emulator::record(stream)->wait();
  return cudaSuccess;
}

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CUDA_EMULATOR_CALL();
  return cuda_emulator::record(stream)->is_reached() ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  CUDA_EMULATOR_CALL();
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CUDA_EMULATOR_CALL();
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
  CUDA_EMULATOR_CALL();
  event->recorded = cuda_emulator::record(stream);
  return cudaSuccess;
}
// An event that was never recorded counts as reached.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = cudaEventWaitDefault) {
  CUDA_EMULATOR_CALL();
  if (const auto* const r = event->recorded) cuda_emulator::submit(stream, [r] { r->wait(); });
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
// A host function may call these, because they don't use the GPU.
inline const char* cudaGetErrorName(cudaError_t) { return "a name"; }
inline const char* cudaGetErrorString(cudaError_t) { return "a text"; }
