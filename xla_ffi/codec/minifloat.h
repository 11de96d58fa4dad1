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
  static constexpr int32_t kNormal = (128 - kBias) << 23;  // the bits of the smallest normal number

  // Returns the code of the nearest number, ties to even. The caller ensures that no y rounds past the largest number.
  template <class V>
  CGX_HD static typename V::I encode(typename V::F y) {
    const auto magnitude = bits(y) & V::splat(0x7fffffff);
    // The distance between neighbours of y is 2^-kMantissa of the power of two below y, and for denormals as large as
    // for the smallest normal number. Adding 2^23 times this distance rounds to a multiple of it.
    const auto power = max(magnitude, V::splat(kNormal)) & V::splat(0x7f800000);
    const auto magic = power + V::splat(kDrop << 23);
    const auto multiple = bits(as_float(magnitude) + as_float(magic)) - magic;
    const auto code = multiple + (shr(power, kDrop) - V::splat(kNormal >> kDrop));
    return code | (shr(bits(y), 31 - kSign) & V::splat(1 << kSign));
  }

  // Returns the code of one of the two neighbours of y, chosen by 16 random bits: on average the number is y, within
  // 2^-17 of the distance of its neighbours. With noise of 0xffff, it is the neighbour with the larger magnitude.
  template <class V>
  CGX_HD static typename V::I encode(typename V::F y, typename V::I noise) {
    const auto magnitude = bits(y) & V::splat(0x7fffffff);
    // A denormal is a whole number of the smallest one. It is rounded in 16.16 fixed point.
    const auto small =
        as_float(min(magnitude, V::splat(kNormal))) * V::splat(float_of((142u + kMantissa + kBias) << 23));
    const auto denormal = shr(round_int(small) + noise, 16);
    const auto normal = shr(magnitude + shl(noise, kDrop - 16) + V::splat(1 << (kDrop - 17)), kDrop) -
                        V::splat((127 - kBias) << kMantissa);
    return select(less(magnitude, V::splat(kNormal)), denormal, normal) |
           (shr(bits(y), 31 - kSign) & V::splat(1 << kSign));
  }

  // Returns the number of a code.
  template <class V>
  CGX_HD static typename V::F decode(typename V::I code) {
    const auto magnitude = shl(code & V::splat((1 << kSign) - 1), kDrop),
               sign = shl(code & V::splat(1 << kSign), 31 - kSign);
    if constexpr (kExponent < 4) {  // many codes are denormals, and as float32 denormals they would be slow on CPUs
      const auto normal = magnitude + V::splat((127 - kBias) << 23);
      const auto one = V::splat(as_float(kNormal));
      const auto denormal = bits(as_float(magnitude + bits(one)) - one);
      return as_float(select(less(magnitude, V::splat(1 << 23)), denormal, normal) | sign);
    }
    // Read as a float32, the exponent and the mantissa give a number that is too small by a factor of 2^(127 - kBias).
    // This holds for denormals, too.
    return as_float(magnitude | sign) * V::splat(float_of((254 - kBias) << 23));
  }
};

}  // namespace jaxcgx
