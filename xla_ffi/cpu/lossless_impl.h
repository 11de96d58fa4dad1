// Kernels for Lossless. A part of kernels_impl.h.
#pragma once

#include "cpu/blocks_impl.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

// Packs the digits of a level of n <= 512 codes. The codes that continue in the next level replace them. Returns their
// number. `codes` and `digit` have room for a vector more.
template <class Code>
CGX_HD int64_t pack_level(Code code, int64_t n, uint8_t* out, int32_t* codes, int32_t* digit) {
  int64_t later = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const I c = select(less(iota(), splat_i(static_cast<int32_t>(n - i))), code(load_words(codes + i)), splat_i(0));
    store_words(digit + i, min(c, splat_i(3)));
    later += compress(less(splat_i(3), c), c - splat_i(4), codes + later);
  }
  store_words(digit + n, splat_i(0));
  for (int64_t i = 0; i < n; i += kBlock, digit += kBlock, out += 2 * kLanes) {
    const int lanes = lanes_of(n - i);
    Words<Vector, 2> words;
    words.clear();
    // Lanes past those of the block are not stored.
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) words.put(row, load_words(digit + row * lanes));
    put_block<2>(out, words, lanes, lanes);
  }
  return later;
}

// Returns the first digits of exponents, from the exponents times two (codec/lossless.h): 2, 0 and 1 for the exponents
// from one above the center down, and 3 for all others. Exponent 0 is one of the others, unless it is the center.
CGX_HD I first_digit(I twice, int32_t center) {
  // The first three pairs of bits are these digits, inverted. Longer shifts, and negative ones, leave no bit.
  const auto digits = static_cast<int32_t>(center == 1 ? 0x70000000u : 0x78000000u);
  return shr(shl(splat_i(digits), splat_i(2 * center + 2) - twice), 30) ^ splat_i(3);
}

// Returns the elements of a block from i on, as bits.
template <DType kType, class... Count>
CGX_HD I load_bits(const void* x, int64_t i, Count... count) {
  if constexpr (kType == DType::kF32)
    return load_words(static_cast<const uint32_t*>(x) + i, count...);
  else
    return load_halves(static_cast<const uint16_t*>(x) + i, count...);
}

// Writes the planes of a block, and to `next` the exponents that have more digits, times two. Returns their number.
template <DType kType>
CGX_HD int64_t pack_planes(const void* x, int64_t n, int32_t* center, uint8_t* planes, int32_t* next) {
  using L = Lossless<kType>;
  alignas(64) int32_t exponent[kLosslessBlock], high[kLosslessBlock];  // exponents times two
  uint8_t* const low = planes + packed_bytes(n, 2);
  I sum = splat_i(0), least = splat_i(1);
  const auto split = [&](int64_t i, auto... k) {
    const I bits = load_bits<kType>(x, i, k...), rest = L::template rest<Vector>(bits);
    const I e = shr(bits, L::kMantissa - 1) & splat_i(2 * L::kLargest);
    sum = sum + e;
    least = min(least, e);
    store_words(exponent + i, e, k...);
    if constexpr (kType == DType::kF32) {
      store_halves(low + 2 * i, rest, k...);
      store_bytes(low + 2 * n + i, shr(rest, 16), k...);
    } else {
      store_bytes(low + i, rest, k...);
    }
    if constexpr (kType == DType::kF16) store_words(high + i, shr(rest, 8), k...);
  };
  each_vector(n, [&](int64_t i) { split(i); }, [&](int64_t i, int k) { split(i, k); });
  if constexpr (kType == DType::kF16) pack_codes<3>(high, n, low + n);
  auto number = static_cast<int32_t>(n);
  if (any(less(least, splat_i(1)))) {  // exponents of 0 don't count
    I zeros = splat_i(0);
    const auto find = [&](int64_t i, auto... k) {
      zeros = add_where(less(load_words(exponent + i, k...), splat_i(1)), zeros, splat_i(1));
    };
    each_vector(n, [&](int64_t i) { find(i); }, [&](int64_t i, int k) { find(i, k); });
    number = static_cast<int32_t>(div_up(n, kLanes) * kLanes) - total(zeros);  // lanes past the end have zeros, too
  }
  const int32_t middle = *center = L::center(total(sum) / 2, number);
  int64_t left = 0;
  pack_each<2>(n, planes, [&](int64_t i, auto... k) {
    const I e = load_words(exponent + i, k...);
    I d = first_digit(e, middle);
    if constexpr (sizeof...(k) > 0) d = select(less(iota(), splat_i(k...)), d, splat_i(0));
    left += compress(less(splat_i(2), d), e, next + left);
    return d;
  });
  return left;
}
// Writes the overflow of a block, and returns its bytes. `twice` are the `left` exponents of pack_planes.
template <DType kType>
CGX_HD int64_t pack_overflow(const void* x, int64_t n, int32_t center, int32_t* twice, int64_t left, uint8_t* planes,
                             uint8_t* overflow) {
  using L = Lossless<kType>;
  alignas(64) int32_t digit[kLosslessBlock + 2 * kLanes], high[kLosslessBlock];
  const int64_t most = lossless_most_bytes(kType, n);
  int64_t bytes = 0;
  for (bool second = true; left > 0; second = false) {
    const int64_t list = packed_bytes(left, 2);
    if (bytes + list >= most) break;
    if (second)
      left = pack_level([&](I e) { return L::template code<Vector>(shr(e, 1), center) - splat_i(4); }, left,
                        overflow + bytes, twice, digit);
    else
      left = pack_level([](I code) { return code; }, left, overflow + bytes, twice, digit);
    bytes += list;
  }
  if (left == 0) return bytes;
  const auto halve = [&](int64_t i, auto... k) {
    const I e = L::template exponent<Vector>(load_bits<kType>(x, i, k...));
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
void pack_blocks_of(const void* x, int64_t n, uint8_t* heads, uint8_t* planes, uint8_t* overflow) {
  // pack_overflow reads what pack_planes has just written, and a processor waits for that. So the planes of several
  // blocks come first.
  constexpr int64_t kTogether = kLosslessGroup / kLosslessBlock;
  alignas(64) int32_t further[kTogether][kLosslessBlock + kLanes];  // whole vectors are stored
  const int64_t block_bytes = kLosslessBlock * size_of(kType);
  const int64_t plane_bytes = lossless_plane_bytes(kType, kLosslessBlock);
  const int64_t most_bytes = lossless_most_bytes(kType, kLosslessBlock);
  const auto* in = static_cast<const uint8_t*>(x);
  for (int64_t left = n; left > 0; left -= kTogether * kLosslessBlock) {
    int32_t center[kTogether];
    int64_t count[kTogether];
    const int64_t blocks = left < kTogether * kLosslessBlock ? div_up(left, kLosslessBlock) : kTogether;
    const auto size = [=](int64_t b) { return b < left / kLosslessBlock ? kLosslessBlock : left % kLosslessBlock; };
    for (int64_t b = 0; b < blocks; ++b)
      count[b] = pack_planes<kType>(in + b * block_bytes, size(b), &center[b], planes + b * plane_bytes, further[b]);
    uint8_t* out = overflow;
    for (int64_t b = 0; b < blocks; ++b, in += block_bytes, heads += 2, planes += plane_bytes) {
      const int64_t bytes = pack_overflow<kType>(in, size(b), center[b], further[b], count[b], planes, out);
      heads[0] = static_cast<uint8_t>(center[b]), heads[1] = static_cast<uint8_t>(bytes / 2);
      out += bytes;
    }
    overflow += kTogether * most_bytes;
  }
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

void pack_blocks(DType dtype, const void* x, int64_t n, uint8_t* heads, uint8_t* planes, uint8_t* overflow) {
  static constexpr decltype(&pack_blocks_of<DType::kF32>) kTable[] = {
      pack_blocks_of<DType::kF32>, pack_blocks_of<DType::kBF16>, pack_blocks_of<DType::kF16>};
  kTable[static_cast<int>(dtype)](x, n, heads, planes, overflow);
}
void unpack_block(DType dtype, int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow, int64_t bytes,
                  void* x) {
  static constexpr decltype(&unpack_block_of<DType::kF32>) kTable[] = {
      unpack_block_of<DType::kF32>, unpack_block_of<DType::kBF16>, unpack_block_of<DType::kF16>};
  kTable[static_cast<int>(dtype)](n, center, planes, overflow, bytes, x);
}

}  // namespace
}  // namespace jaxcgx::cpu::JAXCGX_ISA
