#include "cpu/kernels.h"

#include <atomic>
#include <cstring>

namespace jaxcgx::cpu {
namespace {

// kChoices is ordered from the fastest to the slowest. runs() returns whether this processor and its operating system
// can run the kernels.
struct Choice {
  const Kernels* kernels;
  bool (*runs)();
};
const Choice kChoices[] = {
#if defined(JAXCGX_X86)
    {&avx512::kKernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {&avx2::kKernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {&portable::kKernels, [] { return true; }},
};

std::atomic<const Kernels*> selected{nullptr};

}  // namespace

bool select_kernels(const char* name) {
  for (const Choice& c : kChoices) {
    if (std::strcmp(c.kernels->name, name) == 0 && c.runs()) {
      selected = c.kernels;
      return true;
    }
  }
  return false;
}

const Kernels& kernels() {
  const Kernels* k = selected.load(std::memory_order_relaxed);
  if (k == nullptr) {
    for (const Choice& c : kChoices) {
      if (c.runs()) {
        k = c.kernels;
        break;
      }
    }
    selected = k;
  }
  return *k;
}

}  // namespace jaxcgx::cpu
