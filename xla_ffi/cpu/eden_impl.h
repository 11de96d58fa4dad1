// Kernels for rotated buckets and for Eden. A part of kernels_impl.h.
#pragma once

#include "codec/eden.h"
#include "cpu/blocks_impl.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// Calls f(i, signs) for each vector of n elements, with the random sign bits of elements i to i + 15
// (codec/rotation.h).
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

// Prefetches a quarter of `vectors` vectors. The bucket itself is in the cache, so memory is idle, and every pass over
// the bucket prefetches a quarter of the next one.
CGX_HD void prefetch_quarter(const float*& ahead, int vectors) {
  for (int k = 0; k < vectors; k += 4, ahead += kLanes) __builtin_prefetch(ahead);
}

// Does kSteps steps of the transform in registers. The last step adds elements that are `apart` elements apart.
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
// Does one step of the transform within a vector.
template <int kApart>
CGX_HD F butterfly(F x) {
  constexpr int kShift = kApart == 1 ? 31 : kApart == 2 ? 30 : kApart == 4 ? 29 : 28;
  const F sign = as_float(bits(splat_f(1.0f)) | (shl(iota(), kShift) & splat_i(INT32_MIN)));
  return multiply_add(x, sign, swap_lanes<kApart>(x));
}
void hadamard(float* x, int64_t n, const float* ahead) {
#if defined(__AVX512F__)
  constexpr int kSteps = 4;  // 16 vectors, of 32 registers
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
  values[0] = m.first(values[0]);
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

// Returns the sum of the vectors of all blocks and of their lanes, in the order of codec/eden.h. Overwrites `of_block`.
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

// The levels, and the squares of the bounds. The index of a level is found by binary search, one bit at a time from the
// highest. squares[b][i] is the square of the bound that decides bit b if the bits above it are i.
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
  of_block[0] = splat_f(0.0f);  // avoids a warning: gcc doesn't know that there is at least one block
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

}  // namespace
}  // namespace jaxcgx::cpu::JAXCGX_ISA
