// Cast: every element as bfloat16 or float16, with nearest or stochastic rounding, without buckets or metadata. Leaves
// of these two dtypes are read and written by the same conversions. Magnitudes that round past the format's largest
// become infinity. Every NaN becomes the canonical NaN.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

template <DType kFormat>
struct Cast {
  static_assert(kFormat == DType::kBF16 || kFormat == DType::kF16, "Cast goes to a 16-bit format");
  static constexpr uint32_t kNaN = kFormat == DType::kBF16 ? 0x7fc0 : 0x7e00;

  // Returns the 16 bits of x. Rounds by adding `noise`, or a constant that rounds ties to even, to the bits that are
  // dropped. A carry into the exponent is correct.
  template <class V, bool kStochastic>
  CGX_HD static typename V::I to_bits(typename V::F x, typename V::I noise) {
    using I = typename V::I;
    const I raw = bits(x);
    // All NaNs become 0x7f800001, so that no addition below overflows.
    const I magnitude = min(raw & V::splat(0x7fffffff), V::splat(0x7f800001));
    constexpr int kDrop = kFormat == DType::kBF16 ? 16 : 13;
    I round_up = shr(magnitude, kDrop) & V::splat(1);
    round_up = kStochastic ? shr(noise, 16 - kDrop) : round_up + V::splat((1 << (kDrop - 1)) - 1);
    I code = shr(magnitude + round_up, kDrop);
    if constexpr (kFormat == DType::kF16) {
      code = min(code - V::splat(112 << 10), V::splat(0x7c00));
      // A float16 below 2^-14 is a multiple of 2^-24.
      const auto small = as_float(min(magnitude, V::splat(0x38800000)));
      const I denormal =
          kStochastic ? shr(round_int(small * V::splat(0x1p40f)) + noise, 16) : round_int(small * V::splat(0x1p24f));
      code = select(less(magnitude, V::splat(0x38800000)), denormal, code);
    }
    code = select(less(V::splat(0x7f800000), magnitude), V::splat(static_cast<int32_t>(kNaN)),
                  code | (shr(raw, 16) & V::splat(0x8000)));
    return code;
  }

  // Returns the float32 of 16 bits.
  template <class V>
  CGX_HD static typename V::F from_bits(typename V::I code) {
    if constexpr (kFormat == DType::kBF16) {
      return as_float(shl(code, 16));
    } else {
      const typename V::I magnitude = code & V::splat(0x7fff), sign = shl(code & V::splat(0x8000), 16);
      const auto normal = shl(magnitude, 13) + V::splat(112 << 23);
      const auto denormal = bits(to_float(magnitude) * V::splat(0x1p-24f));
      const auto special = shl(magnitude, 13) | V::splat(0x7f800000);
      const auto number = select(less(magnitude, V::splat(0x400)), denormal, normal);
      return as_float(select(less(V::splat(0x7bff), magnitude), special, number) | sign);
    }
  }
};

}  // namespace jaxcgx
