// The kernels of cpu/kernels.h for one instruction set. kernels_<isa>.cc defines JAXCGX_ISA and includes this file.
#pragma once

#include "codec/dispatch.h"
#include "cpu/eden_impl.h"
#include "cpu/lossless_impl.h"
#include "cpu/patch_impl.h"

#define CGX_STRING(x) #x
#define CGX_NAME(x) CGX_STRING(x)

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

template <class C, int kBits, bool kStochastic>
void encode(const float* x, int64_t n, const Grid& grid, const uint16_t* noise, uint8_t* codes) {
  const Grid g = grid;  // a local copy: stores through `codes` (bytes) may alias `grid`, so it would be reloaded
  const int64_t ahead = n;
  for (; n >= kBlock; n -= kBlock, x += kBlock, codes += kLanes * kBits) {
    // This bucket is in the cache, because its statistics were just computed. So memory is idle: prefetch the next
    // bucket.
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) __builtin_prefetch(x + ahead + row * kLanes);
    Words<Vector, kBits> words;
    words.clear();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      I random = splat_i(0);
      if constexpr (kStochastic) random = load_halves(noise + row * kLanes);
      words.put(row, quantize<C, kBits, kStochastic>(load(x + row * kLanes), g, random));
    }
    put_block<kBits>(codes, words, kLanes);
    if constexpr (kStochastic) noise += kBlock;
  }
  if (n == 0) return;
  const int lanes = lanes_of(n);
  Words<Vector, kBits> words;
  words.clear();
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const int k = in_row(n, lanes, row);
    I random = splat_i(0);
    if constexpr (kStochastic) random = load_halves(noise + row * lanes, k);
    const I code = quantize<C, kBits, kStochastic>(load(x + row * lanes, k), g, random);
    words.put(row, select(less(iota(), splat_i(k)), code, splat_i(0)));
  }
  put_block<kBits>(codes, words, lanes, lanes);
}

// Decodes the scales of a block.
template <class C, int kBits>
CGX_HD void get_scales(const uint8_t* block, float (&scales)[kLanes]) {
  if constexpr (traits_of(C::kKind).scales)
    store(scales, C::template scale<Vector>(load_bytes(block + kLanes * kBits, C::kScales)));
}
// Returns so_far + unit * value(code), times the row's scale if the codec has scales.
template <class C, int kBits>
CGX_HD F plus(F so_far, F unit, I code, const float (&scales)[kLanes], int row) {
  F value = C::template value<Vector, kBits>(code);
  if constexpr (traits_of(C::kKind).scales) value = value * splat_f(scales[row / C::kScaleRows]);
  return traits_of(C::kKind).exact ? multiply_add(unit, value, so_far) : so_far + unit * value;
}

template <class C, int kBits>
void decode(const Terms& t, int64_t n, float base, float* out, Write write) {
  if (write == Write::kAround && (reinterpret_cast<uintptr_t>(out) & 63) != 0) write = Write::kOver;
  int64_t at = 0;  // byte offset in the codes
  for (; n >= kBlock; n -= kBlock, out += kBlock, at += block_bytes<C, kBits>()) {
    F sum[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sum[row] = write == Write::kOnto ? load(out + row * kLanes) : splat_f(base);
    for (int64_t r = 0; r < t.ranks; ++r) {
      const auto words = get_block<kBits>(t.codes[r] + at, kLanes);
      const F unit = splat_f(t.unit[r]);
      alignas(64) float scales[kLanes];
      get_scales<C, kBits>(t.codes[r] + at, scales);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) sum[row] = plus<C, kBits>(sum[row], unit, words.get(row), scales, row);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      if (write == Write::kAround)
        stream(out + row * kLanes, sum[row]);
      else
        store(out + row * kLanes, sum[row]);
    }
  }
  if (n == 0) return;
  const int lanes = traits_of(C::kKind).scales ? kLanes : lanes_of(n);
  F sum[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    sum[row] = write == Write::kOnto ? load(out + row * lanes, in_row(n, lanes, row)) : splat_f(base);
  for (int64_t r = 0; r < t.ranks; ++r) {
    const auto words = get_block<kBits>(t.codes[r] + at, lanes, lanes);
    const F unit = splat_f(t.unit[r]);
    alignas(64) float scales[kLanes];
    get_scales<C, kBits>(t.codes[r] + at, scales);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sum[row] = plus<C, kBits>(sum[row], unit, words.get(row), scales, row);
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) store(out + row * lanes, sum[row], in_row(n, lanes, row));
}

// Returns the codes of the nearest elements of a Micro format.
template <class C, int kBits>
struct ToNumber {
  CGX_HD I operator()(F y) const { return C::template quantize<Vector>(y); }
};
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
// A table for 4-bit codes, whose values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. The exponent and two bits of the mantissa
// determine the nearest value, because the bounds between the values need no more bits. A number on a bound rounds to
// the even code: up if its mantissa begins with 1, else down.
constexpr struct NumberTable {
  // The index is the exponent and two bits of the mantissa, modulo 32. It covers numbers from 1/16 to less than 16.
  alignas(64) int32_t codes[32] = {};
  constexpr NumberTable() {
    constexpr float kBounds[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    for (uint32_t i = 123 * 4; i < 131 * 4; ++i) {
      const float from = (1.0f + 0.25f * static_cast<float>(i % 4)) * static_cast<float>(1 << (i / 4 - 123)) / 16.0f;
      for (const float bound : kBounds) codes[i % 32] += from >= bound;
    }
  }
} kNumberTable;

template <class C>
struct ToNumber<C, 4> {
  Table<32> code{reinterpret_cast<const float*>(kNumberTable.codes)};

  CGX_HD I operator()(F y) const {
    const I magnitude = bits(max(as_float(bits(y) & splat_i(INT32_MAX)), splat_f(0.125f)));
    // Subtracting 1 from the bits moves a number on a bound below the bound, and no other number past one.
    const I down = splat_i(1) & (shr(magnitude, 22) ^ splat_i(-1));
    return bits(code[shr(magnitude - down, 21)]) | (shr(bits(y), 28) & splat_i(8));
  }
};
#endif

// Encodes a bucket whose blocks have scales (codec/micro.h).
template <class C, int kBits, bool kStochastic>
void encode_scaled(const float* x, int64_t n, const Grid& grid, const uint16_t* noise, uint8_t* codes) {
  const F inv = splat_f(grid.inv);
  const ToNumber<C, kBits> to_number;
  for (; n > 0; n -= kBlock, x += kBlock, codes += block_bytes<C, kBits>()) {
    F y[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const float* p = x + row * kLanes;
      y[row] = (n >= kBlock ? load(p) : load(p, in_row(n, kLanes, row))) * inv;
    }
    I most[C::kScales];
#pragma GCC unroll 8
    for (int s = 0; s < C::kScales; ++s) {
      most[s] = bits(y[s * C::kScaleRows]) & splat_i(INT32_MAX);
      for (int row = s * C::kScaleRows + 1; row < (s + 1) * C::kScaleRows; ++row)
        most[s] = max(most[s], bits(y[row]) & splat_i(INT32_MAX));
    }
    const F largest = as_float(min(highest_of_each(most), splat_i(0x7f800000)));
    const I scales = C::template scale_code<Vector, kStochastic>(largest);
    alignas(64) float inverse[kLanes];
    store(inverse, C::template inverse<Vector>(scales));
    alignas(64) int32_t kept[kLanes];
    if (C::kPower) store_words(kept, select(C::template is_number<Vector>(scales), splat_i(-1), splat_i(0)));
    Words<Vector, kBits> words;
    words.clear();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const int s = row / C::kScaleRows;
      const F number = y[row] * splat_f(inverse[s]);
      I code;
      if constexpr (kStochastic) {
        const uint16_t* p = noise + row * kLanes;
        const I random = n >= kBlock ? load_halves(p) : load_halves(p, in_row(n, kLanes, row));
        code = C::template quantize<Vector>(number, random);
      } else {
        code = to_number(number);
      }
      words.put(row, C::kPower ? code & splat_i(kept[s]) : code);
    }
    put_block<kBits>(codes, words, kLanes);
    store_bytes(codes + kLanes * kBits, scales, C::kScales);
    if constexpr (kStochastic) noise += kBlock;
  }
}

EncodeFn encoder(const Codec& c) {
  if (!has_buckets(c.kind) || traits_of(c.kind).table) return nullptr;
  return with_encoder(c, [](auto variant) -> EncodeFn {
    using V = decltype(variant);
    if constexpr (traits_of(V::Codec::kKind).scales)
      return encode_scaled<typename V::Codec, V::bits, V::stochastic>;
    else
      return encode<typename V::Codec, V::bits, V::stochastic>;
  });
}
DecodeFn decoder(const Codec& c) {
  if (!has_buckets(c.kind) || traits_of(c.kind).table) return nullptr;
  return with_decoder(c, [](auto variant) -> DecodeFn {
    using V = decltype(variant);
    return decode<typename V::Codec, V::bits>;
  });
}
CastFn caster(const Codec& c) {
  if (static_cast<DType>(c.bits) == DType::kBF16)
    return c.stochastic ? cast<DType::kBF16, true> : cast<DType::kBF16, false>;
  return c.stochastic ? cast<DType::kF16, true> : cast<DType::kF16, false>;
}

}  // namespace

const Kernels kKernels = {CGX_NAME(JAXCGX_ISA),
                          load_leaf,
                          store_leaf,
                          add,
                          residual,
                          scale,
                          divide,
                          stats,
                          largest_magnitude,
                          sum,
                          noise,
                          count,
                          find,
                          hold,
                          pack,
                          unpack,
                          rotate,
                          rotate_back,
                          normal_codes,
                          normal_values,
                          unbiased_unit,
                          pack_blocks,
                          unpack_block,
                          digest,
                          encode_patch_block,
                          apply_patch_block,
                          encoder,
                          decoder,
                          caster};

}  // namespace jaxcgx::cpu::JAXCGX_ISA
