// Streams of cuda_emulator/ order what CUDA orders, and nothing else.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <vector>

#include "check.h"
#include "cuda_runtime.h"
#ifdef WITH_KERNELS  // those of cuda/, which take long to compile
#include "cuda_message.h"
#endif

namespace jaxcgx::test {
namespace {

constexpr int kThreads = 64;

void ok(cudaError_t error) { CHECK(error == cudaSuccess, cudaGetErrorName(error)); }

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

// to[i] = 3 * (from[i] + the sum of the block's from) + x, where the sum goes through shared memory.
__global__ void mix(const unsigned* from, unsigned* to, const unsigned x) {
  __shared__ unsigned all[kThreads];
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  all[threadIdx.x] = from[i];
  __syncthreads();
  unsigned sum = 0;
  for (unsigned j = 0; j < blockDim.x; ++j) sum += all[j];
  to[i] = 3 * (from[i] + sum) + x;
}
std::vector<unsigned> mixed(const std::vector<unsigned>& from, unsigned x) {
  std::vector<unsigned> to(from.size());
  for (size_t block = 0; block < from.size(); block += kThreads) {
    unsigned sum = 0;
    for (size_t i = 0; i < kThreads; ++i) sum += from[block + i];
    for (size_t i = 0; i < kThreads; ++i) to[block + i] = 3 * (from[block + i] + sum) + x;
  }
  return to;
}
cudaError_t launch_mix(const unsigned* from, unsigned* to, unsigned x, unsigned blocks, cudaStream_t stream) {
  cudaLaunchConfig_t config = {dim3(blocks), dim3(kThreads), 0, stream, nullptr, 0};
  return cudaLaunchKernelEx(&config, mix, from, to, x);
}

// Host memory, two device buffers, and a stream that copies there, runs kernels and copies back.
struct Line {
  static constexpr unsigned kBlocks = 2, kNumbers = kBlocks * kThreads;
  static constexpr size_t kBytes = kNumbers * sizeof(unsigned);
  cudaStream_t stream = new_stream();
  unsigned *host, *device[2];
  std::vector<unsigned> expected;

  Line() : expected(kNumbers) {
    ok(cudaHostAlloc(&host, kBytes, cudaHostAllocDefault));
    for (unsigned*& d : device) ok(cudaMalloc(&d, kBytes));
  }
  ~Line() {
    ok(cudaStreamDestroy(stream));
    ok(cudaFreeHost(host));
    for (unsigned* d : device) ok(cudaFree(d));
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void begin(unsigned first) {
    for (unsigned i = 0; i < kNumbers; ++i) host[i] = expected[i] = first + i * i;
    ok(cudaMemcpyAsync(device[0], host, kBytes, cudaMemcpyHostToDevice, stream));
  }
  void go_on(unsigned x) {
    ok(launch_mix(device[0], device[1], x, kBlocks, stream));
    ok(cudaMemcpyAsync(device[0], device[1], kBytes, x % 2 == 0 ? cudaMemcpyDeviceToDevice : cudaMemcpyDefault,
                       stream));
    ok(cudaMemsetAsync(device[1], 0xff, kBytes, stream));
    expected = mixed(expected, x);
  }
  void end() {
    ok(cudaMemcpyAsync(host, device[0], kBytes, cudaMemcpyDeviceToHost, stream));
    ok(cudaStreamSynchronize(stream));
    CHECK(std::equal(expected.begin(), expected.end(), host), "");
  }
};

void a_stream_is_in_order() {
  for (unsigned run = 0; run < 20; ++run) {
    Line line;
    line.begin(run);
    for (unsigned i = 0; i < 10; ++i) line.go_on(i);
    line.end();
  }
}

void host_functions_are_in_order() {
  struct Step {
    std::vector<int>* seen;
    int number;
  };
  std::vector<int> seen, expected;
  std::vector<Step> steps;
  for (int i = 0; i < 200; ++i) {
    steps.push_back({&seen, i});
    expected.push_back(i);
  }
  const cudaStream_t stream = new_stream();
  for (Step& step : steps) {
    const cudaHostFn_t see = [](void* step) {
      const auto& s = *static_cast<const Step*>(step);
      s.seen->push_back(s.number);
    };
    ok(cudaLaunchHostFunc(stream, see, &step));
  }
  ok(cudaStreamSynchronize(stream));
  CHECK(seen == expected, "");
  ok(cudaStreamDestroy(stream));
}

// Kernels of several streams, launched by several threads, beside kernels of the null stream.
void streams_run_beside_each_other() {
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 3; ++thread) {
    threads.emplace_back([thread] {
      Line a, b;
      for (unsigned run = 0; run < 5; ++run) {
        a.begin(thread), b.begin(run);
        for (unsigned i = 0; i < 5; ++i) a.go_on(i), b.go_on(i + 7);
        std::vector<unsigned> from(kThreads, run), to(kThreads);
        ok(launch_mix(from.data(), to.data(), 5, 1, nullptr));
        CHECK(to == mixed(from, 5), "the null stream");
        a.end(), b.end();
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

// Returns how often the first of two streams came second.
int reversed(bool waits, int most) {
  struct Turn {
    std::atomic<int>* next;
    int taken = 0;
  };
  const cudaHostFn_t take = [](void* turn) {
    auto* const t = static_cast<Turn*>(turn);
    t->taken = t->next->fetch_add(1, std::memory_order_relaxed);
  };
  const cudaStream_t first = new_stream(), second = new_stream();
  const cudaEvent_t event = new_event();
  int n = 0;
  for (int run = 0; run < most; ++run) {
    std::atomic<int> next{0};
    Turn of_first{&next}, of_second{&next};
    ok(cudaLaunchHostFunc(first, take, &of_first));
    ok(cudaEventRecord(event, first));
    if (waits) ok(cudaStreamWaitEvent(second, event));
    ok(cudaLaunchHostFunc(second, take, &of_second));
    ok(cudaStreamSynchronize(second));
    ok(cudaEventSynchronize(event));
    n += of_first.taken > of_second.taken;
  }
  ok(cudaEventDestroy(event));
  ok(cudaStreamDestroy(first));
  ok(cudaStreamDestroy(second));
  return n;
}

void an_event_orders_two_streams() {
  CHECK(reversed(true, 300) == 0, "");
  const int n = reversed(false, 1000);
  CHECK(n > 0 && n < 1000, std::to_string(n));
}

// The buffers go from one stream to the other and back, so that a missing event would be a race.
void events_carry_memory() {
  Line a, b;
  const cudaEvent_t there = new_event(), back = new_event();
  for (unsigned run = 0; run < 50; ++run) {
    a.begin(run);
    a.go_on(run);
    ok(cudaEventRecord(there, a.stream));
    ok(cudaStreamWaitEvent(b.stream, there));
    ok(launch_mix(a.device[0], b.device[0], 9, Line::kBlocks, b.stream));
    ok(cudaMemcpyAsync(b.host, b.device[0], Line::kBytes, cudaMemcpyDeviceToHost, b.stream));
    ok(cudaEventRecord(back, b.stream));
    ok(cudaStreamWaitEvent(a.stream, back));
    ok(cudaMemsetAsync(a.device[0], 0, Line::kBytes, a.stream));
    ok(cudaEventSynchronize(back));
    const std::vector<unsigned> expected = mixed(a.expected, 9);
    CHECK(std::equal(expected.begin(), expected.end(), b.host), "");
    ok(cudaStreamSynchronize(a.stream));
  }
  ok(cudaEventDestroy(there));
  ok(cudaEventDestroy(back));
}

void an_event_is_not_ready_until_the_stream_reaches_it() {
  const cudaStream_t stream = new_stream();
  const cudaEvent_t event = new_event();
  ok(cudaEventQuery(event));  // it was never recorded
  ok(cudaEventSynchronize(event));
  std::atomic<bool> go{false};
  const cudaHostFn_t wait = [](void* go) {
    while (!*static_cast<std::atomic<bool>*>(go)) std::this_thread::yield();
  };
  ok(cudaLaunchHostFunc(stream, wait, &go));
  ok(cudaEventRecord(event, stream));
  CHECK(cudaEventQuery(event) == cudaErrorNotReady, "");
  go = true;
  ok(cudaEventSynchronize(event));
  ok(cudaEventQuery(event));
  // A stream waits for the record of the time of the call.
  go = false;
  const cudaStream_t other = new_stream();
  ok(cudaStreamWaitEvent(other, event));
  ok(cudaLaunchHostFunc(stream, wait, &go));
  ok(cudaEventRecord(event, stream));
  ok(cudaStreamSynchronize(other));
  CHECK(cudaEventQuery(event) == cudaErrorNotReady, "");
  go = true;
  ok(cudaStreamDestroy(other));
  ok(cudaStreamDestroy(stream));
  ok(cudaEventQuery(event));
  ok(cudaEventDestroy(event));
}

void a_call_fails() {
  const int64_t before = cuda_emulator::calls();
  cudaStream_t stream = new_stream();
  unsigned* memory = nullptr;
  cuda_emulator::fail(1, cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&memory, 4) == cudaErrorMemoryAllocation && memory == nullptr, "");
  ok(cudaMalloc(&memory, Line::kBytes));
  ok(cudaMemsetAsync(memory, 0, Line::kBytes, stream));
  cuda_emulator::fail(3, cudaErrorLaunchFailure);
  ok(launch_mix(memory, memory, 0, 1, stream));
  CHECK(launch_mix(memory, memory, 0, 0, stream) == cudaErrorInvalidConfiguration, "");
  CHECK(launch_mix(memory, memory, 1, 1, stream) == cudaErrorLaunchFailure, "");
  ok(cudaStreamSynchronize(stream));
  CHECK(memory[0] == 0, "a launch that failed ran");
  CHECK(cudaFreeHost(memory) == cudaErrorInvalidValue, "");
  CHECK(cudaSetDevice(8) == cudaErrorInvalidDevice, "");
  ok(cudaFree(memory));
  ok(cudaStreamDestroy(stream));
  CHECK(cuda_emulator::calls() - before == 12, std::to_string(cuda_emulator::calls() - before));
  CHECK(std::string(cudaGetErrorName(cudaErrorNotReady)) == "cudaErrorNotReady", "");
  CHECK(std::string(cudaGetErrorString(cudaErrorNotReady)) == "device not ready", "");
}

// Returns whether `body` aborts the program. It runs in the child of a fork.
bool aborts(void (*body)()) {
  const pid_t child = fork();
  if (child == 0) {
    close(STDERR_FILENO);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

template <cudaMemcpyKind kKind, bool kToDevice>
void copy_of_pageable_memory() {
  char *device = nullptr, host[8];
  ok(cudaMalloc(&device, 8));
  const cudaStream_t stream = new_stream();
  ok(kToDevice ? cudaMemcpyAsync(device, host, 8, kKind, stream) : cudaMemcpyAsync(host, device, 8, kKind, stream));
}

// These come first, because a child can't start threads under ThreadSanitizer if its parent had several.
void misuse_ends_the_program() {
  CHECK(!aborts([] { Line line; }), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyHostToDevice, true>), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyDefault, true>), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyDeviceToHost, false>), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyDefault, false>), "");
  CHECK(aborts([] {
          Line line;
          ok(cudaMemcpyAsync(line.host, line.device[0], 4, cudaMemcpyHostToDevice, line.stream));
        }),
        "the reverse of its kind");
  CHECK(aborts([] {
          Line line;
          ok(cudaMemcpyAsync(line.host + 1, line.device[0], Line::kBytes, cudaMemcpyDeviceToHost, line.stream));
        }),
        "past the end");
  CHECK(aborts([] {
          const cudaStream_t stream = new_stream();
          ok(cudaLaunchHostFunc(
              stream, [](void* event) { ok(cudaEventQuery(static_cast<cudaEvent_t>(event))); }, new_event()));
          ok(cudaStreamSynchronize(stream));
        }),
        "CUDA in a host function");
}

#ifdef WITH_KERNELS
void two_streams_encode() {
  Random r{1};
  const Codec codec{Kind::kMaxMin, 4, 512, true};
  struct Encoding {
    Message message;
    Memory payload, work;
    cudaStream_t stream = new_stream();
  };
  std::vector<Encoding> all;
  for (int i = 0; i < 2; ++i) {
    Message m(codec, {{3000 + 500 * i, DType::kF32}, {700, DType::kBF16}}, 2, 1, r);
    Memory payload(m.layout.chunks() * m.layout.chunk_bytes, 0x54);
    Memory work(cuda::workspace_bytes(m.layout, 1, 0, true));
    all.push_back({std::move(m), std::move(payload), std::move(work)});
  }
  for (int run = 0; run < 10; ++run) {
    for (const Encoding& e : all) {
      ok(cudaMemsetAsync(e.payload.data(), 0x54, e.payload.size(), e.stream));
      check(cuda::encode({e.message.layout, 1, pointers<const void>(e.message.leaves).data(), e.message.ids.data(),
                          e.message.keys.data(), nullptr, nullptr, e.payload.data(), e.work.data()},
                         e.stream));
    }
    for (const Encoding& e : all) {
      ok(cudaStreamSynchronize(e.stream));
      CHECK(e.payload == encode(e.message, one_thread()), "");
    }
  }
  for (const Encoding& e : all) ok(cudaStreamDestroy(e.stream));
}
#endif

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  misuse_ends_the_program();
  a_stream_is_in_order();
  host_functions_are_in_order();
  streams_run_beside_each_other();
  an_event_orders_two_streams();
  events_carry_memory();
  an_event_is_not_ready_until_the_stream_reaches_it();
  a_call_fails();
#ifdef WITH_KERNELS
  two_streams_encode();
#endif
  return finish();
}
