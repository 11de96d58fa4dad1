// Micro: small floats in blocks that share a scale of 8 bits. NVIDIA's NVFP4: e2m1, a scale in e4m3 for 16 elements,
// and a float32 scale for the bucket. OCP's MX: e2m1 or e4m3, a power of two (e8m0) for 32 elements, and no metadata.
//
// A row of a block of codec/pack.h has 16 elements, so scales belong to one row or to two. All blocks have 16 lanes,
// also the last one of a bucket: elements past its end are 0. The scales of a block, a byte each, follow its words.
#pragma once

#include <type_traits>

#include "codec/grid.h"
#include "codec/minifloat.h"
#include "codec/traits.h"

namespace jaxcgx {

template <MicroFormat kFormat>
struct Micro {
  static constexpr Kind kKind = Kind::kMicro;
  static constexpr bool kPower = kFormat != kNvfp4;
  using Element = std::conditional_t<kFormat == kMxfp8, Minifloat<4, 3>, Minifloat<2, 1>>;
  using Scale = Minifloat<4, 3>;  // NVFP4's
  static constexpr int kScales = scales_of(kFormat), kScaleRows = kRows / kScales;
  static constexpr int kLargestExponent = kFormat == kMxfp8 ? 8 : 2;
  static constexpr float kLargest = kFormat == kMxfp8 ? 448.0f : 6.0f, kLargestScale = 448.0f;

  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec&) {
    if (kPower) return {1.0f, 0.0f, 1.0f, 0.0f, 1.0f, true};
    constexpr float kSteps = kLargestScale * kLargest;
    const float largest = largest_of(s), scale = scale_of(largest);
    return make_grid(s, unit_of(largest * scale, kSteps, scale), kSteps, scale);
  }

  // The code of the scale of a block, from its largest magnitude; infinity stands for everything that is not finite,
  // which NVFP4's grid has caught.
  CGX_HD static int32_t scale_code(float largest) {
    const int32_t exponent = bits(largest) >> 23;
    if (kPower) return exponent == 255 ? 255 : exponent > kLargestExponent ? exponent - kLargestExponent : 0;
    return Scale::template encode<Scalar>(min(largest / kLargest, kLargestScale));
  }
  CGX_HD static float scale(int32_t code) {
    if (!kPower) return Scale::template decode<Scalar>(code);
    return code == 0 ? 0x1p-127f : code == 255 ? float_of(kNaNBits) : as_float(code << 23);
  }
  // What the elements are multiplied by.
  CGX_HD static float inverse(int32_t code) {
    if (kPower) return as_float((254 - code) << 23);
    return code == 0 ? 0.0f : 1.0f / scale(code);
  }
  // The codes of a block that is not finite are 0.
  CGX_HD static bool is_number(int32_t code) { return !kPower || code != 255; }

  // The nearest element, at most the largest.
  template <class V>
  CGX_HD static typename V::I quantize(typename V::F y) {
    const auto magnitude = min(bits(y) & V::splat(0x7fffffff), V::splat(static_cast<int32_t>(bits(kLargest))));
    return Element::template encode<V>(as_float(magnitude | (bits(y) & V::splat(INT32_MIN))));
  }

  // The number of a code, before the scales.
  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return Element::template decode<V>(code);
  }
};

}  // namespace jaxcgx
