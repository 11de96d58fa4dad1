// The grid of a bucket: `unit`, the distance of two levels, and `base`, the value of level 0.
// Every codec with buckets decodes as base + unit * value(code).
//
// `unit` has 16 significant bits, rounded up. So unit * level is exact for levels of 8 bits, fused with the following
// addition or not, and the largest value of a bucket never needs a level past the last. The cost: `unit` is
// larger, by at most 2^-15 of itself.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

// The result of a pass over a bucket. A NaN or an infinity anywhere makes lo or hi not finite.
struct Stats {
  float lo, hi;
};

struct Grid {
  float unit, base;  // for decoding
  float inv;         // 1 / unit, in the scaled domain (0 where unit is 0)
  float origin;      // encoding subtracts it, in the scaled domain; ByteGrad: the level of code 0
  float scale;       // x is multiplied by this power of two before it is quantized; 1 except for extremes
  bool finite;       // false: the bucket decodes to NaN
};

// Buckets of very small or very large numbers are quantized after an exact multiplication by a power of two,
// so that neither unit nor 1 / unit leaves the normal range.
CGX_HD float scale_of(float largest) {
  if (largest >= 0x1p100f) return 0x1p-40f;
  return largest < kTiny && largest > 0.0f ? kUp : 1.0f;
}

CGX_HD float unit_of(float range, float steps, float scale) {
  const float unit = float_of((bits_of(range / steps) + 0xffu) & ~0xffu);
  if (scale <= 1.0f || unit >= 0x1p-53f) return unit;
  // A real unit that is denormal must be a multiple of 2^-149, which is 2^-69 in the scaled domain.
  const float quanta = unit * 0x1p69f, whole = round(quanta);
  return (whole < quanta ? whole + 1.0f : whole) * 0x1p-69f;
}

CGX_HD float largest_of(const Stats& s) { return max(abs(s.lo), abs(s.hi)); }

// A grid from its unit in the scaled domain; the caller sets base and origin. `steps` is the largest value of a code:
// if unit * steps overflows, so does decoding.
CGX_HD Grid make_grid(const Stats& s, float unit, float steps, float scale) {
  Grid g;
  g.scale = scale;
  g.inv = unit > 0.0f ? 1.0f / unit : 0.0f;
  g.unit = unit * (1.0f / scale);
  g.base = 0.0f;
  g.origin = 0.0f;
  g.finite = is_finite(s.lo) && is_finite(s.hi) && is_finite(g.unit * steps);
  return g;
}

// A grid around an exact 0. Its unit is the largest magnitude / steps. For a constant bucket it is the constant, so
// that the bucket is level 1 or -1 and exact.
CGX_HD Grid symmetric_grid(const Stats& s, float steps) {
  const float largest = largest_of(s), scale = scale_of(largest), n = s.lo == s.hi ? 1.0f : steps;
  return make_grid(s, s.lo == s.hi ? largest * scale : unit_of(largest * scale, n, scale), n, scale);
}

}  // namespace jaxcgx
