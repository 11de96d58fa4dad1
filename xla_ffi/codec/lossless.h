// Lossless keeps all bits of all elements. A piece is cut into blocks of 512 elements. A piece has the heads of its
// blocks, then their planes: the unchanged signs and mantissas, and the first digit of every exponent. An exponent far
// from the block's center has more digits. These further digits are in the chunk's overflow, after all pieces. The
// overflow has no gaps between blocks, so its unused part is at the end of the chunk.
//
// The head of a block has two bytes: the center, and half the number of the block's bytes in the overflow. A block
// whose further digits would take at least as many bytes as the upper bits of all its exponents stores its exponents
// directly: their upper bits in the overflow, and their lower two bits in the planes.
#pragma once

#include "codec/pack.h"

namespace jaxcgx {

constexpr int64_t kLosslessBlock = 512;

CGX_HD int exponent_bits(DType d) { return d == DType::kF16 ? 5 : 8; }

CGX_HD int64_t lossless_head_bytes(int64_t n) { return align16(2 * div_up(n, kLosslessBlock)); }

// Returns the bytes of the planes of a block of n elements.
CGX_HD int64_t lossless_plane_bytes(DType d, int64_t n) {
  return packed_bytes(n, 2) + (d == DType::kF32 ? 3 * n : d == DType::kBF16 ? n : n + packed_bytes(n, 3));
}

// Returns the most bytes that a block of n elements can have in the overflow.
CGX_HD int64_t lossless_most_bytes(DType d, int64_t n) { return div_up(packed_bytes(n, exponent_bits(d) - 2), 2) * 2; }

// Returns the bytes of the heads and planes of a piece of n elements.
CGX_HD int64_t lossless_bytes(DType d, int64_t n) {
  return lossless_head_bytes(n) + n / kLosslessBlock * lossless_plane_bytes(d, kLosslessBlock) +
         lossless_plane_bytes(d, n % kLosslessBlock);
}
// Returns the most bytes that a piece of n elements can have in the overflow.
CGX_HD int64_t lossless_overflow_bytes(DType d, int64_t n) {
  return n / kLosslessBlock * lossless_most_bytes(d, kLosslessBlock) + lossless_most_bytes(d, n % kLosslessBlock);
}

// The arithmetic for leaves of one dtype.
template <DType kType>
struct Lossless {
  static constexpr int kMantissa = kType == DType::kF32 ? 23 : kType == DType::kBF16 ? 7 : 10;
  static constexpr int kExponent = kType == DType::kF16 ? 5 : 8;
  static constexpr int32_t kFraction = (1 << kMantissa) - 1, kLargest = (1 << kExponent) - 1;
  static constexpr int32_t kZero = 10;  // the code of exponent 0: level 2, digit 2

  template <class V>
  CGX_HD static typename V::I exponent(typename V::I bits) {
    return shr(bits, kMantissa) & V::splat(kLargest);
  }
  // Returns the mantissa with the sign in the bit above it.
  template <class V>
  CGX_HD static typename V::I rest(typename V::I bits) {
    return (bits & V::splat(kFraction)) | (shr(bits, kExponent) & V::splat(1 << kMantissa));
  }
  // Returns the bits of an element: the inverse of exponent() and rest().
  template <class V>
  CGX_HD static typename V::I bits(typename V::I exponent, typename V::I rest) {
    return (rest & V::splat(kFraction)) | shl(exponent, kMantissa) | shl(shr(rest, kMantissa), kMantissa + kExponent);
  }

  // Returns the center of a block: one above the mean of its nonzero exponents. Takes their sum and their number.
  CGX_HD static int32_t center(int32_t sum, int32_t number) {
    return number == 0 ? 0 : min(sum / number + 1, kLargest);
  }

  // Returns the code of an exponent: 4 * level + digit. In each level, digits 0 and 1 are the next two exponents from
  // the center down, and digit 2 is the next exponent above the center, because normally distributed numbers have about
  // twice as many exponents below the center. Digit 2 of level 2 is an exception: it is exponent 0, the exponent of
  // zeros. Digit 3 means that the exponent is in a later level, so an element has a digit 3 for each level before its
  // own.
  template <class V>
  CGX_HD static typename V::I code(typename V::I exponent, int32_t center) {
    const auto down = V::splat(center) - exponent, up = exponent - V::splat(center);
    const auto below = shl(shr(down, 1), 2) | (down & V::splat(1));
    const auto above = shl(up, 2) + select(less(V::splat(2), up), V::splat(2), V::splat(-2));
    const auto other = select(less(down, V::splat(0)), above, below);
    return select(less(exponent, V::splat(1)), V::splat(center == 0 ? 0 : kZero), other);
  }
  // Returns the exponent of a code: the inverse of code().
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
