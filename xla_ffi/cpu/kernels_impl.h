// The kernels of cpu/kernels.h for one instruction set. Included by kernels_<isa>.cc, which defines JAXCGX_ISA.
#pragma once

#include "codec/cast.h"
#include "codec/dispatch.h"
#include "codec/eden.h"
#include "codec/pack.h"
#include "codec/rng.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

#define CGX_STRING(x) #x
#define CGX_NAME(x) CGX_STRING(x)

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// Calls full(i) for every whole vector of 16 and rest(i, count) for the rest.
template <class Full, class Rest>
CGX_HD void each_vector(int64_t n, Full full, Rest rest) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) full(i);
  if (i < n) rest(i, static_cast<int>(n - i));
}

template <DType kFrom>
void load_halves_as_float(const void* x, int64_t n, float* out) {
  const uint16_t* p = static_cast<const uint16_t*>(x);
  each_vector(
      n, [&](int64_t i) { store(out + i, Cast<kFrom>::template from_bits<Vector>(load_halves(p + i))); },
      [&](int64_t i, int k) { store(out + i, Cast<kFrom>::template from_bits<Vector>(load_halves(p + i, k)), k); });
}

void load_leaf(DType dtype, const void* x, int64_t n, float* out) {
  switch (dtype) {
    case DType::kF32:
      memcpy(out, x, static_cast<size_t>(n) * 4);
      break;
    case DType::kBF16:
      load_halves_as_float<DType::kBF16>(x, n, out);
      break;
    case DType::kF16:
      load_halves_as_float<DType::kF16>(x, n, out);
      break;
  }
}

template <DType kTo, bool kStochastic>
void cast(const float* x, int64_t n, const uint16_t* noise, void* out) {
  uint16_t* p = static_cast<uint16_t*>(out);
  const auto bits_at = [&](int64_t i, F v, int k) {
    I random = splat_i(0);
    if constexpr (kStochastic) random = load_halves(noise + i, k);
    return Cast<kTo>::template to_bits<Vector, kStochastic>(v, random);
  };
  each_vector(
      n, [&](int64_t i) { store_halves(p + i, bits_at(i, load(x + i), 16)); },
      [&](int64_t i, int k) { store_halves(p + i, bits_at(i, load(x + i, k), k), k); });
}

void store_leaf(DType dtype, const float* x, int64_t n, void* out) {
  switch (dtype) {
    case DType::kF32:
      memcpy(out, x, static_cast<size_t>(n) * 4);
      break;
    case DType::kBF16:
      cast<DType::kBF16, false>(x, n, nullptr, out);
      break;
    case DType::kF16:
      cast<DType::kF16, false>(x, n, nullptr, out);
      break;
  }
}

// out[i] = op(x[i]...)
template <class Op, class... X>
CGX_HD void map(int64_t n, float* out, Op op, const X*... x) {
  each_vector(
      n, [&](int64_t i) { store(out + i, op(load(x + i)...)); },
      [&](int64_t i, int k) { store(out + i, op(load(x + i, k)...), k); });
}
void add(const float* x, const float* y, int64_t n, float* out) {
  map(n, out, [](F a, F b) { return a + b; }, x, y);
}
void residual(const float* x, const float* y, const float* old, int64_t n, float* out) {
  const auto op = [](F a, F b, F was) {
    const F lost = a - b;
    return select(less(bits(lost) & splat_i(0x7fffffff), splat_i(0x7f800000)), lost, was);
  };
  map(n, out, op, x, y, old);
}
void scale(const float* x, int64_t n, float factor, float* out) {
  map(n, out, [=](F a) { return a * splat_f(factor); }, x);
}
// Small numbers are scaled exactly before the division, like all numbers that may be denormal (codec/base.h).
void divide(const float* x, int64_t n, float divisor, float* out, Write write) {
  const auto op = [=](F a) {
    const M tiny = less(bits(a) & splat_i(0x7fffffff), bits(splat_f(kTiny)));
    const F up = select(tiny, splat_f(kUp), splat_f(1.0f)), down = select(tiny, splat_f(kDown), splat_f(1.0f));
    return a * up / splat_f(divisor) * down;
  };
  if (write == Write::kAround && (reinterpret_cast<uintptr_t>(out) & 63) == 0) {
    for (; n >= kLanes; n -= kLanes, x += kLanes, out += kLanes) stream(out, op(load(x)));
  }
  map(n, out, op, x);
}

void stats(const float* x, int64_t n, Stats* s) {
  F lo0 = splat_f(s->lo), lo1 = lo0, hi0 = splat_f(s->hi), hi1 = hi0;
  M nan = none();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const F a = load(x + i), b = load(x + i + 16);
    lo0 = min(lo0, a), hi0 = max(hi0, a);
    lo1 = min(lo1, b), hi1 = max(hi1, b);
    nan = nan | unordered(a, b);
  }
  for (; i < n; i += 16) {
    const int k = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F a = load(x + i, k), first = splat_f(x[i]);
    const F filled = k == 16 ? a : select(less(iota(), splat_i(k)), a, first);
    lo0 = min(lo0, filled), hi0 = max(hi0, filled);
    nan = nan | unordered(filled, filled);
  }
  // min and max drop NaNs, so a NaN is recorded as an infinite range.
  s->lo = any(nan) ? -__builtin_inff() : lowest(min(lo0, lo1));
  s->hi = any(nan) ? __builtin_inff() : highest(max(hi0, hi1));
}

// Whether a magnitude is at least `least`.
CGX_HD M at_least(F x, uint32_t least) {
  return less(splat_i(static_cast<int32_t>(least - 1u)), bits(x) & splat_i(0x7fffffff));
}

int64_t count(const float* x, int64_t n, uint32_t least) {
  int64_t found = 0;
  each_vector(
      n, [&](int64_t i) { found += __builtin_popcount(lanes(at_least(load(x + i), least))); },
      [&](int64_t i, int k) {
        found += __builtin_popcount(lanes(at_least(load(x + i, k), least)) & ((1u << k) - 1u));
      });
  return found;
}

int64_t find(const float* x, int64_t n, uint32_t least, int32_t first, int32_t* index, float* values) {
  int64_t found = 0;
  const auto take = [&](int64_t i, F v, M m) {
    found += store_where(m, splat_i(first + static_cast<int32_t>(i)) + iota(), v, index + found, values + found);
  };
  constexpr int kTogether = 4;  // vectors per branch: few elements are taken
  int64_t i = 0;
  for (; i + 16 * kTogether <= n; i += 16 * kTogether) {
    M m[kTogether], some = none();
    for (int j = 0; j < kTogether; ++j) m[j] = at_least(load(x + i + 16 * j), least), some = some | m[j];
    if (!any(some)) continue;
    for (int j = 0; j < kTogether; ++j) take(i + 16 * j, load(x + i + 16 * j), m[j]);
  }
  for (; i < n; i += 16) {
    const int k = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F v = load(x + i, k);
    take(i, v, at_least(v, least) & less(iota(), splat_i(k)));
  }
  return found;
}

void hold(const float* x, const float* old, int64_t n, uint32_t least, float* out) {
  map(n, out, [=](F a, F was) { return select(at_least(a, least), was, a); }, x, old);
}

// The number of lanes of a block of n elements, and of elements in a row of it.
CGX_HD int lanes_of(int64_t n) { return n >= kBlock ? kLanes : static_cast<int>((n + kRows - 1) / kRows); }
CGX_HD int in_row(int64_t n, int lanes, int row) {
  const int64_t left = n - static_cast<int64_t>(row) * lanes;
  return left < 0 ? 0 : left < lanes ? static_cast<int>(left) : lanes;
}

float sum(const float* x, int64_t n, float so_far) {
  const I magnitude = splat_i(0x7fffffff);
  for (int64_t at = 0; at < n; at += kBlock) {
    const int lanes = lanes_of(n - at);
    F total = splat_f(0.0f);
    for (int row = 0; row < kRows; ++row) {
      // A short block of 121 elements or more has all 16 lanes too, but not all rows.
      const F v =
          n - at >= kBlock ? load(x + at + row * kLanes) : load(x + at + row * lanes, in_row(n - at, lanes, row));
      total = total + as_float(bits(v) & magnitude);
    }
    float lane[kLanes];
    store(lane, total);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
    so_far = so_far + lane[0];
  }
  return so_far;
}

void noise(const uint32_t key[kKeyWords], uint32_t leaf, int64_t first, int64_t blocks, uint16_t* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kBlock) {
    const uint64_t counter = static_cast<uint64_t>(first / kBlock + b) * kLanes;
    PhiloxWord word[4] = {philox_word(splat_i(static_cast<int32_t>(counter)) + iota()),
                          philox_word(splat_i(static_cast<int32_t>(counter >> 32))),
                          philox_word(splat_i(static_cast<int32_t>(leaf))), philox_word(splat_i(0))};
    philox<PhiloxNumber>(word, key[0], key[1]);
    const I drawn[4] = {lanes_in_order(word[0]), lanes_in_order(word[1]), lanes_in_order(word[2]),
                        lanes_in_order(word[3])};
    for (int row = 0; row < kRows; ++row) store_halves(out + row * kLanes, noise_of<Vector>(drawn, row, key[2]));
  }
}

template <class C, int kBits, bool kStochastic>
CGX_HD I quantize(F x, const Grid& g, I random) {
  if constexpr (kStochastic)
    return C::template quantize<Vector, kBits>(x, g, random);
  else
    return C::template quantize<Vector, kBits>(x, g);
}

// The words of a block to and from memory. `count` is empty for a whole block, else its number of lanes.
template <int kBits, class... Count>
CGX_HD void put_block(uint8_t* out, const Words<Vector, kBits>& w, int lanes, Count... count) {
  if constexpr (kBits & 12) store_words(out, w.a, count...), out += 4 * lanes;
  if constexpr (kBits & 8) store_words(out, w.b, count...);
  if constexpr (kBits & 2) store_halves(out, w.c, count...), out += 2 * lanes;
  if constexpr (kBits & 1) store_bytes(out, w.d, count...);
}
template <int kBits, class... Count>
CGX_HD Words<Vector, kBits> get_block(const uint8_t* p, int lanes, Count... count) {
  Words<Vector, kBits> w;
  w.clear();
  if constexpr (kBits & 12) w.a = load_words(p, count...), p += 4 * lanes;
  if constexpr (kBits & 8) w.b = load_words(p, count...);
  if constexpr (kBits & 2) w.c = load_halves(p, count...), p += 2 * lanes;
  if constexpr (kBits & 1) w.d = load_bytes(p, count...);
  return w;
}

template <int kBits>
void pack_codes(const int32_t* codes, int64_t n, uint8_t* out) {
  for (; n > 0; n -= kBlock, codes += kBlock, out += kLanes * kBits) {
    const int lanes = lanes_of(n);
    Words<Vector, kBits> words;
    words.clear();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) words.put(row, load_words(codes + row * lanes, in_row(n, lanes, row)));
    put_block<kBits>(out, words, lanes, lanes);
  }
}
template <int kBits>
void unpack_codes(const uint8_t* in, int64_t n, int32_t* codes) {
  for (; n > 0; n -= kBlock, codes += kBlock, in += kLanes * kBits) {
    const int lanes = lanes_of(n);
    const auto words = get_block<kBits>(in, lanes, lanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store_words(codes + row * lanes, words.get(row), in_row(n, lanes, row));
  }
}
void pack(const int32_t* codes, int64_t n, int bits, uint8_t* out) {
  static constexpr decltype(&pack_codes<1>) kTable[] = {pack_codes<1>, pack_codes<2>, pack_codes<3>, pack_codes<4>,
                                                        pack_codes<5>, pack_codes<6>, pack_codes<7>};
  kTable[bits - 1](codes, n, out);
}
void unpack(const uint8_t* in, int64_t n, int bits, int32_t* codes) {
  static constexpr decltype(&unpack_codes<1>) kTable[] = {unpack_codes<1>, unpack_codes<2>, unpack_codes<3>,
                                                          unpack_codes<4>, unpack_codes<5>, unpack_codes<6>,
                                                          unpack_codes<7>};
  kTable[bits - 1](in, n, codes);
}

// Calls f(i, signs) for the vectors of n elements: the sign bits of elements i to i + 15 (codec/rotation.h).
template <class Fn>
CGX_HD void each_sign(int64_t n, uint32_t seed, Fn f) {
  for (int64_t i = 0; i < n;) {
    PhiloxWord word[4] = {philox_word(splat_i(static_cast<int32_t>(i / kSignRows)) + iota()), philox_word(splat_i(0)),
                          philox_word(splat_i(0)), philox_word(splat_i(0))};
    philox<PhiloxNumber>(word, seed, 0);
    for (int w = 0; w < 4 && i < n; ++w) {
      I left = lanes_in_order(word[w]);
      for (int row = 0; row < 32 && i < n; ++row, i += kLanes, left = shl(left, 1)) f(i, left & splat_i(INT32_MIN));
    }
  }
}

// Every pass over a rotated bucket prefetches a quarter of the next bucket, while memory is idle.
CGX_HD void prefetch_quarter(const float*& ahead, int vectors) {
  for (int k = 0; k < vectors; k += 4, ahead += kLanes) __builtin_prefetch(ahead);
}

// kSteps steps of the transform. The last one adds elements that are `apart`.
template <int kSteps>
void butterflies(float* x, int64_t n, int64_t apart, const float*& ahead) {
  constexpr int kMany = 1 << kSteps;
  for (int64_t first = 0; first < n; first += kMany * apart) {
    for (int64_t i = first; i < first + apart; i += kLanes) {
      prefetch_quarter(ahead, kMany);
      F v[kMany];
#pragma GCC unroll 16
      for (int k = 0; k < kMany; ++k) v[k] = load(x + i + k * apart);
#pragma GCC unroll 4
      for (int half = kMany / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
        for (int k = 0; k < kMany; ++k) {
          if (k & half) continue;
          const F a = v[k], b = v[k + half];
          v[k] = a + b, v[k + half] = a - b;
        }
      }
#pragma GCC unroll 16
      for (int k = 0; k < kMany; ++k) store(x + i + k * apart, v[k]);
    }
  }
}
template <int kApart>
CGX_HD F butterfly(F x) {
  constexpr int kShift = kApart == 1 ? 31 : kApart == 2 ? 30 : kApart == 4 ? 29 : 28;
  const F sign = as_float(bits(splat_f(1.0f)) | (shl(iota(), kShift) & splat_i(INT32_MIN)));
  return multiply_add(x, sign, swap_lanes<kApart>(x));
}
void hadamard(float* x, int64_t n, const float* ahead) {
#if defined(__AVX512F__)
  constexpr int kSteps = 4;  // in 16 registers
#else
  constexpr int kSteps = 2;
#endif
  int64_t apart = n;
  for (; apart >> kSteps >= kLanes;) butterflies<kSteps>(x, n, apart >>= kSteps, ahead);
  for (; apart > kLanes;) butterflies<1>(x, n, apart >>= 1, ahead);
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    prefetch_quarter(ahead, 4);
    for (int64_t j = i; j < i + 4 * kLanes; j += kLanes)
      store(x + j, butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(load(x + j))))));
  }
}

void rotate(const float* x, int64_t n, const Rotation& rotation, uint32_t seed, float* out) {
  const Rotation r = rotation;
  const I least = bits(splat_f(kDropped));
  const F factor = splat_f(r.scale == 1.0f ? r.power : r.scale);
  const float* ahead = x + n;
  each_sign(padded(n), seed, [&](int64_t i, I sign) {
    if (i % (4 * kLanes) == 0) prefetch_quarter(ahead, 4);
    const int64_t there = n - i;
    const F v = there >= kLanes ? load(x + i) : there > 0 ? load(x + i, static_cast<int>(there)) : splat_f(0.0f);
    F scaled = v * factor;
    if (r.scale != 1.0f) scaled = scaled * splat_f(r.power);
    const F kept = select(less(bits(scaled) & splat_i(INT32_MAX), least), splat_f(0.0f), scaled);
    store(out + i, as_float(bits(kept) ^ sign));
  });
  hadamard(out, padded(n), ahead);
}
void rotate_back(float* values, int64_t n, const RotatedMeta& meta, float* out, Write write) {
  if (write == Write::kAround && (reinterpret_cast<uintptr_t>(out) & 63) != 0) write = Write::kOver;
  const RotatedMeta m = meta;
  hadamard(values, padded(n), values);
  values[0] = m.value(values[0]) + m.base;
  each_sign(n, m.seed, [&](int64_t i, I sign) {
    F v = splat_f(m.unit) * (load(values + i) * splat_f(m.factor)) * splat_f(m.down);
    if (i == 0) v = select(less(iota(), splat_i(1)), load(values), v);
    v = as_float(bits(v) ^ sign);
    const int k = n - i >= kLanes ? kLanes : static_cast<int>(n - i);
    const F so_far = write != Write::kOnto ? splat_f(0.0f) : k == kLanes ? load(out + i) : load(out + i, k);
    if (k < kLanes)
      store(out + i, so_far + v, k);
    else if (write == Write::kAround)
      stream(out + i, so_far + v);
    else
      store(out + i, so_far + v);
  });
}

// The sum of the vectors of all blocks and of their lanes, in the order of codec/eden.h.
float sum_of_lanes(F* of_block, int64_t blocks) {
  for (int64_t step = 1; step < blocks; step *= 2)
    for (int64_t b = 0; b < blocks; b += 2 * step) of_block[b] = of_block[b] + of_block[b + step];
  F sum = of_block[0];
  sum = sum + swap_lanes<8>(sum);
  sum = sum + swap_lanes<4>(sum);
  sum = sum + swap_lanes<2>(sum);
  sum = sum + swap_lanes<1>(sum);
  float lane[kLanes];
  store(lane, sum);
  return lane[0];
}

// The levels, and the squares of the bounds. The index of a level is found bit by bit, from the highest: squares[b][i]
// is the bound that decides bit b if the bits above it are i.
template <int kBits>
struct NormalTables {
  alignas(64) float levels[kMostLevels] = {};
  alignas(64) float squares[kBits][kMostLevels] = {};
  constexpr NormalTables() {
    for (int i = 0; i < 1 << (kBits - 1); ++i) levels[i] = normal_level(kBits, i);
    for (int i = 1; i < 1 << (kBits - 1); ++i) {
      const float bound = normal_bound(kBits, i);
      squares[__builtin_ctz(static_cast<unsigned>(i))][i & (i - 1)] = bound * bound;
    }
  }
};
template <int kBits>
constexpr NormalTables<kBits> kNormal;

template <int kBits>
float normal_codes_of(const float* x, int64_t size, uint8_t* codes) {
  constexpr int kHalf = 1 << (kBits - 1);
  F of_block[kMostRotated / kBlock];
  of_block[0] = splat_f(0.0f);  // gcc doesn't know that there is at least one block
  const int64_t blocks = size / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    F total = splat_f(0.0f);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const F v = load(x + b * kBlock + row * kLanes);
      total = row == 0 ? short_product<Vector>(v, v) : total + short_product<Vector>(v, v);
    }
    of_block[b] = total;
  }
  const float square = sum_of_lanes(of_block, blocks), variance = square / static_cast<float>(size);
  alignas(64) float bounds[kBits][kMostLevels];
  for (int b = 0; b < kBits - 1; ++b)
    for (int i = 0; i < kMostLevels; i += kLanes)
      store(bounds[b] + i, load(kNormal<kBits>.squares[b] + i) * splat_f(variance));
  const Table<kHalf> level(kNormal<kBits>.levels);
  for (int64_t b = 0; b < blocks; ++b, codes += kLanes * kBits) {
    F total = splat_f(0.0f);
    Words<Vector, kBits> words;
    words.clear();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const F v = load(x + b * kBlock + row * kLanes), squared = v * v;
      I index = splat_i(0);
#pragma GCC unroll 5
      for (int b = kBits - 2; b >= 0; --b) {
        const F bound = b == kBits - 2 ? splat_f(bounds[b][0]) : Table<kHalf>(bounds[b])[index];
        index = index + select(less(bits(bound), bits(squared)), splat_i(1 << b), splat_i(0));
      }
      const F term = as_float(bits(v * level[index]) & splat_i(0x7fffff00));  // short_product of |v|
      total = row == 0 ? term : total + term;
      words.put(row, index ^ (splat_i(kHalf) - shr(bits(v), 31)));  // half + index, or half - 1 - index
    }
    put_block<kBits>(codes, words, kLanes);
    of_block[b] = total;
  }
  return square > 0.0f ? square / sum_of_lanes(of_block, blocks) : 0.0f;
}
template <int kBits>
void normal_values_of(const uint8_t* codes, int64_t size, float* values) {
  constexpr int kHalf = 1 << (kBits - 1);
  const Table<kHalf> level(kNormal<kBits>.levels);
  for (int64_t at = 0; at < size; at += kBlock, codes += kLanes * kBits) {
    const auto words = get_block<kBits>(codes, kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const I i = words.get(row) - splat_i(kHalf), negative = i & splat_i(INT32_MIN);
      const F magnitude = level[select(less(i, splat_i(0)), i ^ splat_i(-1), i)];
      store(values + at + row * kLanes, as_float(bits(magnitude) | negative));
    }
  }
}
float normal_codes(const float* x, int64_t size, int bits, uint8_t* codes) {
  static constexpr decltype(&normal_codes_of<1>) kTable[] = {normal_codes_of<1>, normal_codes_of<2>,
                                                             normal_codes_of<3>, normal_codes_of<4>,
                                                             normal_codes_of<5>, normal_codes_of<6>};
  return kTable[bits - 1](x, size, codes);
}
void normal_values(const uint8_t* codes, int64_t size, int bits, float* values) {
  static constexpr decltype(&normal_values_of<1>) kTable[] = {normal_values_of<1>, normal_values_of<2>,
                                                              normal_values_of<3>, normal_values_of<4>,
                                                              normal_values_of<5>, normal_values_of<6>};
  kTable[bits - 1](codes, size, values);
}

// A level of Lossless: writes the digits of n codes, and the codes of the next level, whose number it returns.
// code(i, count...): the codes from i on, 0 past the count.
template <class Code>
CGX_HD int64_t put_level(Code code, int64_t n, int32_t* digit, int32_t* next) {
  int64_t later = 0;
  const auto step = [&](int64_t i, auto... k) {
    const I c = code(i, k...);
    store_words(digit + i, min(c, splat_i(3)), k...);
    later += compress(less(splat_i(3), c), c - splat_i(4), next + later);
  };
  each_vector(n, [&](int64_t i) { step(i); }, [&](int64_t i, int k) { step(i, k); });
  return later;
}

template <DType kType>
int64_t pack_block_of(const void* x, int64_t n, uint8_t* center, uint8_t* planes, uint8_t* overflow) {
  using L = Lossless<kType>;
  constexpr bool kWide = kType == DType::kF32;
  alignas(64) int32_t exponent[kLosslessBlock], digit[kLosslessBlock], high[kLosslessBlock];
  alignas(64) int32_t next[kLosslessBlock + kLanes];
  const auto* in = static_cast<const uint8_t*>(x);
  uint8_t* const low = planes + packed_bytes(n, 2);
  I sum = splat_i(0), number = splat_i(0);
  const auto split = [&](int64_t i, auto... k) {
    I bits;
    if constexpr (kWide)
      bits = load_words(in + 4 * i, k...);
    else
      bits = load_halves(in + 2 * i, k...);
    const I e = L::template exponent<Vector>(bits), rest = L::template rest<Vector>(bits);
    sum = sum + e;
    number = number + select(less(splat_i(0), e), splat_i(1), splat_i(0));
    store_words(exponent + i, e, k...);
    if constexpr (kWide) {
      store_halves(low + 2 * i, rest, k...);
      store_bytes(low + 2 * n + i, shr(rest, 16), k...);
    } else {
      store_bytes(low + i, rest, k...);
    }
    if constexpr (kType == DType::kF16) store_words(high + i, shr(rest, 8), k...);
  };
  each_vector(n, [&](int64_t i) { split(i); }, [&](int64_t i, int k) { split(i, k); });
  if constexpr (kType == DType::kF16) pack_codes<3>(high, n, low + n);

  const int32_t middle = L::center(total(sum), total(number));
  *center = static_cast<uint8_t>(middle);
  const auto code = [&](int64_t i, auto... k) {
    const I c = L::template code<Vector>(load_words(exponent + i, k...), middle);
    if constexpr (sizeof...(k) == 0)
      return c;
    else
      return select(less(iota(), splat_i(k...)), c, splat_i(0));
  };
  int64_t left = put_level(code, n, digit, next), bytes = 0;
  pack_codes<2>(digit, n, planes);
  const int64_t most = lossless_most_bytes(kType, n);
  while (left > 0) {
    const int64_t count = left, list = packed_bytes(count, 2);
    if (bytes + list >= most) break;
    left = put_level([&](int64_t i, auto... k) { return load_words(next + i, k...); }, count, digit, next);
    pack_codes<2>(digit, count, overflow + bytes);
    bytes += list;
  }
  if (left == 0) return bytes;
  const auto halve = [&](int64_t i, auto... k) {
    const I e = load_words(exponent + i, k...);
    store_words(digit + i, e & splat_i(3), k...);
    store_words(high + i, shr(e, 2), k...);
  };
  each_vector(n, [&](int64_t i) { halve(i); }, [&](int64_t i, int k) { halve(i, k); });
  pack_codes<2>(digit, n, planes);
  overflow[most - 1] = 0;  // packed_bytes may be one less
  pack_codes<L::kExponent - 2>(high, n, overflow);
  return most;
}

template <DType kType>
void unpack_block_of(int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow, int64_t bytes,
                     void* x) {
  using L = Lossless<kType>;
  constexpr bool kWide = kType == DType::kF32;
  constexpr int64_t kMost = kLosslessBlock / kRows * 6;  // lossless_most_bytes
  // Lists of digits, level after level. A digit 3 is replaced by the code of its element in the next level, plus 4.
  alignas(64) int32_t code[kLosslessBlock + 4 * kMost + kLosslessBlock + kLanes];
  int32_t high[kLosslessBlock];
  uint8_t padded[kMost + kLosslessBlock / 4];  // digits past the last byte are 0
  unpack_codes<2>(planes, n, code);
  const bool raw = bytes == lossless_most_bytes(kType, n);
  if (raw) {
    unpack_codes<L::kExponent - 2>(overflow, n, high);
  } else {
    memset(padded + bytes, 0, sizeof padded - static_cast<size_t>(bytes));
    memcpy(padded, overflow, static_cast<size_t>(bytes));
    int64_t begin[kMost / 2 + 3], levels = 1, at = 0;
    begin[0] = 0, begin[1] = n;
    const auto threes = [&](const int32_t* digit, int64_t count) {
      int64_t found = 0;
      each_vector(
          count, [&](int64_t i) { found += __builtin_popcount(lanes(less(splat_i(2), load_words(digit + i)))); },
          [&](int64_t i, int k) { found += __builtin_popcount(lanes(less(splat_i(2), load_words(digit + i, k)))); });
      return found;
    };
    for (int64_t count = n; (count = threes(code + begin[levels - 1], count)) > 0; ++levels) {
      begin[levels + 1] = begin[levels] + count;
      unpack_codes<2>(padded + (at < bytes ? at : bytes), count, code + begin[levels]);
      at += packed_bytes(count, 2);
    }
    for (int64_t level = levels - 2; level >= 0; --level) {
      const int32_t* from = code + begin[level + 1];
      const auto join = [&](int64_t i, auto... k) {
        const I digit = load_words(code + i, k...);
        const M later = less(splat_i(2), digit);
        const I more = expand(later, from) + splat_i(4);
        from += __builtin_popcount(lanes(later));
        store_words(code + i, select(later, more, digit), k...);
      };
      const int64_t first = begin[level];
      each_vector(
          begin[level + 1] - first, [&](int64_t i) { join(first + i); }, [&](int64_t i, int k) { join(first + i, k); });
    }
  }
  const uint8_t* const low = planes + packed_bytes(n, 2);
  int32_t top[kLosslessBlock];
  if constexpr (kType == DType::kF16) unpack_codes<3>(low + n, n, top);
  auto* const out = static_cast<uint8_t*>(x);
  const auto unite = [&](int64_t i, auto... k) {
    I rest;
    if constexpr (kWide)
      rest = load_halves(low + 2 * i, k...) | shl(load_bytes(low + 2 * n + i, k...), 16);
    else
      rest = load_bytes(low + i, k...);
    if constexpr (kType == DType::kF16) rest = rest | shl(load_words(top + i, k...), 8);
    const I c = load_words(code + i, k...);
    I e;
    if (raw)
      e = c | shl(load_words(high + i, k...), 2);
    else
      e = L::template exponent_of<Vector>(c, center);
    const I bits = L::template bits<Vector>(e, rest);
    if constexpr (kWide)
      store_words(out + 4 * i, bits, k...);
    else
      store_halves(out + 2 * i, bits, k...);
  };
  each_vector(n, [&](int64_t i) { unite(i); }, [&](int64_t i, int k) { unite(i, k); });
}

int64_t pack_block(DType dtype, const void* x, int64_t n, uint8_t* center, uint8_t* planes, uint8_t* overflow) {
  static constexpr decltype(&pack_block_of<DType::kF32>) kTable[] = {
      pack_block_of<DType::kF32>, pack_block_of<DType::kBF16>, pack_block_of<DType::kF16>};
  return kTable[static_cast<int>(dtype)](x, n, center, planes, overflow);
}
void unpack_block(DType dtype, int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow, int64_t bytes,
                  void* x) {
  static constexpr decltype(&unpack_block_of<DType::kF32>) kTable[] = {
      unpack_block_of<DType::kF32>, unpack_block_of<DType::kBF16>, unpack_block_of<DType::kF16>};
  kTable[static_cast<int>(dtype)](n, center, planes, overflow, bytes, x);
}

template <class C, int kBits, bool kStochastic>
void encode(const float* x, int64_t n, const Grid& grid, const uint16_t* noise, uint8_t* codes) {
  const Grid g = grid;  // stores through `codes` can't change a copy
  const int64_t ahead = n;
  for (; n >= kBlock; n -= kBlock, x += kBlock, codes += kLanes * kBits) {
    // This bucket was already read for its statistics, so memory is idle: prefetch the next one.
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

// The scales of a block, from its bytes.
template <class C, int kBits>
CGX_HD void get_scales(const uint8_t* block, float (&scales)[kLanes]) {
  if constexpr (traits_of(C::kKind).scales)
    store(scales, C::template scale<Vector>(load_bytes(block + kLanes * kBits, C::kScales)));
}
template <class C, int kBits>
CGX_HD F plus(F so_far, F unit, I code, const float (&scales)[kLanes], int row) {
  F value = C::template value<Vector, kBits>(code);
  if constexpr (traits_of(C::kKind).scales) value = value * splat_f(scales[row / C::kScaleRows]);
  return traits_of(C::kKind).exact ? multiply_add(unit, value, so_far) : so_far + unit * value;
}

template <class C, int kBits>
void decode(const Terms& t, int64_t n, float base, float* out, Write write) {
  if (write == Write::kAround && (reinterpret_cast<uintptr_t>(out) & 63) != 0) write = Write::kOver;
  int64_t at = 0;  // of the codes
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

// The codes of the nearest numbers.
template <class C, int kBits>
struct ToNumber {
  CGX_HD I operator()(F y) const { return C::template quantize<Vector>(y); }
};
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
// For 4 bits the numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. The exponent and two bits of the mantissa tell which is
// nearest, because the bounds between them need no more bits. A number on a bound goes to the even code: up if its
// mantissa begins with 1.
constexpr struct NumberTable {
  // By the last 5 bits of exponent and mantissa, of numbers from 1/16 to less than 16.
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
    const I down = splat_i(1) & (shr(magnitude, 22) ^ splat_i(-1));
    return bits(code[shr(magnitude - down, 21)]) | (shr(bits(y), 28) & splat_i(8));
  }
};
#endif

// A bucket whose blocks have scales of their own.
template <class C, int kBits>
void encode_scaled(const float* x, int64_t n, const Grid& grid, const uint16_t* /*noise*/, uint8_t* codes) {
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
    const I scales = C::template scale_code<Vector>(largest);
    alignas(64) float inverse[kLanes];
    store(inverse, C::template inverse<Vector>(scales));
    alignas(64) int32_t kept[kLanes];
    if (C::kPower) store_words(kept, select(C::template is_number<Vector>(scales), splat_i(-1), splat_i(0)));
    Words<Vector, kBits> words;
    words.clear();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const int s = row / C::kScaleRows;
      const I code = to_number(y[row] * splat_f(inverse[s]));
      words.put(row, C::kPower ? code & splat_i(kept[s]) : code);
    }
    put_block<kBits>(codes, words, kLanes);
    store_bytes(codes + kLanes * kBits, scales, C::kScales);
  }
}

EncodeFn encoder(const Codec& c) {
  if (!has_buckets(c.kind) || traits_of(c.kind).table) return nullptr;
  return with_encoder(c, [](auto variant) -> EncodeFn {
    using V = decltype(variant);
    if constexpr (traits_of(V::Codec::kKind).scales)
      return encode_scaled<typename V::Codec, V::bits>;
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
                          pack_block,
                          unpack_block,
                          encoder,
                          decoder,
                          caster};

}  // namespace jaxcgx::cpu::JAXCGX_ISA
