// Sign: one bit for each element, its sign, which decodes to plus or minus the mean magnitude of the bucket. Metadata
// of a bucket: the mean (one float).
#pragma once

#include "codec/grid.h"

namespace jaxcgx {

struct Sign {
  static constexpr Kind kKind = Kind::kSign;

  CGX_HD static Grid grid(const Stats& s, float sum, int64_t n, const Codec&) {
    const float largest = largest_of(s), scale = scale_of(largest);
    const float mean = s.lo == s.hi ? largest * scale : unit_of(sum, static_cast<float>(n), scale);
    return make_grid(s, mean, 1.0f, scale);
  }

  template <class V, int kBits>
  CGX_HD static typename V::I quantize(typename V::F x, const Grid&) {
    return shr(bits(x), 31) ^ V::splat(1);
  }

  template <class V, int kBits>
  CGX_HD static typename V::F value(typename V::I code) {
    return to_float(code + code - V::splat(1));
  }
};

}  // namespace jaxcgx
