// AbsMax: symmetric levels -q..q with q = 2^(bits-1) - 1, stored as 0..2q; 0 decodes to exactly 0.
// Metadata of a bucket: unit (one float).
#pragma once

#include "codec/grid.h"

namespace jaxcgx {

struct AbsMax {
  static constexpr int kMeta = 1;

  CGX_HD static constexpr int top(int bits) { return (1 << (bits - 1)) - 1; }

  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec& c) {
    const float largest = largest_of(s), scale = scale_of(largest), scaled = largest * scale;
    // A constant bucket is level 1 or -1 of a unit that is the constant: exact.
    const float steps = s.lo == s.hi ? 1.0f : static_cast<float>(top(c.bits));
    return make_grid(s, s.lo == s.hi ? scaled : unit_of(scaled, steps, scale), steps, scale);
  }

  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid& g) {
    return round_int(x * V::splat(g.inv)) + V::splat(top(kBits));
  }

  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return to_float(code - V::splat(top(kBits)));
  }
};

}  // namespace jaxcgx
