// Eden: a rotated bucket with the levels of the Lloyd-Max quantizer of the standard normal distribution (EDEN and
// DRIVE, Vargaftik et al.). There are half = 2^(bits-1) positive levels. Code half + i is level i, and code
// half - 1 - i is its negative. Metadata of a bucket: unit, and 1 + seed * 2^-23 (two floats).
//
// Let y be the rotated bucket, square the sum of y * y, and variance = square / size. Bounds are between neighbouring
// levels. The level of y is the number of bounds with bound * bound * variance < y * y. unit = square / (sum of
// |y| * level), which makes the codec unbiased if y is normally distributed. Products in both sums are short_product.
//
// The order of both sums: first the rows of each lane of a block (codec/pack.h), in order. Then, for each lane, blocks
// 2 * b and 2 * b + 1, then neighbouring sums of 2 blocks, of 4, and so on. Last, lanes j and j + 8, j + 4, j + 2, j +
// 1.
#pragma once

#include "codec/rotation.h"

namespace jaxcgx {

constexpr int kMostLevels = 32;  // the most positive levels

// Returns positive level i, in ascending order.
CGX_HD constexpr float normal_level(int bits, int i) {
  constexpr int16_t kLevels[] = {
      // times 512
      409,                                                                                        //
      232, 773,                                                                                   //
      125, 387, 688, 1102,                                                                        //
      66,  199, 336, 482,  643, 828, 1059, 1399,                                                  //
      34,  101, 170, 239,  310, 383, 458,  537,  620,  710,  807,  915,  1039, 1187, 1378, 1669,  //
      17,  51,  86,  120,  155, 190, 225,  260,  296,  333,  370,  407,  446,  485,  525,  567,   //
      609, 653, 699, 747,  797, 849, 905,  965,  1029, 1099, 1177, 1265, 1368, 1494, 1659, 1917};
  return static_cast<float>(kLevels[(1 << (bits - 1)) - 1 + i]) * 0x1p-9f;
}
// Returns the bound between levels i - 1 and i.
CGX_HD constexpr float normal_bound(int bits, int i) {
  return (normal_level(bits, i - 1) + normal_level(bits, i)) * 0.5f;
}

// seed_of returns a seed of 23 bits, from the 16 random bits of each of two elements. sent_seed returns the float that
// carries a seed in its mantissa. seed_sent_as returns the seed of such a float.
CGX_HD uint32_t seed_of(uint32_t first, uint32_t second) { return first | (second & 0x7fu) << 16; }
CGX_HD float sent_seed(uint32_t seed) { return float_of(0x3f800000u | seed); }
CGX_HD uint32_t seed_sent_as(float x) { return bits_of(x) & 0x7fffffu; }

}  // namespace jaxcgx
