// Streams of cuda_emulator/ order what CUDA orders, and nothing else.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <vector>

#include "check.h"
#include "cuda_runtime.h"

namespace jaxcgx::test {
namespace {

constexpr int kThreads = 64;

void ok(cudaError_t error) { CHECK(error == cudaSuccess, std::to_string(error)); }

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
  cudaFuncAttributes unused;
  cudaFuncGetAttributes(&unused, mix);
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
};

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

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  misuse_ends_the_program();
  events_carry_memory();
  return finish();
}
