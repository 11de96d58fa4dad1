// Patches of words on a CPU: docs/wire-format.md#patches, as jaxcgx/patch/words.py has it in NumPy.
#pragma once

#include <string_view>
#include <vector>

#include "cpu/cpu.h"

namespace jaxcgx::cpu {

struct PatchLeaf {
  int64_t words, width;  // a word has `width` bytes: 1, 2, 4 or 8
  const void* old;
  void* now;  // the new words, which only apply_patch writes
};

struct PatchDigests {
  std::vector<uint64_t> old, now;  // of each leaf
};

// Writes the heads and the blocks to `body`.
PatchDigests encode_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, std::vector<uint8_t>* body);
// Returns false if `body` is not what encode_patch writes for such leaves. Any bytes are safe.
bool apply_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, std::string_view body, PatchDigests* digests);
uint64_t digest_of(const void* data, int64_t bytes, const Pool& pool);

}  // namespace jaxcgx::cpu
