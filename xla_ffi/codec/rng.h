// Random bits for stochastic rounding: Philox4x32-10 (Salmon et al., SC'11). It is counter-based: the bits of an
// element depend only on the key, the leaf and the element's index in it.
//
// Element e belongs to block e / 128, row (e % 128) / 16, lane e % 16. The four words at the counter
// (16 * block + lane as 64 bits, leaf, 0) serve the eight rows of that lane: row r takes the low (r even) or
// high (r odd) half of word r / 2. So one call gives 16 bits to each of eight elements, and the 16 lanes of a vector
// are 16 consecutive counters.
//
// The key has a third word, an offset. It is added to the 16 bits of every element, modulo 2^16. Ranks that share the
// first two words and have evenly spaced offsets then use the same random numbers, shifted by equal distances:
// jaxcgx/exchange/message.py.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

constexpr int kKeyWords = 3;

// Multiplies two unsigned 32-bit numbers and returns both words of the product.
CGX_HD void mul_wide(int32_t a, uint32_t b, int32_t* high, int32_t* low) {
  const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(a)) * b;
  *high = static_cast<int32_t>(product >> 32);
  *low = static_cast<int32_t>(product);
}

// Replaces the counter in `word` by its four random words.
template <class V>
CGX_HD void philox(typename V::I word[4], uint32_t key0, uint32_t key1) {
  using I = typename V::I;
  for (int round = 0; round < 10; ++round) {
    I high0, low0, high1, low1;
    mul_wide(word[0], 0xD2511F53u, &high0, &low0);
    mul_wide(word[2], 0xCD9E8D57u, &high1, &low1);
    const I word1 = word[1], word3 = word[3];
    word[0] = high1 ^ word1 ^ V::splat(static_cast<int32_t>(key0));
    word[1] = low1;
    word[2] = high0 ^ word3 ^ V::splat(static_cast<int32_t>(key1));
    word[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Returns the 16 random bits of row `row`, from the words of its lane.
template <class V>
CGX_HD typename V::I noise_of(const typename V::I word[4], int row, uint32_t offset) {
  const typename V::I half = (row & 1) ? shr(word[row >> 1], 16) : word[row >> 1] & V::splat(0xffff);
  return (half + V::splat(static_cast<int32_t>(offset & 0xffff))) & V::splat(0xffff);
}

}  // namespace jaxcgx
