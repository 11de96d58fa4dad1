// Maps a codec's settings to its arithmetic: one row for each codec with buckets. All encoders and decoders of the CPU
// and the CUDA kernels are instantiated from here.
#pragma once

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
#pragma nv_exec_check_disable  // f is a function of the host in some calls, of the device in others
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
    case Kind::kRaw:  // these have no buckets
    case Kind::kCast:
    case Kind::kTopK:
    case Kind::kEden:  // its levels are in a table
    case Kind::kLossless:
      break;
  }
  __builtin_unreachable();
}

// A codec whose code width and rounding are known to the compiler.
template <class C, int kBits, bool kStochastic>
struct Variant {
  using Codec = C;
  static constexpr int bits = kBits;
  static constexpr bool stochastic = kStochastic;
};

// Bytes of a whole block of codes.
template <class C, int kBits>
constexpr int block_bytes() {
  if constexpr (traits_of(C::kKind).scales)
    return kLanes * kBits + C::kScales;
  else
    return kLanes * kBits;
}

template <class C, bool kStochastic, int kBits, class Fn>
auto with_width(const Codec& c, Fn f) {
  if constexpr (kBits < traits_of(C::kKind).most_bits) {
    if (c.bits != kBits) return with_width<C, kStochastic, kBits + 1>(c, f);
  }
  return f(Variant<C, kBits, kStochastic>());
}
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

// with_encoder calls f(variant) with the variant that encodes, with_decoder with the one that decodes, which has no
// rounding.
template <class Fn>
auto with_encoder(const Codec& c, Fn f) {
  return with_grid_codec(c, [&](auto type) {
    using C = typename decltype(type)::Codec;
    if constexpr (traits_of(C::kKind).stochastic) {
      if (c.stochastic) return with_variant<C, true>(c, f);
    }
    return with_variant<C, false>(c, f);
  });
}
template <class Fn>
auto with_decoder(const Codec& c, Fn f) {
  return with_grid_codec(c, [&](auto type) { return with_variant<typename decltype(type)::Codec, false>(c, f); });
}

}  // namespace jaxcgx
