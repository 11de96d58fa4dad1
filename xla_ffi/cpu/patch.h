// Patches of words on a CPU: docs/wire-format.md#patches, as jaxcgx/patch/words.py has it in jnp.
#pragma once

#include <string_view>
#include <vector>

#include "codec/patch.h"
#include "cpu/cpu.h"

namespace jaxcgx::cpu {

struct PatchLeaf {
  int64_t words, width;  // a word has `width` bytes: 1, 2, 4 or 8
  const void* old;
  void* now;                       // the new words, which only apply_patch writes
  std::string_view heads, blocks;  // of the patch, for apply_patch
};

struct PatchDigests {
  std::vector<uint64_t> old, now;  // of each leaf
};

// One block after another, of all leaves.
struct PatchParts {
  std::vector<PatchHead> heads;
  std::vector<std::vector<uint8_t>> blocks;
};

inline int64_t patch_blocks(const PatchLeaf& x) { return div_up(x.words, kPatchBlock); }

PatchDigests encode_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, PatchParts* parts);
// Returns false if the heads and blocks are not what encode_patch gives for such leaves. Any bytes are safe.
bool apply_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, PatchDigests* digests);
// Copies parts to one place, one after another.
void join(const std::vector<std::string_view>& parts, const Pool& pool, uint8_t* out);
uint64_t digest_of(const void* data, int64_t bytes, const Pool& pool);

}  // namespace jaxcgx::cpu
