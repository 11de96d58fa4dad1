// Digests and blocks of patches of words (cpu/patch.cc). A part of kernels_impl.h.
#pragma once

#include <type_traits>

#include "codec/patch.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace jaxcgx::cpu::JAXCGX_ISA {
namespace {

template <class T>
CGX_HD T load_as(const void* p) {
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
CGX_HD void store_as(void* p, T value) {
  memcpy(p, &value, sizeof(T));
}

// Returns what kMany groups add to a digest. A group is as long as a page, and a processor reads several pages at a
// time faster than one after another. The compiler makes vectors of the inner loop.
template <int kMany>
uint64_t digest_together(const uint8_t* words, int64_t first) {
  uint64_t sum[kMany] = {}, total = 0;
  for (int64_t j = 0; j < kDigestGroup; ++j) {
    for (int g = 0; g < kMany; ++g) {
      const auto x = load_as<uint64_t>(words + g * kDigestBytes + 8 * j);
      sum[g] += (x ^ x >> 32) * kFactors.of[j];
    }
  }
  for (int g = 0; g < kMany; ++g) total += mix(sum[g] + static_cast<uint64_t>(first + g + 1) * kGolden);
  return total;
}

// Returns what whole groups add to a digest.
uint64_t digest(const void* data, int64_t groups, int64_t first) {
  constexpr int kMany = 4;
  const auto* words = static_cast<const uint8_t*>(data);
  uint64_t total = 0;
  int64_t g = 0;
  for (; g + kMany <= groups; g += kMany) total += digest_together<kMany>(words + g * kDigestBytes, first + g);
  for (; g < groups; ++g) total += digest_together<1>(words + g * kDigestBytes, first + g);
  return total;
}

// Returns which of 64 words differ, as bits.
template <class T>
CGX_HD uint64_t differing(const T* x, const T* y) {
  uint64_t found = 0;
#if defined(__AVX512BW__)
  for (size_t i = 0; i < sizeof(T); ++i) {
    const __m512i a = _mm512_loadu_si512(x + 64 / sizeof(T) * i), b = _mm512_loadu_si512(y + 64 / sizeof(T) * i);
    const uint64_t bits = sizeof(T) == 1   ? _mm512_cmpneq_epi8_mask(a, b)
                          : sizeof(T) == 2 ? _mm512_cmpneq_epi16_mask(a, b)
                          : sizeof(T) == 4 ? _mm512_cmpneq_epi32_mask(a, b)
                                           : _mm512_cmpneq_epi64_mask(a, b);
    found |= bits << 64 / sizeof(T) * i;
  }
#else
  uint8_t differ[64];
  for (int i = 0; i < 64; ++i) differ[i] = x[i] != y[i];
  for (int i = 0; i < 8; ++i) {  // the product gathers the low bits of 8 bytes in its highest byte
    found |= (load_as<uint64_t>(differ + 8 * i) * 0x0102040810204080 >> 56) << 8 * i;
  }
#endif
  return found;
}

// Sets a bit in `marks` for each of n words: whether it changes. Returns the number of changes.
template <class T>
int64_t mark_changes(const T* old, const T* now, int64_t n, uint64_t* marks) {
  int64_t k = 0, at = 0;
  for (; at + 64 <= n; at += 64) k += __builtin_popcountll(marks[at / 64] = differing(old + at, now + at));
  if (at == n) return k;
  marks[at / 64] = 0;
  for (int64_t i = at; i < n; ++i) marks[at / 64] |= static_cast<uint64_t>(old[i] != now[i]) << (i - at);
  return k + __builtin_popcountll(marks[at / 64]);
}

// Lists the indices of the marked words, and up to 8 numbers more.
void list_marks(const uint64_t* marks, int64_t n, uint16_t* index) {
  for (int64_t at = 0; at < n; at += 64) {
    uint64_t left = marks[at / 64];
    uint16_t* const end = index + __builtin_popcountll(left);
    do {  // always 8 numbers, at least once: branches on the count cost more
      for (int i = 0; i < 8; ++i, left &= left - 1)
        index[i] = static_cast<uint16_t>(at + __builtin_ctzll(left | 1ull << 63));
    } while ((index += 8) < end);
    index = end;
  }
}

// Writes the indices of the marked words, which a split list takes from s->index, and up to 15 bytes more.
void put_indices(const PatchIndices& l, PatchScratch* s, uint8_t* out) {
  uint8_t* rows = out + row_bytes(l.row);
  if (!l.split) {
    memcpy(out, s->marks, static_cast<size_t>(rows - out));
    return;
  }
  constexpr uint8_t kZeros[64] = {};
  auto* const ones = reinterpret_cast<uint8_t*>(s->kept);  // a byte for each bit of the first row
  memset(ones, 0, static_cast<size_t>(l.row + 64));
  for (int64_t j = 0; j < l.k; ++j) ones[(s->index[j] >> l.low) + j] = 1;
  for (int64_t at = 0; at < l.row; at += 64) store_as(out + at / 8, differing(ones + at, kZeros));
  memset(s->index + l.k, 0, 16 * sizeof(uint16_t));
  const uint64_t mask = (1u << l.low) - 1;
  for (int64_t j = 0; j < l.k; j += 8, rows += l.low) {  // 8 numbers have as many bytes as one has bits
    uint64_t of[2];
    for (int half = 0; half < 2; ++half) {
      const uint64_t four = load_as<uint64_t>(s->index + j + 4 * half) & mask * 0x0001000100010001;
      const uint64_t two = (four & 0x0000ffff0000ffff) | (four >> 16 & 0x0000ffff0000ffff) << l.low;
      of[half] = (two & 0xffffffff) | two >> 32 << 2 * l.low;
    }
    store_as(rows, of[0] | of[1] << 4 * l.low);
    store_as(rows + 8, of[1] >> (64 - 4 * l.low));
  }
}

// Returns the bits of a row from bit `at` on, a multiple of 8: 64 of them, or those up to `end` and zeros.
CGX_HD uint64_t bits_at(const uint8_t* row, int64_t at, int64_t end) {
  const auto bits = load_as<uint64_t>(row + at / 8);
  return end - at < 64 ? bits & ((uint64_t{1} << (end - at)) - 1) : bits;
}

// The inverse of put_indices: a split list becomes indices, another one marks. Returns false if there are not k
// ascending indices below n.
bool get_indices(const PatchIndices& l, const uint8_t* in, PatchScratch* s) {
  int64_t found = 0;
  if (!l.split) {
    for (int64_t at = 0; at < l.n; at += 64) {
      const uint64_t all = l.n - at < 64 ? (uint64_t{1} << (l.n - at)) - 1 : ~uint64_t{0};
      s->marks[at / 64] = l.k == 0 ? 0 : l.k == l.n ? all : bits_at(in, at, l.n);
      found += __builtin_popcountll(s->marks[at / 64]);
    }
    return found == l.k;
  }
  const uint8_t* lows = in + row_bytes(l.row);
  for (int64_t at = 0; at < l.row; at += 64) found += __builtin_popcountll(s->marks[at / 64] = bits_at(in, at, l.row));
  if (found != l.k) return false;
  list_marks(s->marks, l.row, s->index);
  const uint64_t mask = (1u << l.low) - 1;
  for (int64_t j = 0; j < l.k; j += 8, lows += l.low) {
    const uint64_t of[2] = {load_as<uint64_t>(lows), load_as<uint64_t>(lows + l.low / 2) >> l.low % 2 * 4};
    for (int i = 0; i < 8; ++i) {
      uint16_t& index = s->index[j + i];
      index =
          static_cast<uint16_t>(static_cast<uint64_t>(index - (j + i)) << l.low | (of[i / 4] >> i % 4 * l.low & mask));
    }
  }
  bool fits = s->index[l.k - 1] < l.n;
  for (int64_t j = 1; j < l.k; ++j) fits &= s->index[j - 1] < s->index[j];
  return fits;
}

struct Written {
  int64_t small, raw;
  uint8_t* end;
};

// Words of kWidth bytes from the i-th of n on, at most 16.
template <int kWidth>
CGX_HD I load_words_at(const void* words, int64_t i, int64_t n) {
  const uint8_t* p = static_cast<const uint8_t*>(words) + i * kWidth;
  if (n - i >= 16) return kWidth == 1 ? load_bytes(p) : kWidth == 2 ? load_halves(p) : load_words(p);
  const auto k = static_cast<int>(n - i);
  return kWidth == 1 ? load_bytes(p, k) : kWidth == 2 ? load_halves(p, k) : load_words(p, k);
}
template <int kWidth>
CGX_HD void store_words_at(void* words, int64_t i, int64_t n, I x) {
  uint8_t* p = static_cast<uint8_t*>(words) + i * kWidth;
  const auto k = static_cast<int>(n - i < 16 ? n - i : 16);
  if (k < 16) return kWidth == 1 ? store_bytes(p, x, k) : kWidth == 2 ? store_halves(p, x, k) : store_words(p, x, k);
  return kWidth == 1 ? store_bytes(p, x) : kWidth == 2 ? store_halves(p, x) : store_words(p, x);
}

CGX_HD M has_bit(I x, int bit) { return less(shl(x, 31 - bit), splat_i(0)); }

// Stores a list as words of kWidth bytes, and up to 15 more. Returns their end.
template <int kWidth>
uint8_t* put_list(const int32_t* list, int64_t count, uint8_t* out) {
  for (int64_t j = 0; j < count; j += 16) store_words_at<kWidth>(out, j, INT64_MAX, load_words(list + j));
  return out + count * kWidth;
}
template <int kWidth>
void get_list(const uint8_t* in, int64_t count, int32_t* list) {
  for (int64_t j = 0; j < count; j += 16) store_words(list + j, load_words_at<kWidth>(in, j, INT64_MAX));
}

// Puts bit i of x at bit 2 i, in both halves.
CGX_HD uint64_t spread(uint64_t x) {
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  x = (x | x << 2) & 0x3333333333333333;
  return (x | x << 1) & 0x5555555555555555;
}

template <int kWidth>
CGX_HD I numbers_of(I old, I now) {
  constexpr int kUnused = 32 - 8 * kWidth;  // bits of a lane
  const I step = shl(now - old, kUnused);
  return shr(shl(step, 1) ^ sign_of(step), kUnused);
}
template <int kWidth>
CGX_HD M are_raw(I number) {
  const M much = less(splat_i(static_cast<int32_t>(most_small(kWidth))), number);
  return kWidth < 4 ? much : much | less(number, splat_i(0));
}

// Writes the codes, small steps and raw words of the k words with s->numbers, of which `raw` are in s->raw.
template <int kWidth>
Written put_numbers(int64_t k, int64_t raw, PatchScratch* s, uint8_t* out) {
  int64_t small = 0;
  store_words(s->numbers + k, splat_i(1));  // behind the last: code 0
  for (int64_t j = 0; j < k; j += 16) {
    const I number = load_words(s->numbers + j);
    const I code = select(are_raw<kWidth>(number), splat_i(3), min(number, splat_i(3)) - splat_i(1));
    const M is_high = less(splat_i(1), code), is_small = is_high & less(code, splat_i(3));
    if (any(is_small)) small += compress(is_small, number - splat_i(3), s->small + small);
    const uint64_t both = spread(lanes(has_bit(code, 0)) | uint64_t{lanes(is_high)} << 32);
    store_as(out + j / 4, static_cast<uint32_t>(both | both >> 31));
  }
  uint8_t* const end = put_list<small_bytes(kWidth)>(s->small, small, out + row_bytes(2 * k));
  return {small, raw, put_list<kWidth>(s->raw, raw, end)};
}

// Writes the codes, small steps and raw words of the marked words.
template <int kWidth>
Written put_marked(const void* old, const void* now, int64_t n, PatchScratch* s, uint8_t* out) {
  int64_t k = 0, raw = 0;
  for (int64_t at = 0; at < n; at += 64) {
    if (s->marks[at / 64] == 0) continue;
    for (int64_t i = at; i < at + 64 && i < n; i += 16) {
      const I word = load_words_at<kWidth>(now, i, n);
      const I number = numbers_of<kWidth>(load_words_at<kWidth>(old, i, n), word);
      k += compress(mask_of(static_cast<uint32_t>(s->marks[at / 64] >> (i - at) & 0xffff)), number, s->numbers + k);
      const M is_raw = are_raw<kWidth>(number);
      if (any(is_raw)) raw += compress(is_raw, word, s->raw + raw);
    }
  }
  return put_numbers<kWidth>(k, raw, s, out);
}

// Returns the words with these indices. It reads whole groups of 4 bytes.
template <int kWidth>
CGX_HD I gather_words_at(const void* words, I i) {
  constexpr int kMany = 4 / kWidth, kBits = 8 * kWidth;
  const I group = gather_words(words, shr(i, kMany / 2));
  const I left = splat_i(kMany - 1) - (i & splat_i(kMany - 1));  // words of the group after this one
  return shr(shl(group, kBits == 8 ? shl(left, 3) : shl(left, 4)), 32 - kBits);
}

// Writes the codes, small steps and raw words of the k words of s->index, behind which it has 16 zeros.
template <int kWidth>
Written put_gathered(const void* old, const void* now, int64_t k, PatchScratch* s, uint8_t* out) {
  int64_t raw = 0;
  for (int64_t j = 0; j < k; j += 16) {
    const I i = load_halves(s->index + j), word = gather_words_at<kWidth>(now, i);
    const I number = numbers_of<kWidth>(gather_words_at<kWidth>(old, i), word);
    store_words(s->numbers + j, number);
    const M is_raw = are_raw<kWidth>(number) & less(iota(), splat_i(static_cast<int32_t>(k - j)));
    if (any(is_raw)) raw += compress(is_raw, word, s->raw + raw);
  }
  return put_numbers<kWidth>(k, raw, s, out);
}

// Reads the steps of the changed words to s->numbers and, if any are raw, what is kept of the old words to s->kept.
template <int kWidth>
void get_steps(const PatchHead& h, const uint8_t* codes, PatchScratch* s) {
  const uint8_t* const small = codes + row_bytes(2 * h.changed);
  get_list<small_bytes(kWidth)>(small, h.small, s->small);
  get_list<kWidth>(small + h.small * small_bytes(kWidth), h.raw, s->raw);
  int32_t *next_small = s->small, *next_raw = s->raw;
  for (int64_t j = 0; j < h.changed; j += 16) {
    const I bits = splat_i(load_as<int32_t>(codes + j / 4));
    const I code = shr(shl(bits, splat_i(30) - iota() - iota()), 30);
    const M is_raw = less(splat_i(2), code), is_small = less(splat_i(1), code) & less(code, splat_i(3));
    I number = code + splat_i(1);
    if (any(is_small)) {
      number = number + expand(is_small, next_small);
      next_small += __builtin_popcount(lanes(is_small));
    }
    I next = shr(number, 1) ^ (splat_i(0) - (number & splat_i(1)));
    if (h.raw > 0) {
      next = select(is_raw, expand(is_raw, next_raw), next);
      next_raw += __builtin_popcount(lanes(is_raw));
      store_words(s->kept + j, select(is_raw, splat_i(0), splat_i(-1)));
    }
    store_words(s->numbers + j, next);
  }
}

// Makes new words of the marked old ones, in place.
template <class T>
void change_marked(const PatchHead& h, PatchScratch* s, int64_t n, T* words) {
  constexpr int kWidth = sizeof(T);
  int32_t *step = s->numbers, *kept = s->kept;
  for (int64_t at = 0; at < n; at += 64) {
    if (s->marks[at / 64] == 0) continue;
    for (int64_t i = at; i < at + 64 && i < n; i += 16) {
      const auto bits = static_cast<uint32_t>(s->marks[at / 64] >> (i - at) & 0xffff);
      const M here = mask_of(bits);
      I word = load_words_at<kWidth>(words, i, n);
      if (h.raw > 0) word = select(here, word & expand(here, kept), word);
      store_words_at<kWidth>(words, i, n, word + expand(here, step));
      step += __builtin_popcount(bits), kept += __builtin_popcount(bits);
    }
  }
}

// Makes new words of the old ones of s->index, in place.
template <class T>
void change_some(const PatchHead& h, const PatchScratch& s, T* words) {
  for (int64_t j = 0; j < h.changed; ++j) {
    T& word = words[s.index[j]];
    word = static_cast<T>((h.raw > 0 ? word & s.kept[j] : word) + s.numbers[j]);
  }
}

template <class T>
using Half = std::conditional_t<sizeof(T) == 8, uint32_t, std::conditional_t<sizeof(T) == 4, uint16_t, uint8_t>>;

// Whether words are processed in vectors.
template <class T>
constexpr bool kVectors =
#if defined(__AVX2__)
    sizeof(T) < 8;
#else
    false;  // compress and expand are no instructions
#endif

// Writes the codes, small steps and raw words of k words, those of s->index.
template <class T>
Written put_listed(const T* old, const T* now, int64_t k, PatchScratch* s, uint8_t* out) {
  using S = Half<T>;
  auto *small = reinterpret_cast<uint8_t*>(s->small), *raw = reinterpret_cast<uint8_t*>(s->wide);
  for (int64_t first = 0; first < k; first += 32) {
    uint64_t codes = 0;
    for (int64_t j = first; j < k && j < first + 32; ++j) {
      const int64_t i = s->index[j];
      const T number = patch_number(old[i], now[i]);
      const bool is_raw = number > static_cast<uint64_t>(most_small(sizeof(T))), is_small = (number > 2) & !is_raw;
      codes |= (is_raw ? 3 : is_small ? 2 : number - uint64_t{1}) << 2 * (j - first);
      store_as(small, static_cast<S>(number - 3));
      store_as(raw, now[i]);
      small += is_small * sizeof(S);
      raw += is_raw * sizeof(T);
    }
    store_as(out + first / 4, codes);
  }
  const auto smalls = small - reinterpret_cast<uint8_t*>(s->small), raws = raw - reinterpret_cast<uint8_t*>(s->wide);
  uint8_t* const end = out + row_bytes(2 * k);
  memcpy(end, s->small, static_cast<size_t>(smalls));
  memcpy(end + smalls, s->wide, static_cast<size_t>(raws));
  return {smalls / int64_t{sizeof(S)}, raws / int64_t{sizeof(T)}, end + smalls + raws};
}

// Counts the codes 2 and 3. Returns whether they are as many as the head says.
bool has_codes(const PatchHead& h, const uint8_t* codes) {
  int smalls = 0, raws = 0;
  for (int64_t at = 0; at < 2 * h.changed; at += 64) {
    const uint64_t bits = bits_at(codes, at, 2 * h.changed), high = bits >> 1 & 0x5555555555555555;
    smalls += __builtin_popcountll(high & ~bits), raws += __builtin_popcountll(high & bits);
  }
  return smalls == h.small && raws == h.raw;
}

// Makes new words of the old ones of s->index, in place: the inverse of put_listed.
template <class T>
void change_listed(const PatchHead& h, const uint8_t* codes, PatchScratch* s, T* words) {
  using S = Half<T>;
  const uint8_t *small = codes + row_bytes(2 * h.changed), *raw = small + h.small * sizeof(S);
  for (int64_t j = 0; j < h.changed; ++j) {
    T& word = words[s->index[j]];
    const int code = codes[j / 4] >> j % 4 * 2 & 3;
    const uint64_t is_small = 0 - uint64_t{code == 2}, is_raw = 0 - uint64_t{code == 3};  // masks: no branches
    const uint64_t step = patch_step(static_cast<uint64_t>(code) + 1 + (load_as<S>(small) & is_small));
    word = static_cast<T>(((word + step) & ~is_raw) | (load_as<T>(raw) & is_raw));
    small += sizeof(S) & is_small;
    raw += sizeof(T) & is_raw;
  }
}

// Calls f(a word of this width).
template <class F>
auto with_word(int64_t width, F f) {
  return width == 1 ? f(uint8_t{}) : width == 2 ? f(uint16_t{}) : width == 4 ? f(uint32_t{}) : f(uint64_t{});
}

PatchHead encode_patch_block(int64_t width, const void* old, const void* now, int64_t n, PatchScratch* s) {
  return with_word(width, [=](auto word) -> PatchHead {
    using T = decltype(word);
    const auto *x = static_cast<const T*>(old), *y = static_cast<const T*>(now);
    const PatchIndices list(n, mark_changes(x, y, n, s->marks));
    if (list.split || !kVectors<T>) list_marks(s->marks, n, s->index);
    put_indices(list, s, s->bytes);
    const auto put = [&](uint8_t* out) {
      if constexpr (kVectors<T>) {
        if (!list.split) return put_marked<sizeof(T)>(x, y, n, s, out);
        if (n * sizeof(T) % 4 == 0) return put_gathered<sizeof(T)>(x, y, list.k, s, out);
      }
      return put_listed(x, y, list.k, s, out);
    };
    const Written written = put(s->bytes + list.bytes());
    s->used = written.end - s->bytes;
    if (s->used >= n * width) {
      memcpy(s->bytes, now, static_cast<size_t>(s->used = n * width));
      return {kPatchWhole, 0, 0};
    }
    return {static_cast<uint16_t>(list.k), static_cast<uint16_t>(written.small), static_cast<uint16_t>(written.raw)};
  });
}

bool apply_patch_block(int64_t width, const PatchHead& h, const uint8_t* in, int64_t n, PatchScratch* s, void* words) {
  if (h.changed == kPatchWhole) {
    memcpy(words, in, static_cast<size_t>(n * width));
    return true;
  }
  // Copied, because vectors reach past the end.
  memcpy(s->bytes, in, static_cast<size_t>(patch_bytes(h, n, width)));
  const PatchIndices list(n, h.changed);
  const uint8_t* const codes = s->bytes + list.bytes();
  if (!has_codes(h, codes) || !get_indices(list, s->bytes, s)) return false;
  with_word(width, [=](auto word) {
    auto* const x = static_cast<decltype(word)*>(words);
    if constexpr (kVectors<decltype(word)>) {
      get_steps<sizeof word>(h, codes, s);
      return list.split ? change_some(h, *s, x) : change_marked(h, s, n, x);
    }
    if (!list.split) list_marks(s->marks, n, s->index);
    change_listed(h, codes, s, x);
  });
  return true;
}

}  // namespace
}  // namespace jaxcgx::cpu::JAXCGX_ISA
