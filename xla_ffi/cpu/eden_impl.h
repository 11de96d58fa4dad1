// Kernels for rotated buckets and for Eden. A part of kernels_impl.h.
#pragma once

#include <type_traits>

#include "codec/eden.h"
#include "cpu/blocks_impl.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// The random signs of a bucket (codec/rotation.h). A word has those of 32 rows.
struct Signs {
  I word[kMostRotated / kLanes / 32];

  CGX_HD Signs(int64_t n, uint32_t seed) {
    for (int draw = 0; draw * kSignRows * kLanes < n; ++draw) {
      PhiloxWord drawn[4] = {philox_word(splat_i(draw * kLanes) + iota()), philox_word(splat_i(0)),
                             philox_word(splat_i(0)), philox_word(splat_i(0))};
      philox<PhiloxNumber>(drawn, seed, 0);
      for (int w = 0; w < 4; ++w) word[4 * draw + w] = lanes_in_order(drawn[w]);
    }
  }
  // Returns x with the signs of a row.
  CGX_HD F flip(F x, unsigned row) const {
    const I sign = shl(word[row / 32], splat_i(static_cast<int32_t>(row % 32)));
    return as_float(bits(x) ^ (sign & splat_i(INT32_MIN)));
  }
};

// Does one step of the transform within a vector.
template <int kApart>
CGX_HD F butterfly(F x) {
  constexpr int kShift = kApart == 1 ? 31 : kApart == 2 ? 30 : kApart == 4 ? 29 : 28;
  const F sign = as_float(bits(splat_f(1.0f)) | (shl(iota(), kShift) & splat_i(INT32_MIN)));
  return multiply_add(x, sign, swap_lanes<kApart>(x));
}

// Does the steps within vectors for elements up to kApart apart. Vectors take each step together: a vector's steps
// depend on one another, and the processor looks only a few vectors ahead.
template <int kApart, int kMany>
CGX_HD void butterflies(F (&v)[kMany]) {
#pragma GCC unroll 16
  for (int k = 0; k < kMany; ++k) v[k] = butterfly<kApart>(v[k]);
  if constexpr (kApart > 1) butterflies<kApart / 2>(v);
}

// The transform of kVectors vectors, in two passes over them, and in more where registers are few. The first pass takes
// vectors together that are far apart, the last one takes neighbours.
template <int kVectors>
struct Transform {
#if defined(__AVX512F__)
  static constexpr int kTogether = 16;  // of 32 registers
#else
  static constexpr int kTogether = 4;
#endif
  static constexpr int kLast = kVectors < kTogether ? kVectors : kTogether;
  static constexpr int kFirst = kVectors / kLast < kTogether ? kVectors / kLast : kTogether;

  // Does the steps of a pass: adds and subtracts vectors that are less than kGroup apart, and at least kGroup / kMany.
  // If kWithin, also does the steps within vectors. of(row) returns a vector. put(row, x) takes the one that replaces
  // it.
  template <int kGroup, int kMany, bool kWithin, class Of, class Put>
  CGX_HD static void pass(Of of, Put put) {
    constexpr int kApart = kGroup / kMany;
    for (int group = 0; group < kVectors; group += kGroup) {
      for (int row = group; row < group + kApart; ++row) {
        F v[kMany];
#pragma GCC unroll 16
        for (int k = 0; k < kMany; ++k) v[k] = of(row + k * kApart);
#pragma GCC unroll 4
        for (int half = kMany / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
          for (int k = 0; k < kMany; ++k) {
            if (k & half) continue;
            const F a = v[k], b = v[k + half];
            v[k] = a + b, v[k + half] = a - b;
          }
        }
        if constexpr (kWithin) butterflies<8>(v);
#pragma GCC unroll 16
        for (int k = 0; k < kMany; ++k) put(row + k * kApart, v[k]);
      }
    }
  }
  template <class Of, class Put>
  CGX_HD static void first(Of of, Put put) {
    pass<kVectors, kFirst, false>(of, put);
  }
  template <int kGroup = kVectors / kFirst>
  CGX_HD static void between(float* x) {
    if constexpr (kGroup > kLast) {
      constexpr int kMany = kGroup / kLast < kTogether ? kGroup / kLast : kTogether;
      pass<kGroup, kMany, false>([=](int row) { return load(x + row * kLanes); },
                                 [=](int row, F v) { store(x + row * kLanes, v); });
      between<kGroup / kMany>(x);
    }
  }
  // Prefetches the bucket at `next`, if any.
  CGX_HD static void last(float* x, const float* next = nullptr) {
    pass<kLast, kLast, true>(
        [=](int row) {
          if (next != nullptr) __builtin_prefetch(next + row * kLanes, 0, 2);
          return load(x + row * kLanes);
        },
        [=](int row, F v) { store(x + row * kLanes, v); });
  }
};
// Calls f(the vectors of a rotated bucket, as a constant).
template <int kVectors = kBlock / kLanes, class Fn>
CGX_HD void with_vectors(int64_t size, Fn f) {
  if constexpr (kVectors * kLanes < kMostRotated) {
    if (size > kVectors * kLanes) return with_vectors<2 * kVectors>(size, f);
  }
  f(std::integral_constant<int, kVectors>());
}

template <int kVectors>
void rotate_vectors(const float* x, const Rotation& r, uint32_t seed, float* out) {
  using T = Transform<kVectors>;
  const Signs signs(kVectors * kLanes, seed);
  const F power = splat_f(r.power);
  // Numbers below kDropped after the multiplication, and zeros of both signs.
  const I dropped = max(bits(splat_f(kDropped * r.inverse)) - splat_i(1), splat_i(0));
  T::first(
      [&](int row) {
        const F v = load(x + row * kLanes);
        const M keep = less(dropped, bits(v) & splat_i(INT32_MAX));
        return signs.flip(multiply_where(keep, v, power), static_cast<unsigned>(row));
      },
      [&](int row, F v) { store(out + row * kLanes, v); });
  T::between(out);
  // The next bucket: this one is in the cache, so memory is idle. The first pass waits for its loads already.
  T::last(out, x + kVectors * kLanes);
}
void rotate(const float* x, int64_t n, const Rotation& rotation, uint32_t seed, float* out) {
  const Rotation r = rotation;
  const int64_t size = padded(n);
  if (n < size || r.scale != 1.0f) {
    scale(x, n, r.scale, out);
    memset(out + n, 0, static_cast<size_t>(size - n) * sizeof(float));
    x = out;
  }
  with_vectors(size, [&](auto vectors) { rotate_vectors<decltype(vectors)::value>(x, r, seed, out); });
}

template <int kVectors>
void rotate_vectors_back(float* values, const RotatedMeta& m, float* out, Write write) {
  using T = Transform<kVectors>;
  const Signs signs(kVectors * kLanes, m.seed);
  const F unit = splat_f(m.unit * m.factor), down = splat_f(m.down);  // m.value(), as the factor is a power of two
  T::last(values);
  T::between(values);
  T::first([&](int row) { return load(values + row * kLanes); },
           [&](int row, F sum) {
             F v = unit * sum * down;
             if (row == 0) {
               float lanes[kLanes];
               store(lanes, sum);
               v = select(less(iota(), splat_i(1)), splat_f(m.first(lanes[0])), v);
             }
             float* const to = out + row * kLanes;
             const F so_far = write == Write::kOnto ? load(to) : splat_f(0.0f);
             v = so_far + signs.flip(v, static_cast<unsigned>(row));
             if (write == Write::kAround)
               stream(to, v);
             else
               store(to, v);
           });
}
void rotate_back(float* values, int64_t n, const RotatedMeta& meta, float* out, Write write) {
  const RotatedMeta m = meta;
  if (write == Write::kAround && (reinterpret_cast<uintptr_t>(out) & 63) != 0) write = Write::kOver;
  const int64_t size = padded(n);
  const bool whole = n == size;  // else the bucket is longer than `out`
  with_vectors(size, [&](auto vectors) {
    rotate_vectors_back<decltype(vectors)::value>(values, m, whole ? out : values, whole ? write : Write::kOver);
  });
  if (whole) return;
  if (write == Write::kOnto)
    add(out, values, n, out);
  else
    memcpy(out, values, static_cast<size_t>(n) * sizeof(float));
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
#if defined(__AVX512F__)
  constexpr int kTogether = kRows;  // vectors take each step together, as in butterflies
#else
  constexpr int kTogether = 1;  // there are few registers
#endif
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
    for (int row = 0; row < kRows; row += kTogether) {
      F v[kTogether];
      I squared[kTogether], index[kTogether];
#pragma GCC unroll 8
      for (int k = 0; k < kTogether; ++k) {
        v[k] = load(x + b * kBlock + (row + k) * kLanes);
        squared[k] = bits(v[k] * v[k]), index[k] = splat_i(0);
      }
#pragma GCC unroll 5
      for (int b = kBits - 2; b >= 0; --b) {
#pragma GCC unroll 8
        for (int k = 0; k < kTogether; ++k) {
          const F bound = b == kBits - 2 ? splat_f(bounds[b][0]) : Table<kHalf>(bounds[b])[index[k]];
          index[k] = add_where(less(bits(bound), squared[k]), index[k], splat_i(1 << b));
        }
      }
#pragma GCC unroll 8
      for (int k = 0; k < kTogether; ++k) {
        const F term = as_float(bits(v[k] * level[index[k]]) & splat_i(0x7fffff00));  // short_product of |v|
        total = row + k == 0 ? term : total + term;
        words.put(row + k, index[k] ^ (sign_of(bits(v[k])) & splat_i(2 * kHalf - 1)));
      }
    }
    // A code is half + index, or half - 1 - index, which has all bits inverted. So far, half has not been added.
    words.invert_highest();
    put_block<kBits>(codes, words, kLanes);
    of_block[b] = total;
  }
  return square == 0.0f ? 0.0f : square / sum_of_lanes(of_block, blocks);
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
float unbiased_unit(const float* x, const float* values, int64_t size) {
  F squares[kMostRotated / kBlock], products[kMostRotated / kBlock];
  squares[0] = products[0] = splat_f(0.0f);  // avoids a warning, as in normal_codes_of
  for (int64_t b = 0; b < size / kBlock; ++b) {
    for (int row = 0; row < kRows; ++row, x += kLanes, values += kLanes) {
      const F v = load(x), square = short_product<Vector>(v, v), product = short_product<Vector>(v, load(values));
      squares[b] = row == 0 ? square : squares[b] + square;
      products[b] = row == 0 ? product : products[b] + product;
    }
  }
  const float square = sum_of_lanes(squares, size / kBlock);
  return square == 0.0f ? 0.0f : square / sum_of_lanes(products, size / kBlock);
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
