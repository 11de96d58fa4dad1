// Number types with which a GPU thread evaluates codec/*.h. They give the same results as Scalar, but avoid its
// conversions between integers and floats. These would be the bottleneck: a GPU executes them at a fourth to an eighth
// of the rate of additions.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "codec/dispatch.h"
#include "codec/pack.h"

#define CGX_D __device__ __forceinline__

namespace jaxcgx::cuda {

// For encoding numbers within +-2^22. Adding 1.5 * 2^23, whose bits are kMagic, rounds to nearest even and leaves the
// integer in the low bits.
constexpr uint32_t kMagic = 0x4b400000;
struct SmallFloat {
  float v;
};
CGX_D SmallFloat operator*(SmallFloat a, SmallFloat b) { return {a.v * b.v}; }
CGX_D SmallFloat operator-(SmallFloat a, SmallFloat b) { return {a.v - b.v}; }
CGX_D SmallFloat min(SmallFloat a, SmallFloat b) { return {fminf(a.v, b.v)}; }
CGX_D SmallFloat max(SmallFloat a, SmallFloat b) { return {fmaxf(a.v, b.v)}; }
CGX_D SmallFloat round(SmallFloat a) { return {jaxcgx::round(a.v)}; }
using jaxcgx::bits;
CGX_D int32_t bits(SmallFloat a) { return bits(a.v); }
CGX_D int32_t round_int(SmallFloat a) { return bits(a.v + 0x1.8p23f) - static_cast<int32_t>(kMagic); }

struct Small {
  using F = SmallFloat;
  using I = int32_t;
  CGX_D static SmallFloat splat(float x) { return {x}; }
  CGX_D static int32_t splat(int32_t x) { return x; }
};

// A number and its bucket's scale. MaxMin subtracts an origin from their product, which becomes one fused instruction.
// The product is exact, except for numbers so much smaller than their bucket's largest that they get the code of 0.
struct Scaled {
  float v, scale;
};
CGX_D float operator-(Scaled a, float b) { return __fmaf_rn(a.v, a.scale, -b); }
CGX_D SmallFloat operator-(Scaled a, SmallFloat b) { return {a - b.v}; }

template <class V>
struct FromScaled : V {
  using F = Scaled;
};

// min_or_nan and max_or_nan return NaN if one of the numbers is NaN. fminf and fmaxf would drop it.
CGX_D float min_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}
CGX_D float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

// For decoding: the integer `sum - magic`. A field of a word becomes the low bits of a float whose last bit is worth 1.
// Constants are added to `magic`, where possible at compile time.
struct Level {
  float sum, magic;
};
CGX_D Level operator+(Level a, Level b) { return {a.sum + b.sum, a.magic + b.magic}; }
CGX_D Level operator-(Level a, int32_t b) { return {a.sum, a.magic + static_cast<float>(b)}; }
CGX_D float to_float(Level a) { return a.sum - a.magic; }

struct Counted {
  using F = float;
  using I = Level;
  CGX_D static int32_t splat(int32_t x) { return x; }
};

// Returns (a & mask) | bits in one instruction. With two constants the compiler would use two instructions.
CGX_D uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
#else
  return (a & mask) | bits;
#endif
}

// Returns the code of a row as a Level.
template <int kBits>
CGX_D Level level_of(const Words<Scalar, kBits>& w, int row) {
  if constexpr (kBits == 8) {
    return {float_of(__byte_perm(static_cast<uint32_t>(row < 4 ? w.a : w.b), 0x4b000000u, 0x7540u + (row & 3))),
            0x1p23f};
  } else if constexpr ((kBits & (kBits - 1)) == 0) {
    // The field is not shifted to bit 0, but stays at bit `at`. This bit is worth 1 in a float of magnitude 2^(23 -
    // at). Fields above bit 23 are shifted down by 16, because a mantissa has only 23 bits.
    const auto word = static_cast<uint32_t>(kBits == 4   ? w.a
                                            : kBits == 2 ? w.c
                                                         : w.d << 1);  // << 1: Sign's 2 * magic + 1 must be exact
    const int from = kBits * row + (kBits == 1), down = from + kBits <= 23 ? 0 : 16, at = from - down;
    return {float_of(and_or(word >> down, ((1u << kBits) - 1) << at, static_cast<uint32_t>(150 - at) << 23)),
            static_cast<float>(1 << (23 - at))};
  } else {
    return {float_of(static_cast<uint32_t>(w.get(row)) | 0x4b000000u), 0x1p23f};
  }
}

// Returns the code of x.
template <class C, int kBits, bool kStochastic>
CGX_D int32_t code_of(float x, const Grid& g, int32_t top, int32_t noise) {
  constexpr bool kLevels = std::is_same_v<C, Levels>;
  // With stochastic rounding to 7 bits and more, 16.16 fixed point exceeds the range of Small.
  using Number = std::conditional_t<kStochastic ? kLevels && kBits <= 6 : traits_of(C::kKind).small, Small, Scalar>;
  using V = std::conditional_t<kLevels, FromScaled<Number>, Number>;
  typename V::F y;
  if constexpr (kLevels)
    y = {x, g.scale};
  else
    y = Number::splat(x * g.scale);
  if constexpr (kStochastic)
    return C::template quantize<V, kBits>(y, g, noise);
  else
    return C::template quantize<V, kBits>(y, g) + (kLevels ? top : 0);
}

// Whether a code is one field of a word. Then add_field can sum codes that are all too large by the same `excess`, if
// the excesses are subtracted from the word in advance. With excess = kMagic - top, adding it to a code cancels the
// subtraction in code_of, which saves an instruction per element.
template <int kBits>
constexpr bool kOneField = (kBits & (kBits - 1)) == 0;
template <int kBits>
CGX_D void add_field(Words<Scalar, kBits>& w, int row, uint32_t code) {
  static_assert(kOneField<kBits>, "");
  int32_t& word = kBits == 8 ? row < 4 ? w.a : w.b : kBits == 4 ? w.a : kBits == 2 ? w.c : w.d;
  word = static_cast<int32_t>(static_cast<uint32_t>(word) + (code << (kBits * row & 31)));
}

// Returns whether a bucket has a unit. Otherwise the unit is 1.
template <class C>
CGX_D constexpr bool has_unit() {
  if constexpr (traits_of(C::kKind).scales)
    return !C::kPower;
  else
    return true;
}

// Returns the number of a row's code, which is a small float (codec/minifloat.h). Here, unlike on a CPU, denormals cost
// nothing. Read as a float32, the code's exponent and mantissa give a number that is too small by a power of two.
template <class Element, int kBits>
CGX_D float number_of(const Words<Scalar, kBits>& w, int row) {
  static_assert(Element::kSign + 1 == kBits && (kBits == 4 || kBits == 8), "");
  constexpr int kExponent = Element::kSign - (23 - Element::kDrop);
  const int32_t word = kBits == 8 && row >= 4 ? w.b : w.a, first = shl(word, 32 - kBits - (kBits * row & 31));
  constexpr uint32_t kMask = 0x80000000u | ((1u << Element::kSign) - 1) << Element::kDrop;
  return float_of(static_cast<uint32_t>(first >> (8 - kExponent)) & kMask) * float_of((254u - Element::kBias) << 23);
}

// Returns so_far + unit * the value of a row's code. `scale`: the scale of the row, for codecs that have scales. The
// multiply-add is fused where the product is exact (codec/traits.h).
template <class C, int kBits>
CGX_D float plus(float so_far, float unit, const Words<Scalar, kBits>& w, int row, int32_t top, float scale) {
  using D = DecodesAs<C>;
  constexpr Traits traits = traits_of(D::kKind);
  float value;
  if constexpr (std::is_same_v<D, Levels>)
    value = to_float(level_of<kBits>(w, row) - top);
  else if constexpr (traits.small)
    value = D::template value<Counted, kBits>(level_of<kBits>(w, row));
  else if constexpr (traits.floats)
    value = number_of<typename D::Element, kBits>(w, row);
  else
    value = D::template value<Scalar, kBits>(w.get(row));
  if constexpr (traits.exact) return __fmaf_rn(unit, value, so_far);
  if constexpr (traits.scales) value = __fmul_rn(value, scale);
  if constexpr (has_unit<D>()) value = __fmul_rn(unit, value);
  return __fadd_rn(so_far, value);
}

}  // namespace jaxcgx::cuda
