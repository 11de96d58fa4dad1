// Float8: e4m3 or e5m2 (OCP's encodings, no infinities written) times a scale per bucket that puts the largest
// magnitude at the format's maximum. Metadata of a bucket: the scale (one float).
#pragma once

#include "codec/grid.h"

namespace jaxcgx {

// kExponent = 4: e4m3, maximum 448. kExponent = 5: e5m2, maximum 57344.
template <int kExponent>
struct Float8 {
  static constexpr Kind kKind = Kind::kFloat8;
  static constexpr int kMantissa = 7 - kExponent;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kDrop = 23 - kMantissa;
  static constexpr float kLargest = kExponent == 4 ? 448.0f : 57344.0f;
  // 1 is kCount steps of the smallest denormal. Numbers below kNormal are counts of such steps.
  static constexpr float kCount = static_cast<float>(1 << (kMantissa + kBias - 1));
  static constexpr int kNormal = (128 - kBias) << 23;

  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec&) {
    return symmetric_grid(s, kLargest);
  }

  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid& g) {
    using I = typename V::I;
    const auto y = x * V::splat(g.inv);
    const I magnitude = bits(y) & V::splat(0x7fffffff);
    const I even = shr(magnitude, kDrop) & V::splat(1);
    const I normal = shr(magnitude + V::splat((1 << (kDrop - 1)) - 1 - ((127 - kBias) << 23)) + even, kDrop);
    // Adding 2^23 steps rounds to a whole step.
    const I denormal = bits(as_float(magnitude) + V::splat(8388608.0f / kCount)) - bits(V::splat(8388608.0f / kCount));
    // No number of a bucket rounds past the largest: unit was rounded up.
    const I code = select(less(magnitude, V::splat(kNormal)), denormal, normal);
    return code | (shr(bits(y), 24) & V::splat(0x80));
  }

  // The number of a code, before the scale. Codes that are never written follow the same formula.
  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    // The code's exponent and mantissa, taken as those of a float32, are too small by 2^(127 - kBias), denormals
    // included.
    const auto small = as_float(shl(code & V::splat(0x7f), kDrop) | shl(code & V::splat(0x80), 24));
    return small * V::splat(float_of((254 - kBias) << 23));
  }
};

}  // namespace jaxcgx
