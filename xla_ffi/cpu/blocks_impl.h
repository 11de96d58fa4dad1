// Kernels for blocks of 128 elements: sums, noise, and the packing of codes. A part of kernels_impl.h.
#pragma once

#include "codec/pack.h"
#include "codec/rng.h"
#include "cpu/arrays_impl.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// Returns the number of elements in a row of a block of n elements.
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
      // The test is not `lanes == kLanes`: a short block of 121 elements or more has 16 lanes, but its last row is
      // short.
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
    // noise_of (codec/rng.h), whose upper halves are not stored
    for (int row = 0; row < kRows; ++row) {
      const I half = row & 1 ? shr(drawn[row / 2], 16) : drawn[row / 2];
      store_halves(out + row * kLanes, half + splat_i(static_cast<int32_t>(key[2])));
    }
  }
}

template <class C, int kBits, bool kStochastic>
CGX_HD I quantize(F x, const Grid& g, I random) {
  if constexpr (kStochastic)
    return C::template quantize<Vector, kBits>(x, g, random);
  else
    return C::template quantize<Vector, kBits>(x, g);
}

// put_block and get_block store and load the words of a block. `count` is empty for a whole block, else its number of
// lanes.
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

// Packs n codes: of(i) returns those of the vector from element i on, and of(i, count) fewer, with 0 past the count.
template <int kBits, class Of>
CGX_HD void pack_each(int64_t n, uint8_t* out, Of of) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock, out += kLanes * kBits) {
    Words<Vector, kBits> words;
    words.clear();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) words.put(row, of(i + row * kLanes));
    put_block<kBits>(out, words, kLanes);
  }
  if (i == n) return;
  const int lanes = lanes_of(n - i);
  Words<Vector, kBits> words;
  words.clear();
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) words.put(row, of(i + row * lanes, in_row(n - i, lanes, row)));
  put_block<kBits>(out, words, lanes, lanes);
}
template <int kBits>
void pack_codes(const int32_t* codes, int64_t n, uint8_t* out) {
  pack_each<kBits>(n, out, [=](int64_t i, auto... k) { return load_words(codes + i, k...); });
}
template <int kBits>
void unpack_codes(const uint8_t* in, int64_t n, int32_t* codes) {
  for (; n >= kBlock; n -= kBlock, codes += kBlock, in += kLanes * kBits) {
    const auto words = get_block<kBits>(in, kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store_words(codes + row * kLanes, words.get(row));
  }
  if (n == 0) return;
  const int lanes = lanes_of(n);
  const auto words = get_block<kBits>(in, lanes, lanes);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) store_words(codes + row * lanes, words.get(row), in_row(n, lanes, row));
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

}  // namespace
}  // namespace jaxcgx::cpu::JAXCGX_ISA
