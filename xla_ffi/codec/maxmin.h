// MaxMin: 2^bits levels from the bucket's minimum to its maximum, with nearest or stochastic rounding. CGX's quantizer.
// Metadata of a bucket: unit, base (two floats).
#pragma once

#include "codec/grid.h"

namespace jaxcgx {

struct MaxMin {
  static constexpr Kind kKind = Kind::kMaxMin;
  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec& c) {
    const float scale = scale_of(largest_of(s)), steps = static_cast<float>((1 << c.bits) - 1);
    const float lo = s.lo * scale, range = s.hi * scale - lo;
    Grid g = make_grid(s, range > 0.0f ? unit_of(range, steps, scale) : 0.0f, steps, scale);
    g.base = s.lo + 0.0f;  // turns -0 into +0: the sign of a zero minimum depends on the order of the search
    g.origin = lo;
    g.finite = g.finite && is_finite(g.base + g.unit * steps);
    return g;
  }

  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid& g) {
    return round_int((x - V::splat(g.origin)) * V::splat(g.inv));
  }

  // Rounds stochastically: adds 16 random bits to the level in 16.16 fixed point, then drops the fraction. The addition
  // is an integer one, so the compiler cannot fuse it with the multiplication.
  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid& g, typename V::I noise) {
    const typename V::I fixed = round_int((x - V::splat(g.origin)) * V::splat(g.inv * 65536.0f));
    return min(shr(fixed + noise, 16), V::splat((1 << kBits) - 1));
  }

  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return to_float(code);
  }
};

}  // namespace jaxcgx
