// The properties of each codec that other files need, one row for each codec. Other files test these properties instead
// of the codec's kind.
#pragma once

#include "codec/base.h"
#include "codec/lossless.h"

namespace jaxcgx {

// The values of Dense::bits for Micro.
enum MicroFormat : int32_t { kNvfp4 = 1, kMxfp4 = 2, kMxfp8 = 3 };

// Returns the number of scales of a block of 128 elements.
CGX_HD constexpr int scales_of(MicroFormat f) { return f == kNvfp4 ? 8 : 4; }

struct Traits {
  int least_bits = 0, most_bits = 0;  // the range of Dense::bits; an empty range (most < least): not a codec
  int code_bits = 0;                  // width of a packed code; 0: Dense::bits
  int meta_floats = 0;                // the most floats of metadata of a bucket; 0: no buckets
  int element_bytes = 0;              // bytes of an element if it is sent as another dtype; 0: it isn't
  bool raw = false;                   // elements are sent unchanged
  bool lossless = false;              // elements keep their bits (codec/lossless.h)
  bool sparse = false;                // a piece is a list of indices and a message of their values (codec/topk.h)
  bool whole = false;                 // bucket_size may be 0, which makes one bucket of a piece
  bool stochastic = false;            // has stochastic rounding
  bool skips = false;                 // has skip_incomplete
  bool compatible = false;            // has a compatible mode
  bool sums = false;                  // a bucket's grid needs the sum of its magnitudes (codec/grid.h)
  bool rotates = false;               // has a rotation (codec/rotation.h)
  bool table = false;                 // always rotates; takes levels from a table and seeds from noise (codec/eden.h)
  bool exact = false;                 // unit * value(code) is exact for every unit that is a multiple of 2^-149 and has
                                      // 16 significant bits: a fused multiply-add gives the same bits
  bool small = false;                 // quantize and value compute with integers within +-2^22 and no bits of numbers,
                                      // and `exact` holds: GPUs take cheaper number types (cuda/arithmetic.cuh)
  bool floats = false;                // a code is a small float, C::Element (codec/minifloat.h)
  bool scales = false;                // each block of codes has scales (codec/micro.h)
};

CGX_HD constexpr Traits traits_of(Kind kind) {
  Traits t;
  switch (kind) {
    case Kind::kRaw:
      t.raw = true;
      return t;
    case Kind::kMaxMin:
      t.least_bits = 1, t.most_bits = 8;
      t.meta_floats = 2;
      t.stochastic = t.skips = t.rotates = t.exact = t.small = true;
      return t;
    case Kind::kByteGrad:
      t.code_bits = 8;
      t.meta_floats = 2;
      t.whole = t.compatible = t.exact = t.small = true;
      return t;
    case Kind::kAbsMax:
      t.least_bits = 2, t.most_bits = 8;
      t.meta_floats = 1;
      t.rotates = t.exact = t.small = true;
      return t;
    case Kind::kFloat8:
      t.least_bits = 4, t.most_bits = 5;
      t.code_bits = 8;
      t.meta_floats = 1;
      t.floats = true;
      return t;
    case Kind::kCast:
      t.least_bits = 1, t.most_bits = 2;
      t.element_bytes = 2;
      t.stochastic = true;
      return t;
    case Kind::kSign:
      t.code_bits = 1;
      t.meta_floats = 1;
      t.sums = t.exact = t.small = true;
      return t;
    case Kind::kTopK:
      t.sparse = t.stochastic = true;
      return t;
    case Kind::kEden:
      t.least_bits = 1, t.most_bits = 6;
      t.meta_floats = 2;
      t.stochastic = t.table = true;
      return t;
    case Kind::kMicro:
      t.least_bits = kNvfp4, t.most_bits = kMxfp8;
      t.meta_floats = 2;
      t.whole = t.stochastic = t.rotates = t.floats = t.scales = true;
      return t;
    case Kind::kLossless:
      t.lossless = true;
      return t;
  }
  t.most_bits = -1;  // not a codec: the range of Dense::bits is empty
  return t;
}

CGX_HD bool has_buckets(Kind kind) { return traits_of(kind).meta_floats > 0; }
CGX_HD bool is_raw(Kind kind) { return traits_of(kind).raw; }
CGX_HD bool is_lossless(Kind kind) { return traits_of(kind).lossless; }
CGX_HD bool is_sparse(Kind kind) { return traits_of(kind).sparse; }
CGX_HD bool is_rotated(const Dense& d) { return d.rotate || traits_of(d.kind).table; }
// Returns whether buckets are rotated with random seeds, which are sent. Elements are then rounded without noise.
CGX_HD bool is_seeded(const Dense& d) { return traits_of(d.kind).table || (d.rotate && traits_of(d.kind).scales); }

// Returns the number of floats of metadata of a bucket. If it is 0, the unit is 1.
CGX_HD int meta_floats(const Codec& c) {
  const Traits traits = traits_of(c.kind);
  if (traits.scales && !c.rotate) return c.bits == kNvfp4;
  return traits.meta_floats;
}

// Returns the width of a packed code, for codecs that pack.
CGX_HD int code_bits(const Codec& c) {
  const Traits traits = traits_of(c.kind);
  if (traits.scales) return c.bits == kMxfp8 ? 8 : 4;
  return traits.code_bits > 0 ? traits.code_bits : c.bits;
}
// Returns the bytes of the codes of a bucket's first n elements.
CGX_HD int64_t bucket_bytes(const Codec& c, int64_t n) {
  if (!traits_of(c.kind).scales) return packed_bytes(n, code_bits(c));
  return div_up(n, kBlock) * (kLanes * code_bits(c) + scales_of(static_cast<MicroFormat>(c.bits)));
}
// Returns the bytes of the codes of n elements: one bucket, or elements of a codec without buckets.
CGX_HD int64_t code_bytes(const Codec& c, DType leaf, int64_t n) {
  if (is_raw(c.kind)) return n * size_of(leaf);
  if (is_lossless(c.kind)) return lossless_bytes(leaf, n);
  const int bytes = traits_of(c.kind).element_bytes;
  return bytes > 0 ? n * bytes : bucket_bytes(c, is_rotated(c) ? padded(n) : n);
}

}  // namespace jaxcgx
