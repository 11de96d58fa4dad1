// Large pages for large results.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxcgx::cpu {

// A result on fresh memory faults once for each page that it touches, which for a decoded message takes longer than the
// decoding. Where Linux gives large pages to those that ask (transparent_hugepage=madvise), this asks; what is already
// there stays as it is.
inline void ask_for_large_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jaxcgx::cpu
