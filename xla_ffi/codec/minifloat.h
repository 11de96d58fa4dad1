// Conversion between float32 and small floating-point formats. A code has a sign, an exponent with IEEE's bias and a
// mantissa. There are denormals, but no NaN and no infinity.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

template <int kExponent, int kMantissa>
struct Minifloat {
  static constexpr int kSign = kExponent + kMantissa;  // the position of the sign bit
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kDrop = 23 - kMantissa;
  // 1 is kCount times the smallest denormal. Numbers whose bits are below kNormal are multiples of that denormal.
  static constexpr float kCount = static_cast<float>(1 << (kMantissa + kBias - 1));
  static constexpr int kNormal = (128 - kBias) << 23;

  // Returns the code of the nearest number, ties to even. The caller ensures that no y rounds past the largest number.
  template <class V>
  CGX_HD static typename V::I encode(typename V::F y) {
    using I = typename V::I;
    const I magnitude = bits(y) & V::splat(0x7fffffff);
    const I even = shr(magnitude, kDrop) & V::splat(1);
    const I normal = shr(magnitude + V::splat((1 << (kDrop - 1)) - 1 - ((127 - kBias) << 23)) + even, kDrop);
    // Adding 2^23 times the smallest denormal rounds to a multiple of it.
    const I denormal = bits(as_float(magnitude) + V::splat(8388608.0f / kCount)) - bits(V::splat(8388608.0f / kCount));
    const I code = select(less(magnitude, V::splat(kNormal)), denormal, normal);
    return code | (shr(bits(y), 31 - kSign) & V::splat(1 << kSign));
  }

  // Returns the number of a code.
  template <class V>
  CGX_HD static typename V::F decode(typename V::I code) {
    const auto magnitude = shl(code & V::splat((1 << kSign) - 1), kDrop),
               sign = shl(code & V::splat(1 << kSign), 31 - kSign);
    if constexpr (kExponent < 4) {  // many codes are denormals, and as float32 denormals they would be slow on CPUs
      const auto normal = magnitude + V::splat((127 - kBias) << 23);
      const auto one = V::splat(float_of((128 - kBias) << 23));  // the smallest normal number
      const auto denormal = bits(as_float(magnitude + bits(one)) - one);
      return as_float(select(less(magnitude, V::splat(1 << 23)), denormal, normal) | sign);
    }
    // Read as a float32, the exponent and the mantissa give a number that is too small by a factor of 2^(127 - kBias).
    // This holds for denormals, too.
    return as_float(magnitude | sign) * V::splat(float_of((254 - kBias) << 23));
  }
};

}  // namespace jaxcgx
