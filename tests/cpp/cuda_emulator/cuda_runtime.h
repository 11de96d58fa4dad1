// Runs CUDA kernels on the CPU. It replaces the toolkit's header, so that .cu files compile as C++, and has the part of
// CUDA that cuda/ uses.
//
// Every thread of a block is a fiber. It runs until it waits for others, at a shuffle or a barrier. The next fiber is
// drawn at random, so that results that depend on an order that CUDA does not promise vary. A shuffle waits for all
// threads in its mask, a barrier for the whole block. If one of them never comes, the program ends with a message.
// Sanitizers see every access.
//
// Blocks run one after another. Those of a cooperative launch take turns: a block runs until all of its threads have
// ended or wait for another block, at __nanosleep.
//
// Streams (streams.h) run kernels in threads of their own. What the emulator knows of a running kernel belongs to its
// thread.
//
// The program ends with a message if a host thread launches a kernel that it has not loaded by cudaFuncGetAttributes
// since its last cudaDeviceReset. A GPU would load the kernel then, which may wait for other kernels.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "streams.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
// Blocks that take turns share __shared__ memory, too: it keeps nothing while a block waits for another. Under
// ThreadSanitizer kernels of several streams run at once, so that it sees their races. Otherwise one kernel runs at a
// time, because AddressSanitizer doesn't check the bounds of thread_local memory.
#ifdef __SANITIZE_THREAD__
#define __shared__ static thread_local
#else
#define __shared__ static
#endif

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  char pad[4];
  union {
    int cooperative, programmaticStreamSerializationAllowed;
    char all[64];
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes {
  int ptxVersion;
};

// Aligned as on a GPU, so that UndefinedBehaviorSanitizer finds misaligned accesses.
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline thread_local dim3 gridDim, blockDim;

namespace cuda_emulator {

constexpr unsigned kProcessors = 3;  // a cooperative launch has at most so many blocks

// The place where a stack continues, for __builtin_setjmp and __builtin_longjmp. swapcontext makes a system call each
// time, and AddressSanitizer would clear the stack's shadow.
using Place = void* [5];

struct Thread {
  dim3 index;
  Place place;
  bool started = false;  // once for all blocks, because making a context takes system calls
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done = false;
  unsigned shuffles = 0;
  static constexpr size_t kStack = 256 << 10;
};

struct Warp {
  uint64_t value[2][32];  // of this shuffle and of the previous one, which some threads may not have read yet
  unsigned mask = 0, arrived = 0;
  std::vector<Thread*> waiting;
};

struct Block {
  dim3 index;
  unsigned number = 0;  // of the blocks that take turns
  unsigned left = 0;    // threads that have not ended
  std::vector<std::unique_ptr<Thread>> all;
  std::vector<Warp> warps;
  std::vector<Thread*> ready, at_barrier, at_other_block;
};

struct Emulator : Block {
  unsigned threads = 0;
  Block resting[kProcessors];  // the blocks that take turns
  Place scheduler;
  Thread* current = nullptr;
  std::function<void()> kernel;
  uint64_t lot = 1;

  [[noreturn]] void fail(const char* what) const {
    std::fprintf(stderr, "cuda_emulator: block (%u, %u): %s\n", index.x, index.y, what);
    std::abort();
  }
  // The compiler must not see that a jump leaves the function. Otherwise it would drop the code to which
  // __builtin_setjmp returns. The sanitizers know only the stack of the operating system's thread. ThreadSanitizer
  // counts calls and returns, so that it must see neither of a function that doesn't return.
  [[gnu::noipa, gnu::no_sanitize_address, gnu::no_sanitize_thread]] static void jump(Place& to) {
    __builtin_longjmp(to, 1);
  }
  [[gnu::noipa, gnu::no_sanitize_address, gnu::no_sanitize_thread]] void wait() {
    if (__builtin_setjmp(current->place) == 0) jump(scheduler);
  }
  [[gnu::noipa, gnu::no_sanitize_address, gnu::no_sanitize_thread]] void go_on(Thread& t) {
    if (__builtin_setjmp(scheduler) != 0) return;
    if (t.started) jump(t.place);
    t.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack = {t.stack.get(), 0, Thread::kStack};
    makecontext(&context, enter, 0);
    setcontext(&context);
  }

  static void enter();
  void start(Thread& t, unsigned index) {
    t.index = dim3(index);
    t.done = false;
    t.shuffles = 0;
    ready.push_back(&t);
  }
  void begin(dim3 at) {
    index = at;
    ready.clear(), at_barrier.clear(), at_other_block.clear();
    while (all.size() < threads) all.push_back(std::make_unique<Thread>());
    for (unsigned i = 0; i < threads; ++i) start(*all[i], i);
    warps.assign((threads + 31) / 32, Warp());
    left = threads;
  }
  // Runs the block until all of its threads have ended, or one waits for another block.
  void run() {
    while (!ready.empty()) {
      lot = lot * 6364136223846793005u + 1442695040888963407u;
      std::swap(ready[(lot >> 33) % ready.size()], ready.back());
      current = ready.back();
      ready.pop_back();
      go_on(*current);
      left -= current->done;
    }
    if (left == 0 || !at_other_block.empty()) return;
    fail(at_barrier.empty() ? "a thread that a shuffle waits for never came" : "a thread never came to a barrier");
  }
};

inline thread_local Emulator* state = nullptr;
[[gnu::no_sanitize_address, gnu::no_sanitize_thread]] inline void Emulator::enter() {
  for (;;) {
    state->kernel();
    state->current->done = true;
    state->wait();  // for another block
  }
}

// Runs a grid in this thread.
inline void run_grid(dim3 grid, dim3 block, bool cooperative, const std::function<void()>& begin,
                     const std::function<void()>& thread) {
#ifndef __SANITIZE_THREAD__
  static std::mutex one_kernel;
  const std::lock_guard<std::mutex> lock(one_kernel);
#endif
  static thread_local Emulator emulator;
  Emulator& e = emulator;
  state = &e;
  gridDim = grid, blockDim = block;
  e.threads = block.x;
  e.kernel = thread;
  if (!cooperative) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        e.begin(dim3(x, y));
        begin();
        e.run();
        if (e.left > 0) e.fail("it waits for another block, but the launch is not cooperative");
      }
    }
    return;
  }
  const auto turn = [&](unsigned i, auto f) {
    std::swap(static_cast<Block&>(e), e.resting[i]);
    f();
    std::swap(static_cast<Block&>(e), e.resting[i]);
  };
  for (unsigned i = 0; i < grid.x; ++i) {
    turn(i, [&] {
      e.number = i;
      e.begin(dim3(i));
    });
  }
  // A block that waits gets 1000 turns: enough, unless it waits forever.
  for (unsigned left = grid.x, turns = 0; left > 0; ++turns) {
    if (turns == 1000) e.fail("a block waits forever for another");
    left = 0;
    for (unsigned i = 0; i < grid.x; ++i) {
      turn(i, [&] {
        e.ready.insert(e.ready.end(), e.at_other_block.begin(), e.at_other_block.end());
        e.at_other_block.clear();
        if (e.left == 0) return;
        begin();
        e.run();
        left += e.left > 0;
      });
    }
  }
}

inline thread_local std::set<const void*> loaded;  // kernels

// Lets the stream run `thread` in every thread of a grid, and `begin` before each block begins or goes on.
inline cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> begin,
                          std::function<void()> thread) {
  if (loaded.count(kernel) == 0) die("cudaLaunchKernelEx", "the kernel was not loaded before");
  if (const cudaError_t error = begin_call("cudaLaunchKernelEx")) return error;
  const dim3 grid = config.gridDim, block = config.blockDim;
  const bool cooperative = config.numAttrs > 0 && config.attrs[0].id == cudaLaunchAttributeCooperative;
  if (block.x == 0 || block.x > 1024 || block.y != 1 || block.z != 1 || grid.x == 0 || grid.x > 0x7fffffff ||
      grid.y == 0 || grid.y > 65535 || grid.z != 1 || (cooperative && grid.x * grid.y > kProcessors)) {
    return cudaErrorInvalidConfiguration;
  }
  submit(config.stream, [=, begin = std::move(begin), thread = std::move(thread)] {
    run_grid(grid, block, cooperative, begin, thread);
  });
  return cudaSuccess;
}

template <class T>
T exchange(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8, "");
  Emulator& b = *state;
  Thread& t = *b.current;
  Warp& w = b.warps[t.index.x / 32];
  const unsigned lane = t.index.x % 32, turn = t.shuffles++ % 2;
  if (!(mask >> lane & 1)) b.fail("a shuffle's mask leaves its own thread out");
  if (w.arrived == 0)
    w.mask = mask;
  else if (w.mask != mask)
    b.fail("threads meet at shuffles with different masks");
  std::memcpy(&w.value[turn][lane], &value, sizeof(T));
  w.arrived |= 1u << lane;
  if (w.arrived == mask) {
    b.ready.insert(b.ready.end(), w.waiting.begin(), w.waiting.end());
    w.waiting.clear();
    w.arrived = 0;
  } else {
    w.waiting.push_back(&t);
    b.wait();
  }
  if (from >= 32 || !(mask >> from & 1)) b.fail("a shuffle reads a thread that its mask leaves out");
  std::memcpy(&value, &w.value[turn][from], sizeof(T));
  return value;
}

}  // namespace cuda_emulator

#define threadIdx (cuda_emulator::state->current->index)
#define blockIdx (cuda_emulator::state->index)

inline void __syncthreads() {
  auto& b = *cuda_emulator::state;
  b.at_barrier.push_back(b.current);
  if (b.at_barrier.size() == b.threads) {
    b.ready.insert(b.ready.end(), b.at_barrier.begin(), b.at_barrier.end() - 1);
    b.at_barrier.clear();
  } else {
    b.wait();
  }
}
inline void __nanosleep(unsigned) {
  auto& b = *cuda_emulator::state;
  b.at_other_block.push_back(b.current);
  b.wait();
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
  return cuda_emulator::exchange(mask, value, (threadIdx.x % 32) ^ lanes);
}
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned from) {
  return cuda_emulator::exchange(mask, value, from % 32);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_emulator::exchange(mask, value, lane < lanes ? lane : lane - lanes);
}
inline void __syncwarp() { cuda_emulator::exchange(0xffffffffu, 0u, threadIdx.x % 32); }
inline unsigned __ballot_sync(unsigned mask, bool yes) {
  const auto& t = *cuda_emulator::state->current;
  const unsigned turn = t.shuffles % 2;
  cuda_emulator::exchange(mask, static_cast<uint64_t>(yes), t.index.x % 32);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1)
      ballot |= static_cast<unsigned>(cuda_emulator::state->warps[t.index.x / 32].value[turn][lane]) << lane;
  }
  return ballot;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return cuda_emulator::launch(
      *config, reinterpret_cast<const void*>(kernel), [] {},
      [kernel, copies = std::tuple<std::remove_const_t<Parameters>...>(std::forward<Arguments>(arguments)...)] {
        std::apply(kernel, copies);
      });
}

template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(Parameters...), int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
#define CUDART_VERSION 13000
struct cudaDeviceProp {
  char name[256];
  int major, minor;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* gpu, int) {
  *gpu = {"Tesla T4", 7, 5};
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 12040;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
// Weak, and not inline, so that they are also there for nvcc's object files (ptx/).
extern "C" {
[[gnu::weak]] cudaError_t cudaGetDevice(int* device) {
  CUDA_EMULATOR_CALL();
  *device = 0;
  return cudaSuccess;
}
[[gnu::weak]] cudaError_t cudaDeviceReset() {
  cuda_emulator::loaded.clear();
  return cudaSuccess;
}
[[gnu::weak]] cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = cuda_emulator::kProcessors;
  return cudaSuccess;
}
}

// A kernel always ends before the stream's next one begins, so it doesn't matter whether launches are early.
template <class T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, T* kernel) {
  cuda_emulator::loaded.insert(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

// A kernel's threads switch only where they wait, so that every function here is atomic among them.
inline unsigned atomicAdd(unsigned* p, unsigned x) { return std::exchange(*p, *p + x); }
inline unsigned atomicOr(unsigned* p, unsigned x) { return std::exchange(*p, *p | x); }
inline unsigned atomicMax(unsigned* p, unsigned x) { return std::exchange(*p, *p < x ? x : *p); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T x) {
  *p = x;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15;
    const unsigned byte = static_cast<unsigned>(bytes >> (8 * (s & 7))) & 0xff;
    result |= (s & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
  }
  return result;
}
