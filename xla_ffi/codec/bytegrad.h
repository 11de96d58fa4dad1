// ByteGrad: 8-bit codes whose levels are integer multiples of the unit, so that 0 decodes to exactly 0. Bagua's
// quantizer. Metadata of a bucket: unit, base (two floats). Decoding is the same as for MaxMin.
#pragma once

#include "codec/grid.h"

namespace jaxcgx {

struct ByteGrad {
  static constexpr Kind kKind = Kind::kByteGrad;
  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec& c) {
    const float scale = scale_of(largest_of(s));
    float range = s.hi * scale - s.lo * scale;
    if (c.compatible) range = range + 1e-7f * scale;  // Bagua's absolute epsilon
    Grid g = make_grid(s, range > 0.0f ? unit_of(range, 255.0f, scale) : 0.0f, 255.0f, scale);
    const float unit = g.unit * scale;
    g.origin = round(s.hi * scale * g.inv) - 255.0f;
    g.base = unit > 0.0f ? g.origin * unit * (1.0f / scale) + 0.0f : s.lo + 0.0f;
    g.finite = g.finite && is_finite(g.base + g.unit * 255.0f);
    return g;
  }

  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid& g) {
    const typename V::F level = round(x * V::splat(g.inv)) - V::splat(g.origin);
    return round_int(min(max(level, V::splat(0.0f)), V::splat(255.0f)));
  }

  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return to_float(code);
  }
};

}  // namespace jaxcgx
