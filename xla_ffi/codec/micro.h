// Micro: small floats in groups that share a scale of 8 bits. There are two families:
//  - NVIDIA's NVFP4: e2m1 elements, an e4m3 scale for each 16 elements, and a float32 scale for the bucket.
//  - OCP's MX: e2m1 or e4m3 elements, a power of two (e8m0) for each 32 elements, and no metadata.
//
// With stochastic rounding, scales are rounded up, so that no element is above the largest number. With `rotate`, which
// only NVFP4 has, a bucket is rotated with a random seed, and rounded to nearest. Then its unit is (sum of y * y) /
// (sum of y * value), which makes the codec unbiased (codec/eden.h has the order of both sums, and the metadata).
//
// A row of a block (codec/pack.h) has 16 elements, so a scale belongs to one row or to two. All blocks have 16 lanes,
// including the last block of a bucket, where elements past the end are 0. The scales of a block, one byte each, follow
// its words.
#pragma once

#include <type_traits>

#include "codec/grid.h"
#include "codec/minifloat.h"
#include "codec/traits.h"

namespace jaxcgx {

// The largest value of a rotated bucket, with a scale of 1/2. Values are multiples of 2^-10, so all sums of 4096 values
// are exact. Larger values, which no encoder writes, are decoded as this one.
constexpr float kMostValue = 3.0f;

template <MicroFormat kFormat>
struct Micro {
  static constexpr Kind kKind = Kind::kMicro;
  static constexpr bool kPower = kFormat != kNvfp4;
  using Element = std::conditional_t<kFormat == kMxfp8, Minifloat<4, 3>, Minifloat<2, 1>>;
  using Scale = Minifloat<4, 3>;  // NVFP4 only
  static constexpr int kScales = scales_of(kFormat), kScaleRows = kRows / kScales;
  static constexpr int kLargestExponent = kFormat == kMxfp8 ? 8 : 2;
  static constexpr float kLargest = kFormat == kMxfp8 ? 448.0f : 6.0f, kLargestScale = 448.0f;
  // Carries into the exponent of numbers above a power of two times kLargest.
  static constexpr int32_t kCarry = kFormat == kMxfp8 ? 0x1fffff : 0x3fffff;

  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec& c) {
    if (kPower) return {1.0f, 0.0f, 1.0f, 0.0f, 1.0f, true};
    const float steps = c.rotate ? kMostValue : kLargestScale * kLargest;
    const float largest = largest_of(s), scale = scale_of(largest);
    return make_grid(s, unit_of(largest * scale, steps, scale), steps, scale);
  }

  // Returns the code of a scale from the largest magnitude of its elements. An infinite `largest` means that an element
  // is not finite. With NVFP4 the whole bucket then decodes to NaN (Grid::finite), so only MX has a code for it.
  template <class V, bool kStochastic = false>
  CGX_HD static typename V::I scale_code(typename V::F largest) {
    if constexpr (kPower) {
      const auto above = shr(bits(largest) + V::splat(kStochastic ? kCarry : 0), 23) - V::splat(kLargestExponent);
      return select(less(V::splat(254), shr(bits(largest), 23)), V::splat(255),
                    select(less(above, V::splat(0)), V::splat(0), above));
    } else {
      const auto scale = min(largest / V::splat(kLargest), V::splat(kLargestScale));
      if constexpr (kStochastic)
        return Scale::template encode<V>(scale, V::splat(0xffff));
      else
        return Scale::template encode<V>(scale);
    }
  }
  // Returns the scale of a code.
  template <class V>
  CGX_HD static typename V::F scale(typename V::I code) {
    if constexpr (kPower) {
      const auto power = select(less(code, V::splat(1)), V::splat(0x400000), shl(code, 23));  // 2^-127 is denormal
      return as_float(select(less(code, V::splat(255)), power, V::splat(static_cast<int32_t>(kNaNBits))));
    } else {
      return Scale::template decode<V>(code);
    }
  }
  // Returns the factor by which elements are multiplied before they are quantized. If the elements of a scale are not
  // all finite, the encoder sets their codes to 0 and the factor has no effect.
  template <class V>
  CGX_HD static typename V::F inverse(typename V::I code) {
    if constexpr (kPower)
      return as_float(shl(V::splat(254) - code, 23));
    else
      return select(less(code, V::splat(1)), V::splat(0.0f), V::splat(1.0f) / scale<V>(code));
  }
  // Returns whether the scale of a code is a number: an MX scale may be NaN.
  template <class V>
  CGX_HD static auto is_number(typename V::I code) {
    return less(code, V::splat(255));
  }

  // Returns the code of the nearest element or, with 16 random bits as `noise`, of one of the two neighbours.
  // Magnitudes above the largest element become the largest.
  template <class V, class... Noise>
  CGX_HD static typename V::I quantize(typename V::F y, Noise... noise) {
    const auto magnitude = min(bits(y) & V::splat(0x7fffffff), V::splat(static_cast<int32_t>(bits(kLargest))));
    return Element::template encode<V>(as_float(magnitude | (bits(y) & V::splat(INT32_MIN))), noise...);
  }

  // Returns the value of a code, without the scales.
  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return Element::template decode<V>(code);
  }
};

}  // namespace jaxcgx
