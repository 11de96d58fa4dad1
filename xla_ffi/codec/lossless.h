// Lossless: every element of a leaf, with all its bits. A piece is a head and the planes of its blocks of 512 elements:
// the signs and mantissas as they are, and the first digit of every exponent. The other digits, of exponents far from
// the block's center, are in the chunk's overflow, behind all pieces. Blocks use the overflow one behind another, so
// what is used of a chunk is at its beginning.
//
// The head of a block is two bytes: its center, and half the bytes that it has of the overflow. Where the digits would
// take more bytes than the upper bits of all exponents, these are there instead, and the first digits are the lower two
// bits.
#pragma once

#include "codec/pack.h"

namespace jaxcgx {

constexpr int64_t kLosslessBlock = 512;

CGX_HD int exponent_bits(DType d) { return d == DType::kF16 ? 5 : 8; }

CGX_HD int64_t lossless_head_bytes(int64_t n) { return align16(2 * div_up(n, kLosslessBlock)); }

// Bytes of the planes of a block of n elements.
CGX_HD int64_t lossless_plane_bytes(DType d, int64_t n) {
  return packed_bytes(n, 2) + (d == DType::kF32 ? 3 * n : d == DType::kBF16 ? n : n + packed_bytes(n, 3));
}

// Bytes that a block has of the overflow, at most.
CGX_HD int64_t lossless_most_bytes(DType d, int64_t n) { return div_up(packed_bytes(n, exponent_bits(d) - 2), 2) * 2; }

// The same of a piece: the head and planes, and the overflow.
CGX_HD int64_t lossless_bytes(DType d, int64_t n) {
  return lossless_head_bytes(n) + n / kLosslessBlock * lossless_plane_bytes(d, kLosslessBlock) +
         lossless_plane_bytes(d, n % kLosslessBlock);
}
CGX_HD int64_t lossless_overflow_bytes(DType d, int64_t n) {
  return n / kLosslessBlock * lossless_most_bytes(d, kLosslessBlock) + lossless_most_bytes(d, n % kLosslessBlock);
}

// The arithmetic of a leaf's dtype.
template <DType kType>
struct Lossless {
  static constexpr int kMantissa = kType == DType::kF32 ? 23 : kType == DType::kBF16 ? 7 : 10;
  static constexpr int kExponent = kType == DType::kF16 ? 5 : 8;
  static constexpr int32_t kFraction = (1 << kMantissa) - 1, kLargest = (1 << kExponent) - 1;
  static constexpr int32_t kZero = 10;

  template <class V>
  CGX_HD static typename V::I exponent(typename V::I bits) {
    return shr(bits, kMantissa) & V::splat(kLargest);
  }
  // The sign above the mantissa.
  template <class V>
  CGX_HD static typename V::I rest(typename V::I bits) {
    return (bits & V::splat(kFraction)) | (shr(bits, kExponent) & V::splat(1 << kMantissa));
  }
  template <class V>
  CGX_HD static typename V::I bits(typename V::I exponent, typename V::I rest) {
    return (rest & V::splat(kFraction)) | shl(exponent, kMantissa) | shl(shr(rest, kMantissa), kMantissa + kExponent);
  }

  // From the sum and the number of the exponents other than 0: one above their mean.
  CGX_HD static int32_t center(int32_t sum, int32_t number) {
    return number == 0 ? 0 : min(sum / number + 1, kLargest);
  }

  // A code is 4 * level + digit. Level k has the digits 0 and 1 for the next two exponents below the center, and 2 for
  // the next one above it: normally distributed numbers have about twice as many below. The digit 2 of level 2 is the
  // exponent 0, that of zeros. An element has a digit 3 for each level before its own.
  template <class V>
  CGX_HD static typename V::I code(typename V::I exponent, int32_t center) {
    const auto down = V::splat(center) - exponent, up = exponent - V::splat(center);
    const auto below = shl(shr(down, 1), 2) | (down & V::splat(1));
    const auto above = shl(up, 2) + select(less(V::splat(2), up), V::splat(2), V::splat(-2));
    const auto other = select(less(down, V::splat(0)), above, below);
    return select(less(exponent, V::splat(1)), V::splat(center == 0 ? 0 : kZero), other);
  }
  template <class V>
  CGX_HD static typename V::I exponent_of(typename V::I code, int32_t center) {
    const auto level = shr(code, 2), digit = code & V::splat(3);
    const auto far = select(less(V::splat(2), level), V::splat(center) + level, V::splat(0));
    const auto above = select(less(level, V::splat(2)), V::splat(center + 1) + level, far);
    const auto below = V::splat(center) - shl(level, 1) - digit;
    return select(less(V::splat(1), digit), above, below) & V::splat(kLargest);
  }
};

}  // namespace jaxcgx
