// AbsMax: symmetric levels -q..q with q = 2^(bits-1) - 1, stored as codes 0..2q. 0 decodes to exactly 0.
// Metadata of a bucket: unit (one float).
#pragma once

#include "codec/grid.h"

namespace jaxcgx {

struct AbsMax {
  static constexpr Kind kKind = Kind::kAbsMax;
  CGX_HD static constexpr int top(int bits) { return (1 << (bits - 1)) - 1; }

  CGX_HD static Grid grid(const Stats& s, float /*sum*/, int64_t /*n*/, const Codec& c) {
    return symmetric_grid(s, static_cast<float>(top(c.bits)));
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
