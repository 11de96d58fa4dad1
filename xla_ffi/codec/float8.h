// Float8: e4m3 or e5m2 (OCP's encodings, but encoders write no infinities) times a scale per bucket. The scale maps the
// format's maximum to the bucket's largest magnitude. Metadata of a bucket: the scale (one float).
#pragma once

#include "codec/grid.h"
#include "codec/minifloat.h"

namespace jaxcgx {

// kExponent = 4: e4m3, maximum 448. kExponent = 5: e5m2, maximum 57344.
template <int kExponent>
struct Float8 {
  static constexpr Kind kKind = Kind::kFloat8;
  using Element = Minifloat<kExponent, 7 - kExponent>;
  static constexpr float kLargest = kExponent == 4 ? 448.0f : 57344.0f;

  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec&) {
    return symmetric_grid(s, kLargest);
  }

  // No element rounds past the format's maximum, because unit was rounded up.
  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid& g) {
    return Element::template encode<V>(x * V::splat(g.inv));
  }

  // Returns the value of a code, without the scale. Codes that no encoder writes are decoded by the same rule.
  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return Element::template decode<V>(code);
  }
};

}  // namespace jaxcgx
