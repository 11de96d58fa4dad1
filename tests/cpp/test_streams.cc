// Misuse of the streams of cuda_emulator/ ends the program. test_gpu_sums.cc tests what they order.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "check.h"
#include "cuda_runtime.h"

namespace jaxcgx::test {
namespace {

void ok(cudaError_t error) { CHECK(error == cudaSuccess, std::to_string(error)); }

// Memory of the host and of the device, and a stream.
struct Line {
  static constexpr size_t kBytes = 8;
  cudaStream_t stream = nullptr;
  char *host, *device, pageable[kBytes] = {};

  Line() {
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ok(cudaHostAlloc(&host, kBytes, cudaHostAllocPortable));
    ok(cudaMalloc(&device, kBytes));
  }
  void copy(void* to, const void* from, cudaMemcpyKind kind) const {
    ok(cudaMemcpyAsync(to, from, kBytes, kind, stream));
  }
};

// Returns whether `body` aborts the program. It runs in the child of a fork.
bool aborts(void (*body)(const Line&)) {
  const pid_t child = fork();
  if (child == 0) {
    close(STDERR_FILENO);
    body(Line());
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

template <cudaMemcpyKind kKind, bool kToDevice>
void copy_of_pageable_memory(const Line& a) {
  kToDevice ? a.copy(a.device, a.pageable, kKind) : a.copy(const_cast<char*>(a.pageable), a.device, kKind);
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  CHECK(!aborts([](const Line& a) {
    a.copy(a.device, a.host, cudaMemcpyHostToDevice);
    a.copy(a.host, a.device, cudaMemcpyDeviceToHost);
    a.copy(a.device, a.device, cudaMemcpyDeviceToDevice);
    ok(cudaStreamSynchronize(a.stream));
    ok(cudaStreamDestroy(a.stream));
    ok(cudaFree(a.device));
  }),
        "no misuse");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyHostToDevice, true>), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyDefault, true>), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyDeviceToHost, false>), "");
  CHECK(aborts(copy_of_pageable_memory<cudaMemcpyDefault, false>), "");
  CHECK(aborts([](const Line& a) { a.copy(a.host, a.device, cudaMemcpyHostToDevice); }), "the reverse of its kind");
  CHECK(aborts([](const Line& a) { a.copy(a.host + 1, a.device, cudaMemcpyDeviceToHost); }), "past the end");
  CHECK(aborts([](const Line& a) {
          const auto call = [](void* stream) { ok(cudaStreamQuery(static_cast<cudaStream_t>(stream))); };
          ok(cudaLaunchHostFunc(a.stream, call, a.stream));
          ok(cudaStreamSynchronize(a.stream));
        }),
        "CUDA in a host function");
  return finish();
}
