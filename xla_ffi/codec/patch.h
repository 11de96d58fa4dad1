// The parts of a patch's blocks (docs/wire-format.md#patches), as jaxcgx/patch/words.py has them in jnp.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

constexpr int64_t kPatchBlock = 1 << 15;  // words of a block
constexpr int kPatchWhole = 65535;  // in place of the number of changed words: the block has all words as they are

struct PatchHead {
  uint16_t changed, small, raw;
};
static_assert(sizeof(PatchHead) == 6, "as in the wire format");

CGX_HD int64_t row_bytes(int64_t bits) { return div_up(bits, 8); }

// Returns the bytes of a small step.
CGX_HD constexpr int64_t small_bytes(int64_t width) { return width > 2 ? width / 2 : 1; }

// How k of n indices are written.
struct PatchIndices {
  int64_t n, k, row = 0;  // bits of the first row
  int low = 0;            // bits of an index in the second row
  bool split = false;

  CGX_HD PatchIndices(int64_t n, int64_t k) : n(n), k(k) {
    if (k == 0 || k == n) return;
    while (n / k >> (low + 1) > 0) ++low;
    row = (n >> low) + k;
    split = row_bytes(row) + row_bytes(k * low) < row_bytes(n);
    if (!split) row = n, low = 0;
  }
  CGX_HD int64_t bytes() const { return row_bytes(row) + row_bytes(k * low); }
};

// Returns the bytes of a block of n words.
CGX_HD int64_t patch_bytes(const PatchHead& h, int64_t n, int64_t width) {
  if (h.changed == kPatchWhole) return n * width;
  return PatchIndices(n, h.changed).bytes() + row_bytes(2 * h.changed) + h.small * small_bytes(width) + h.raw * width;
}

// A changed word has a number, its rank + 1, so that 0 means that the word is the same: -1, 1, -2, 2, ... have 1, 2, 3,
// 4, ... A word of more than `most_small` is raw.
CGX_HD int64_t most_small(int64_t width) { return 2 + (int64_t{1} << 8 * small_bytes(width)); }
template <class T>
CGX_HD T patch_number(T old, T now) {
  const T step = static_cast<T>(now - old), sign = static_cast<T>(0 - (step >> (8 * sizeof(T) - 1)));
  return static_cast<T>(static_cast<T>(step << 1) ^ sign);
}
template <class T>
CGX_HD T patch_step(T number) {
  return static_cast<T>(number >> 1 ^ (0 - (number & 1)));
}

// Digests are over groups of words of 64 bits.
constexpr int64_t kDigestGroup = 512, kDigestBytes = 8 * kDigestGroup;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

CGX_HD constexpr uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

struct DigestFactors {
  uint64_t of[kDigestGroup];
  constexpr DigestFactors() : of{} {
    for (int64_t j = 0; j < kDigestGroup; ++j) of[j] = mix(static_cast<uint64_t>(j + 1) * kGolden) | 1;
  }
};
constexpr DigestFactors kFactors;

}  // namespace jaxcgx
