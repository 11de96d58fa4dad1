// Kernels for arrays: conversion to and from float, arithmetic, statistics, and the search for large elements. A part
// of kernels_impl.h.
#pragma once

#include "codec/cast.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// Calls full(i) for every whole vector of 16 elements, and rest(i, count) for the last `count` < 16 elements.
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

// Sets out[i] = op(x[i]...).
template <class Op, class... X>
CGX_HD void map(int64_t n, float* out, Op op, const X*... x) {
  each_vector(
      n, [&](int64_t i) { store(out + i, op(load(x + i)...)); },
      [&](int64_t i, int k) { store(out + i, op(load(x + i, k)...), k); });
}
void add(const float* x, const float* y, int64_t n, float* out) {
  map(n, out, [](F a, F b) { return a + b; }, x, y);
}
// Returns whether the magnitude of x has bits >= `least`.
CGX_HD M at_least(F x, uint32_t least) {
  return less(splat_i(static_cast<int32_t>(least - 1u)), bits(x) & splat_i(0x7fffffff));
}
CGX_HD F held(F x, F old, uint32_t least) { return select(at_least(x, least), old, x); }
void hold(const float* x, const float* old, int64_t n, uint32_t least, float* out) {
  map(n, out, [=](F a, F was) { return held(a, was, least); }, x, old);
}
void residual(const float* x, const float* y, const float* old, int64_t n, float* out) {
  map(n, out, [](F a, F b, F was) { return held(a - b, was, kNotFinite); }, x, y, old);
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
  // min and max may drop a NaN, so a NaN is recorded as an infinite range.
  s->lo = any(nan) ? -__builtin_inff() : lowest(min(lo0, lo1));
  s->hi = any(nan) ? __builtin_inff() : highest(max(hi0, hi1));
}

float largest_magnitude(const float* x, int64_t n) {
  F most[2] = {splat_f(0.0f), splat_f(0.0f)};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) most[0] = largest(most[0], load(x + i)), most[1] = largest(most[1], load(x + i + 16));
  for (; i < n; i += 16) most[0] = largest(most[0], load(x + i, n - i < 16 ? static_cast<int>(n - i) : 16));
  return highest(largest(most[0], most[1]));
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
  constexpr int kTogether = 4;  // vectors per branch: most vectors have no element to take
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

}  // namespace
}  // namespace jaxcgx::cpu::JAXCGX_ISA
