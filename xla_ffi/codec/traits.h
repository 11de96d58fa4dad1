// The facts about each codec that the code around it needs: a row a codec. No other file asks which codec it has in
// order to know one of these.
#pragma once

#include "codec/base.h"
#include "codec/pack.h"

namespace jaxcgx {

struct Traits {
  int least_bits = 1, most_bits = 0;  // the range of Dense::bits; empty: there is no such codec
  int code_bits = 0;                  // width of a packed code; 0: Dense::bits
  int meta_floats = 0;                // metadata of a bucket; 0: no buckets
  bool whole = false;                 // bucket_size may be 0: a piece is one bucket
  bool stochastic = false;            // has stochastic rounding
  bool skips = false;                 // has skip_incomplete
  bool compatible = false;            // has a compatible mode
  bool sums = false;                  // a bucket's grid needs the sum of its magnitudes (codec/sign.h)
  bool exact = false;                 // unit * value(code) is exact: a fused multiply-add gives the same bits
};

CGX_HD constexpr Traits traits_of(Kind kind) {
  switch (kind) {
    // bits from, to; code_bits; meta_floats; whole, stochastic, skips, compatible, sums, exact
    case Kind::kRaw:
      return {0, 0, 8, 0, false, false, false, false, false, false};
    case Kind::kMaxMin:
      return {1, 8, 0, 2, false, true, true, false, false, true};
    case Kind::kByteGrad:
      return {0, 0, 8, 2, true, false, false, true, false, true};
    case Kind::kAbsMax:
      return {2, 8, 0, 1, false, false, false, false, false, true};
    case Kind::kFloat8:
      return {4, 5, 8, 1, false, false, false, false, false, false};
    case Kind::kCast:
      return {1, 2, 8, 0, false, true, false, false, false, false};
    case Kind::kSign:
      return {0, 0, 1, 1, false, false, false, false, true, true};
    case Kind::kTopK:
      return {0, 0, 8, 0, false, true, false, false, false, false};
  }
  return {};
}

CGX_HD bool exists(Kind kind) { return traits_of(kind).least_bits <= traits_of(kind).most_bits; }
CGX_HD int meta_floats(Kind kind) { return traits_of(kind).meta_floats; }
CGX_HD bool has_buckets(Kind kind) { return meta_floats(kind) > 0; }

// The width of a packed code. Raw and Cast have none.
CGX_HD int code_bits(const Codec& c) {
  const Traits traits = traits_of(c.kind);
  return traits.code_bits > 0 ? traits.code_bits : c.bits;
}
CGX_HD int64_t code_bytes(const Codec& c, DType leaf, int64_t n) {
  if (c.kind == Kind::kRaw) return n * size_of(leaf);
  return c.kind == Kind::kCast ? n * 2 : packed_bytes(n, code_bits(c));
}

}  // namespace jaxcgx
