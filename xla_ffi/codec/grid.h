// The grid of a bucket: `unit`, the distance between two levels, and `base`, the value of level 0.
// Every codec with buckets decodes as base + unit * value(code).
//
// `unit` is rounded up to 16 significant bits. So unit * level is exact for levels of 8 bits, and a fused addition
// gives the same bits. Also, the largest value of a bucket never needs a level past the last one. The cost: `unit`
// grows by at most 2^-15 of itself.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

// The minimum and maximum of a bucket. If any element is a NaN or an infinity, lo or hi is not finite.
struct Stats {
  float lo, hi;
};

// The sum of magnitudes that some grids need has a fixed order, so that all vector widths agree. Within a block, the
// rows of a lane are added in order, then lanes j and j + 8, j + 4, j + 2, j + 1. Blocks are added in order within
// groups of 256 blocks (kSumGroup elements). Then the groups are added in order.
constexpr int64_t kSumGroup = 32768;

struct Grid {
  float unit, base;  // for decoding
  float inv;         // 1 / unit, in the scaled domain (0 if unit is 0)
  float origin;      // encoding subtracts it, in the scaled domain; ByteGrad: the level of code 0
  float scale;       // x is multiplied by this power of two before it is quantized; see scale_of
  bool finite;       // false: the bucket decodes to NaN
};

// unit_of and base_of return the numbers that are written. With codes of 0, a NaN makes the whole bucket decode to NaN.
CGX_HD float unit_of(const Grid& g) { return g.finite ? g.unit : float_of(kNaNBits); }
CGX_HD float base_of(const Grid& g) { return g.finite ? g.base : float_of(kNaNBits); }

// Returns the power of two by which a bucket is multiplied before it is quantized; `largest` is its largest magnitude.
// It is 1 except for very small and very large numbers. It keeps unit and 1 / unit within the normal range.
CGX_HD float scale_of(float largest) {
  if (largest >= 0x1p100f) return 0x1p-40f;
  return largest < kTiny && largest > 0.0f ? kUp : 1.0f;
}

// Returns range / steps, rounded up to 16 significant bits. `range` and the result are in the scaled domain.
CGX_HD float unit_of(float range, float steps, float scale) {
  const float unit = float_of((bits_of(range / steps) + 0xffu) & ~0xffu);
  if (scale <= 1.0f || unit >= 0x1p-53f) return unit;
  // If the unit is denormal outside of the scaled domain, it must be a multiple of 2^-149: 2^-69 in the scaled domain.
  const float quanta = unit * 0x1p69f, whole = round(quanta);
  return (whole < quanta ? whole + 1.0f : whole) * 0x1p-69f;
}

CGX_HD float largest_of(const Stats& s) { return max(abs(s.lo), abs(s.hi)); }

// Returns a grid with a given unit in the scaled domain. The caller sets base and origin. `steps` is the largest value
// of a code: if unit * steps overflows, decoding overflows, too, so the grid is not finite.
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

// Returns a grid around an exact 0 whose unit is the largest magnitude / steps. For a constant bucket the unit is the
// magnitude of the constant, so the bucket is encoded exactly, as level 1 or -1.
CGX_HD Grid symmetric_grid(const Stats& s, float steps) {
  const float largest = largest_of(s), scale = scale_of(largest), n = s.lo == s.hi ? 1.0f : steps;
  return make_grid(s, s.lo == s.hi ? largest * scale : unit_of(largest * scale, n, scale), n, scale);
}

}  // namespace jaxcgx
