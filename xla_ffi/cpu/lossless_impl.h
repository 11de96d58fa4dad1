// Kernels for Lossless. A part of kernels_impl.h.
#pragma once

#include "cpu/blocks_impl.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// Splits n codes into the digits of this level and the codes that continue in the next level. Returns the number of
// codes in `next`. code(i, count...) returns the codes from i on, with 0 past the count.
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
  overflow[most - 1] = 0;  // `most` is rounded up to an even number, so the packed codes may not write this byte
  pack_codes<L::kExponent - 2>(high, n, overflow);
  return most;
}

template <DType kType>
void unpack_block_of(int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow, int64_t bytes,
                     void* x) {
  using L = Lossless<kType>;
  constexpr bool kWide = kType == DType::kF32;
  constexpr int64_t kMost = kLosslessBlock / kRows * 6;  // lossless_most_bytes
  // The digits, one level after another. The levels are joined from the last to the first: each digit 3 is replaced by
  // the code of its element in the next level plus 4, so that level 0 has the codes of all elements.
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

}  // namespace
}  // namespace jaxcgx::cpu::JAXCGX_ISA
