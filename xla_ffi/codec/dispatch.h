// Maps a codec's settings to the type with its arithmetic: one row for each codec with buckets. All encoders and
// decoders, on CPU and in CUDA, are instantiated through this file.
#pragma once

#include <type_traits>

#include "codec/absmax.h"
#include "codec/bytegrad.h"
#include "codec/float8.h"
#include "codec/maxmin.h"
#include "codec/micro.h"
#include "codec/sign.h"
#include "codec/traits.h"

namespace jaxcgx {

template <class C>
struct CodecType {
  using Codec = C;
};

// Calls f(CodecType<C>()) with the arithmetic of a codec that has buckets.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // f is a host function in some calls and a device function in others
#endif
template <class Fn>
CGX_HD auto with_grid_codec(const Codec& c, Fn f) {
  switch (c.kind) {
    case Kind::kMaxMin:
      return f(CodecType<MaxMin>());
    case Kind::kByteGrad:
      return f(CodecType<ByteGrad>());
    case Kind::kAbsMax:
      return f(CodecType<AbsMax>());
    case Kind::kFloat8:
      return c.bits == 4 ? f(CodecType<Float8<4>>()) : f(CodecType<Float8<5>>());
    case Kind::kSign:
      return f(CodecType<Sign>());
    case Kind::kMicro:
      return c.bits == kNvfp4   ? f(CodecType<Micro<kNvfp4>>())
             : c.bits == kMxfp4 ? f(CodecType<Micro<kMxfp4>>())
                                : f(CodecType<Micro<kMxfp8>>());
    case Kind::kRaw:  // Raw, Cast, TopK and Lossless have no buckets
    case Kind::kCast:
    case Kind::kTopK:
    case Kind::kEden:  // Eden has buckets, but its levels are in a table and it has its own kernels
    case Kind::kLossless:
      break;
  }
  __builtin_unreachable();
}

// The type of CUDA kernels that serve both MaxMin and AbsMax: they differ only in their grids and in `top`, by which
// the codes of AbsMax are larger. ByteGrad decodes like MaxMin.
struct Levels : MaxMin {
  CGX_HD static Grid grid(const Stats& s, float sum, int64_t n, const Codec& c) {
    return c.kind == Kind::kAbsMax ? AbsMax::grid(s, sum, n, c) : MaxMin::grid(s, sum, n, c);
  }
  CGX_HD static int32_t top(const Codec& c) { return c.kind == Kind::kAbsMax ? AbsMax::top(c.bits) : 0; }
};
// The types with which CUDA kernels are instantiated for a codec: itself, or Levels.
template <class C>
using EncodesAs = std::conditional_t<std::is_same_v<C, MaxMin> || std::is_same_v<C, AbsMax>, Levels, C>;
template <class C>
using DecodesAs = std::conditional_t<std::is_same_v<C, ByteGrad>, Levels, EncodesAs<C>>;

// A codec whose code width and rounding are compile-time constants.
template <class C, int kBits, bool kStochastic>
struct Variant {
  using Codec = C;
  static constexpr int bits = kBits;
  static constexpr bool stochastic = kStochastic;
};

// Returns the number of scales of a block of codes, which take a byte each.
template <class C>
CGX_HD constexpr int scales_of() {
  if constexpr (traits_of(C::kKind).scales)
    return C::kScales;
  else
    return 0;
}
// Returns the bytes of a whole block of codes.
template <class C, int kBits>
constexpr int block_bytes() {
  return kLanes * kBits + scales_of<C>();
}

// Calls f(Variant) with the code width c.bits, which is at least kBits.
template <class C, bool kStochastic, int kBits, class Fn>
auto with_width(const Codec& c, Fn f) {
  if constexpr (kBits < traits_of(C::kKind).most_bits) {
    if (c.bits != kBits) return with_width<C, kStochastic, kBits + 1>(c, f);
  }
  return f(Variant<C, kBits, kStochastic>());
}
// Calls f(Variant) with the code width of codec C.
template <class C, bool kStochastic, class Fn>
auto with_variant(const Codec& c, Fn f) {
  constexpr Traits traits = traits_of(C::kKind);
  if constexpr (traits.scales)
    return f(Variant<C, C::Element::kSign + 1, kStochastic>());
  else if constexpr (traits.code_bits > 0)
    return f(Variant<C, traits.code_bits, kStochastic>());
  else
    return with_width<C, kStochastic, traits.least_bits>(c, f);
}

// Calls f(Variant) with the variant that encodes.
template <class Fn>
auto with_encoder(const Codec& c, Fn f) {
  return with_grid_codec(c, [&](auto type) {
    using C = typename decltype(type)::Codec;
    if constexpr (traits_of(C::kKind).stochastic) {
      if (c.stochastic && !is_seeded(c)) return with_variant<C, true>(c, f);
    }
    return with_variant<C, false>(c, f);
  });
}
// Calls f(Variant) with the variant that decodes. It is never stochastic: decoding does not depend on the rounding.
template <class Fn>
auto with_decoder(const Codec& c, Fn f) {
  return with_grid_codec(c, [&](auto type) { return with_variant<typename decltype(type)::Codec, false>(c, f); });
}

}  // namespace jaxcgx
