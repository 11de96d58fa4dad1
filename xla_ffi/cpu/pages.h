// Huge pages for large results.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxcgx::cpu {

// Asks for huge pages for `bytes` bytes at p. Existing contents stay. Without huge pages, writing a result to fresh
// memory causes a page fault per 4 KiB page, and for a decoded message these faults take longer than decoding. With
// transparent_hugepage=madvise, Linux gives huge pages only to memory that a program asks for.
inline void ask_for_large_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jaxcgx::cpu
