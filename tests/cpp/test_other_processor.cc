// A build for the processor of another machine.
#include "check.h"

#define JAXCGX_HAS_avx2
#define __builtin_cpu_supports(feature) false
#include "cpu/kernels.cc"

const jaxcgx::cpu::Kernels jaxcgx::cpu::avx2::kKernels = {"avx2"};

int main() {
  using namespace jaxcgx;
  std::string error;
  try {
    cpu::kernels();
  } catch (const std::runtime_error& e) {
    error = e.what();
  }
  CHECK(error.find("the avx2 kernels alone") != std::string::npos, error);
  CHECK(!cpu::select_kernels("avx2"), "");
  CHECK(!cpu::select_kernels("portable"), "it was not built");
  return test::finish();
}
