#include "cpu/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

namespace jaxcgx::cpu {
namespace {

// kChoices has the kernels that were built, from the fastest to the slowest. runs() returns whether this processor and
// its operating system can run the kernels.
struct Choice {
  const Kernels* kernels;
  bool (*runs)();
};
const Choice kChoices[] = {
#if defined(JAXCGX_HAS_avx512)
    {&avx512::kKernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
#endif
#if defined(JAXCGX_HAS_avx2)
    {&avx2::kKernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#if defined(JAXCGX_HAS_portable)
    {&portable::kKernels, [] { return true; }},
#endif
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
    const auto c = std::find_if(std::begin(kChoices), std::end(kChoices), [](const Choice& c) { return c.runs(); });
    if (c == std::end(kChoices)) {
      throw std::runtime_error(std::string("built for the processor of another machine: it has the ") +
                               kChoices[0].kernels->name + " kernels alone (JAXCGX_KERNELS=NATIVE)");
    }
    selected = k = c->kernels;
  }
  return *k;
}

}  // namespace jaxcgx::cpu
