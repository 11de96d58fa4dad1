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

// Unpacks a list of n digits, and returns how many of them are 3. It reads and writes whole vectors: `list` has room
// for one more, and `digits` for two.
CGX_HD int64_t unpack_level(const uint8_t* list, int64_t n, int32_t* digits) {
  int64_t threes = 0;
  for (; n > 0; n -= kBlock, list += 2 * kLanes, digits += kBlock) {
    const int in_block = lanes_of(n);
    const auto words = get_block<2>(list, in_block);
    // Each row overwrites what the row before it has in lanes past those of the block.
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store_words(digits + row * in_block, words.get(row));
    for (int64_t i = 0; i < n && i < kBlock; i += kLanes) {
      const M three = less(splat_i(2), load_words(digits + i)) & less(iota(), splat_i(static_cast<int32_t>(n - i)));
      threes += __builtin_popcount(lanes(three));
    }
  }
  return threes;
}
// Returns how many of the n first digits of a block are 3.
CGX_HD int64_t count_threes(const uint8_t* planes, int64_t n) {
  int64_t threes = 0;
  for (; n >= kBlock; n -= kBlock, planes += 2 * kLanes) {
    for (int at = 0; at < 2 * kLanes; at += 8) {
      uint64_t digits;
      memcpy(&digits, planes + at, 8);
      threes += __builtin_popcountll(digits & digits >> 1 & 0x5555555555555555u);
    }
  }
  if (n == 0) return threes;
  uint8_t list[2 * kLanes] = {};
  int32_t digits[kBlock + 2 * kLanes];
  memcpy(list, planes, static_cast<size_t>(packed_bytes(n, 2)));
  return threes + unpack_level(list, n, digits);
}

// lossless_most_bytes of a block, and the most digits that unpack_overflow unpacks.
constexpr int64_t kMostOverflow = kLosslessBlock / kRows * 6, kMostDigits = 4 * kMostOverflow + kLosslessBlock;

// Unpacks the exponents of the `count` elements of a block whose first digit is 3. `out` has room for kMostDigits and
// two vectors.
template <DType kType>
CGX_HD void unpack_overflow(int64_t count, uint8_t center, const uint8_t* overflow, int64_t bytes, int32_t* out) {
  uint8_t padded[kMostOverflow + kLosslessBlock / 4];  // digits past the last byte are 0
  memset(padded + bytes, 0, sizeof padded - static_cast<size_t>(bytes));
  memcpy(padded, overflow, static_cast<size_t>(bytes));
  // The lists of digits, one level after another. They are joined from the last to the first: each digit 3 is replaced
  // by the code of its element in the next list plus 4, so that the first list has the codes of all elements, less 4.
  int64_t begin[kMostOverflow / 2 + 3], lists = 0, at = 0;
  begin[0] = 0;
  while (count > 0) {
    const uint8_t* const list = padded + (at < bytes ? at : bytes);
    begin[lists + 1] = begin[lists] + count;
    at += packed_bytes(count, 2);
    count = unpack_level(list, count, out + begin[lists++]);
  }
  const auto each = [&](int64_t list, auto of) {
    for (int64_t i = begin[list]; i < begin[list + 1]; i += kLanes) store_words(out + i, of(load_words(out + i)));
  };
  for (int64_t list = lists - 2; list >= 0; --list) {
    const int32_t* from = out + begin[list + 1];
    each(list, [&](I digit) {
      const M later = less(splat_i(2), digit);
      const I more = expand(later, from) + splat_i(4);
      from += __builtin_popcount(lanes(later));
      return select(later, more, digit);
    });
  }
  if (lists > 0) each(0, [&](I c) { return Lossless<kType>::template exponent_of<Vector>(c + splat_i(4), center); });
}

template <DType kType>
void unpack_block_of(int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow, int64_t bytes,
                     void* x) {
  using L = Lossless<kType>;
  alignas(64) int32_t further[kMostDigits + 2 * kLanes];  // exponents, or their upper bits if they are stored directly
  int32_t top[kLosslessBlock];
  const bool raw = bytes == lossless_most_bytes(kType, n);
  if (raw)
    unpack_codes<L::kExponent - 2>(overflow, n, further);
  else
    unpack_overflow<kType>(count_threes(planes, n), center, overflow, bytes, further);
  const uint8_t* const low = planes + packed_bytes(n, 2);
  if constexpr (kType == DType::kF16) unpack_codes<3>(low + n, n, top);
  const auto exponent = [](int e) { return e & L::kLargest; };
  const int32_t near[3] = {exponent(center), exponent(center - 1), exponent(center + 1)};  // of the digits 0 to 2
  const int32_t* next = further;
  // Unpacks the elements from i on. `three` is negative where the digit is 3.
  const auto unite = [&](int64_t i, I digit, I three, auto... k) {
    I rest, e;
    if constexpr (kType == DType::kF32)
      rest = load_halves(low + 2 * i, k...) | shl(load_bytes(low + 2 * n + i, k...), 16);
    else
      rest = load_bytes(low + i, k...);
    if constexpr (kType == DType::kF16) rest = rest | shl(load_words(top + i, k...), 8);
    if (raw) {
      e = (digit & splat_i(3)) | shl(load_words(further + i, k...), 2);
    } else {
      const M later = less(three, splat_i(0));
      e = select(later, expand(later, next), choose(digit, near));
      next += __builtin_popcount(lanes(later));
    }
    const I bits = L::template bits<Vector>(e, rest);
    if constexpr (kType == DType::kF32)
      store_words(static_cast<uint32_t*>(x) + i, bits, k...);
    else
      store_halves(static_cast<uint16_t*>(x) + i, bits, k...);
  };
  for (int64_t at = 0; at < n; at += kBlock, planes += 2 * kLanes) {
    const int lanes = lanes_of(n - at);
    const bool whole = n - at >= kBlock;
    const I digits = whole ? load_halves(planes) : load_halves(planes, lanes), threes = digits & shr(digits, 1);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const I digit = shr(digits, 2 * row), three = shl(threes, 31 - 2 * row);
      if (whole)
        unite(at + row * kLanes, digit, three);
      else
        unite(at + row * lanes, digit, three, in_row(n - at, lanes, row));
    }
  }
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
