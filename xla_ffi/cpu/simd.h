// Vectors of sixteen numbers, for the instruction set that the including file is compiled for: AVX-512, AVX2, or the
// vector extension of gcc and clang (SSE2, NEON). They have the operations of codec/base.h, and those that the kernels
// need in addition.
//
// Only the kernels include this file: once per instruction set, each time in another namespace (JAXCGX_ISA).
#pragma once

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codec/base.h"
#include "codec/rng.h"

namespace jaxcgx::cpu::JAXCGX_ISA {

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

CGX_HD F splat_f(float x) { return {_mm512_set1_ps(x)}; }
CGX_HD I splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
CGX_HD __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
CGX_HD F load(const float* p) { return {_mm512_loadu_ps(p)}; }
CGX_HD F load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
CGX_HD void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
CGX_HD void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
CGX_HD void stream(float* p, F x) { _mm512_stream_ps(p, x.v); }
CGX_HD I load_words(const void* p, int n) { return {_mm512_maskz_loadu_epi32(first(n), p)}; }
CGX_HD I load_halves(const void* p, int n) { return {_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p))}; }
CGX_HD I load_bytes(const void* p, int n) { return {_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p))}; }
CGX_HD void store_words(void* p, I x, int n) { _mm512_mask_storeu_epi32(p, first(n), x.v); }
CGX_HD void store_halves(void* p, I x, int n) { _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(x.v)); }
CGX_HD void store_bytes(void* p, I x, int n) { _mm_mask_storeu_epi8(p, first(n), _mm512_cvtepi32_epi8(x.v)); }
CGX_HD I load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
CGX_HD I load_halves(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
CGX_HD I load_bytes(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
CGX_HD void store_words(void* p, I x) { _mm512_storeu_si512(p, x.v); }
CGX_HD void store_halves(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v)); }
CGX_HD void store_bytes(void* p, I x) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v)); }

CGX_HD F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
CGX_HD F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
CGX_HD F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
CGX_HD F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
CGX_HD F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
CGX_HD F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
CGX_HD F multiply_add(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CGX_HD F round(F x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
CGX_HD I round_int(F x) { return {_mm512_cvtps_epi32(x.v)}; }
CGX_HD F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
CGX_HD I bits(F x) { return {_mm512_castps_si512(x.v)}; }
CGX_HD F as_float(I x) { return {_mm512_castsi512_ps(x.v)}; }
CGX_HD I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
CGX_HD I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
CGX_HD I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
CGX_HD I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
CGX_HD I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
CGX_HD I shl(I a, int n) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))}; }
CGX_HD I shl(I a, I n) { return {_mm512_sllv_epi32(a.v, n.v)}; }
CGX_HD I shr(I a, int n) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(n))}; }
CGX_HD I sign_of(I a) { return {_mm512_srai_epi32(a.v, 31)}; }          // -1 for negative numbers, else 0
CGX_HD F largest(F a, F b) { return {_mm512_range_ps(a.v, b.v, 11)}; }  // the larger magnitude
CGX_HD I min(I a, I b) { return {_mm512_min_epi32(a.v, b.v)}; }
CGX_HD I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
CGX_HD M less(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
CGX_HD M unordered(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
CGX_HD M operator|(M a, M b) { return {static_cast<__mmask16>(a.v | b.v)}; }
CGX_HD M operator&(M a, M b) { return {static_cast<__mmask16>(a.v & b.v)}; }
CGX_HD bool any(M m) { return m.v != 0; }
CGX_HD M none() { return {0}; }
CGX_HD uint32_t lanes(M m) { return m.v; }                                  // one bit per lane
CGX_HD M mask_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }  // the inverse
CGX_HD F select(M m, F a, F b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
CGX_HD F multiply_where(M m, F a, F b) { return {_mm512_maskz_mul_ps(m.v, a.v, b.v)}; }  // m ? a * b : 0
CGX_HD I select(M m, I a, I b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
CGX_HD I add_where(M m, I a, I b) { return {_mm512_mask_add_epi32(a.v, m.v, a.v, b.v)}; }  // m ? a + b : a
// Returns x with its lanes swapped: lane j gets lane j ^ kApart.
template <int kApart>
CGX_HD F swap_lanes(F x) {
  if constexpr (kApart == 1) return {_mm512_permute_ps(x.v, 0xb1)};
  if constexpr (kApart == 2) return {_mm512_permute_ps(x.v, 0x4e)};
  if constexpr (kApart == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
  if constexpr (kApart == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
}
// A lookup table in registers: returns table[i] for each lane. The table has 32 numbers, and i is less than kUsed.
template <int kUsed>
struct Table {
  __m512 low, high;
  CGX_HD explicit Table(const float* table) : low(_mm512_loadu_ps(table)), high(_mm512_loadu_ps(table + 16)) {}
  CGX_HD F operator[](I i) const {
    if constexpr (kUsed <= 16) return {_mm512_permutexvar_ps(i.v, low)};
    return {_mm512_permutex2var_ps(low, i.v, high)};
  }
};
// Returns of[i % 4] for each lane; 0 for 3.
CGX_HD I choose(I i, const int32_t (&of)[3]) {
  const __m512i table = _mm512_set4_epi32(0, of[2], of[1], of[0]);
  return {_mm512_castps_si512(_mm512_permutevar_ps(_mm512_castsi512_ps(table), i.v))};
}
// Returns a vector whose lane i is the highest lane of x[i]. No lane of x may be negative. Lanes from kMany on are
// undefined.
template <int kMany>
CGX_HD I highest_of_each(const I (&x)[kMany]) {
  static_assert(kMany == 4 || kMany == 8);
  __m512i v[kMany / 2];  // each step doubles the number of x that share a vector, and halves the lanes that each x has
  for (int i = 0; i < kMany / 2; ++i)
    v[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(x[2 * i].v, x[2 * i + 1].v, 0x44),
                            _mm512_shuffle_i32x4(x[2 * i].v, x[2 * i + 1].v, 0xee));
  for (int i = 0; i < kMany / 4; ++i)
    v[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xdd));
  const __m512i other = v[kMany / 4 - 1];
  __m512i most = _mm512_max_epi32(_mm512_unpacklo_epi64(v[0], other), _mm512_unpackhi_epi64(v[0], other));
  most = _mm512_max_epi32(most, _mm512_shuffle_epi32(most, _MM_PERM_CDAB));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
  return {_mm512_permutexvar_epi32(order, most)};
}
CGX_HD float lowest(F x) { return _mm512_reduce_min_ps(x.v); }
CGX_HD float highest(F x) { return _mm512_reduce_max_ps(x.v); }
// Philox needs the 64-bit product of two 32-bit numbers. Vector units compute it only for every other lane. So a word
// is two vectors of 64-bit lanes, one for the even and one for the odd lanes. The upper half of each 64-bit lane is
// ignored.
struct PhiloxWord {
  __m512i even, odd;
};
CGX_HD PhiloxWord philox_word(I x) { return {x.v, _mm512_srli_epi64(x.v, 32)}; }
CGX_HD I lanes_in_order(PhiloxWord w) {
  return {_mm512_mask_blend_epi32(0xaaaa, w.even, _mm512_slli_epi64(w.odd, 32))};
}
CGX_HD PhiloxWord operator^(PhiloxWord a, PhiloxWord b) {
  return {_mm512_xor_si512(a.even, b.even), _mm512_xor_si512(a.odd, b.odd)};
}
CGX_HD void mul_wide(PhiloxWord a, uint32_t b, PhiloxWord* high, PhiloxWord* low) {
  const __m512i m = _mm512_set1_epi64(b);
  low->even = _mm512_mul_epu32(a.even, m);
  low->odd = _mm512_mul_epu32(a.odd, m);
  high->even = _mm512_srli_epi64(low->even, 32);
  high->odd = _mm512_srli_epi64(low->odd, 32);
}
CGX_HD I iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
// Stores the lanes of i and x that the mask selects, one after another, and returns their number. Both arrays need room
// for 16 elements. It compresses into a register first, because compressing into memory is slow on some processors.
CGX_HD int store_where(M m, I i, F x, int32_t* to_i, float* to_x) {
  _mm512_storeu_si512(to_i, _mm512_maskz_compress_epi32(m.v, i.v));
  _mm512_storeu_ps(to_x, _mm512_maskz_compress_ps(m.v, x.v));
  return __builtin_popcount(m.v);
}

// Like store_where, for one vector.
CGX_HD int compress(M m, I x, int32_t* to) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(m.v, x.v));
  return __builtin_popcount(m.v);
}
// Returns the words of 4 bytes with these indices.
CGX_HD I gather_words(const void* p, I i) { return {_mm512_i32gather_epi32(i.v, p, 4)}; }
// The inverse of compress: loads consecutive elements into the lanes that the mask selects. The other lanes are 0.
CGX_HD I expand(M m, const int32_t* from) { return {_mm512_maskz_expandloadu_epi32(m.v, from)}; }

#elif defined(__AVX2__)

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {
  __m256i a, b;
};

CGX_HD F splat_f(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
CGX_HD I splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
CGX_HD F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CGX_HD void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
CGX_HD void stream(float* p, F x) {
  _mm256_stream_ps(p, x.a);
  _mm256_stream_ps(p + 8, x.b);
}
CGX_HD I load_words(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
CGX_HD I load_halves(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
CGX_HD I load_bytes(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
CGX_HD void store_words(void* p, I x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
CGX_HD __m256i halves(I x) {  // codes of 16 bits or fewer
  const __m256i low = _mm256_set1_epi32(0xffff);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)), 0xd8);
}
CGX_HD void store_halves(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), halves(x)); }
CGX_HD void store_bytes(void* p, I x) {
  const __m256i h = _mm256_and_si256(halves(x), _mm256_set1_epi16(0xff));
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}

CGX_HD F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
CGX_HD F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
CGX_HD F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
CGX_HD F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
CGX_HD F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
CGX_HD F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
CGX_HD F multiply_add(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
CGX_HD F round(F x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
CGX_HD I round_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
CGX_HD F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
CGX_HD I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
CGX_HD F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
CGX_HD I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
CGX_HD I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
CGX_HD I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
CGX_HD I operator|(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
CGX_HD I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
CGX_HD I shl(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
CGX_HD I shl(I x, I n) { return {_mm256_sllv_epi32(x.a, n.a), _mm256_sllv_epi32(x.b, n.b)}; }
CGX_HD I shr(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
CGX_HD I sign_of(I x) { return {_mm256_srai_epi32(x.a, 31), _mm256_srai_epi32(x.b, 31)}; }
CGX_HD I min(I x, I y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
CGX_HD I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
CGX_HD M less(I x, I y) { return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)}; }
CGX_HD M unordered(F x, F y) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q)),
          _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q))};
}
CGX_HD M operator|(M x, M y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
CGX_HD M operator&(M x, M y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
CGX_HD bool any(M m) { return !_mm256_testz_si256(_mm256_or_si256(m.a, m.b), _mm256_set1_epi32(-1)); }
CGX_HD M none() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
CGX_HD uint32_t lanes(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.a)) |
                               _mm256_movemask_ps(_mm256_castsi256_ps(m.b)) << 8);
}
CGX_HD F select(M m, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
}
CGX_HD I select(M m, I x, I y) { return {_mm256_blendv_epi8(y.a, x.a, m.a), _mm256_blendv_epi8(y.b, x.b, m.b)}; }
template <int kApart>
CGX_HD F swap_lanes(F x) {
  if constexpr (kApart == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
  if constexpr (kApart == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
  if constexpr (kApart == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  if constexpr (kApart == 8) return {x.b, x.a};
}
template <int kUsed>
struct Table {
  const float* table;
  CGX_HD explicit Table(const float* t) : table(t) {}
  CGX_HD __m256 part(__m256i i) const {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
    if constexpr (kUsed <= 8) return low;
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), i);
    const __m256 half = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    if constexpr (kUsed <= 16) return half;
    const __m256 upper = Table<16>(table + 16).part(i);  // a gather takes several times as long
    return _mm256_blendv_ps(half, upper, _mm256_castsi256_ps(_mm256_slli_epi32(i, 27)));
  }
  CGX_HD F operator[](I i) const { return {part(i.a), part(i.b)}; }
};
struct PhiloxWord {
  __m256i part[4];
};  // the even and the odd lanes of a, then of b; see the AVX-512 version
CGX_HD PhiloxWord philox_word(I x) { return {{x.a, _mm256_srli_epi64(x.a, 32), x.b, _mm256_srli_epi64(x.b, 32)}}; }
CGX_HD I lanes_in_order(PhiloxWord w) {
  return {_mm256_blend_epi32(w.part[0], _mm256_slli_epi64(w.part[1], 32), 0xaa),
          _mm256_blend_epi32(w.part[2], _mm256_slli_epi64(w.part[3], 32), 0xaa)};
}
CGX_HD PhiloxWord operator^(PhiloxWord x, PhiloxWord y) {
  return {{_mm256_xor_si256(x.part[0], y.part[0]), _mm256_xor_si256(x.part[1], y.part[1]),
           _mm256_xor_si256(x.part[2], y.part[2]), _mm256_xor_si256(x.part[3], y.part[3])}};
}
CGX_HD void mul_wide(PhiloxWord x, uint32_t b, PhiloxWord* high, PhiloxWord* low) {
  for (int i = 0; i < 4; ++i) {
    low->part[i] = _mm256_mul_epu32(x.part[i], _mm256_set1_epi64x(b));
    high->part[i] = _mm256_srli_epi64(low->part[i], 32);
  }
}
CGX_HD I iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
CGX_HD I choose(I i, const int32_t (&of)[3]) {
  const __m256 table = _mm256_castsi256_ps(_mm256_setr_epi32(of[0], of[1], of[2], 0, of[0], of[1], of[2], 0));
  return bits(F{_mm256_permutevar_ps(table, i.a), _mm256_permutevar_ps(table, i.b)});
}
template <int kMany>
CGX_HD I highest_of_each(const I (&x)[kMany]) {
  static_assert(kMany == 4 || kMany == 8);
  __m256i v[kMany / 2];
  for (int i = 0; i < kMany / 2; ++i) {
    const __m256i even = _mm256_max_epi32(x[2 * i].a, x[2 * i].b),
                  odd = _mm256_max_epi32(x[2 * i + 1].a, x[2 * i + 1].b);
    v[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(even, odd), _mm256_unpackhi_epi32(even, odd));
  }
  for (int i = 0; i < kMany / 4; ++i)
    v[i] =
        _mm256_max_epi32(_mm256_unpacklo_epi64(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
  const __m256i other = v[kMany / 4 - 1];
  const __m256i most =
      _mm256_max_epi32(_mm256_permute2x128_si256(v[0], other, 0x20), _mm256_permute2x128_si256(v[0], other, 0x31));
  return {most, most};
}
CGX_HD float lowest(F x) {
  __m256 r = _mm256_min_ps(x.a, x.b);
  r = _mm256_min_ps(r, _mm256_permute2f128_ps(r, r, 1));
  r = _mm256_min_ps(r, _mm256_permute_ps(r, 0x4e));
  return _mm256_cvtss_f32(_mm256_min_ps(r, _mm256_permute_ps(r, 0xb1)));
}
CGX_HD float highest(F x) {
  __m256 r = _mm256_max_ps(x.a, x.b);
  r = _mm256_max_ps(r, _mm256_permute2f128_ps(r, r, 1));
  r = _mm256_max_ps(r, _mm256_permute_ps(r, 0x4e));
  return _mm256_cvtss_f32(_mm256_max_ps(r, _mm256_permute_ps(r, 0xb1)));
}
// For each mask of eight lanes: `taken` has the lanes that it selects, one after another, and `place` has for each of
// them how many come before it.
constexpr struct LanesOfMasks {
  uint8_t taken[256][8] = {}, place[256][8] = {};
  constexpr LanesOfMasks() {
    for (int mask = 0; mask < 256; ++mask) {
      uint8_t number = 0;
      for (uint8_t lane = 0; lane < 8; ++lane) {
        if (!(mask >> lane & 1)) continue;
        place[mask][lane] = number;
        taken[mask][number++] = lane;
      }
    }
  }
} kLanesOf;
CGX_HD __m256i permuted(__m256i x, const uint8_t (&order)[8]) {
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(order))));
}
CGX_HD int compress(M m, I x, int32_t* to) {
  const uint32_t all = lanes(m), low = all & 255, high = all >> 8;
  store_words(to, I{permuted(x.a, kLanesOf.taken[low]), splat_i(0).b});
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + __builtin_popcount(low)), permuted(x.b, kLanesOf.taken[high]));
  return __builtin_popcount(all);
}
CGX_HD int store_where(M m, I i, F x, int32_t* to_i, float* to_x) {
  compress(m, i, to_i);
  return compress(m, bits(x), reinterpret_cast<int32_t*>(to_x));
}
CGX_HD I gather_words(const void* p, I i) {
  const int* words = static_cast<const int*>(p);
  return {_mm256_i32gather_epi32(words, i.a, 4), _mm256_i32gather_epi32(words, i.b, 4)};
}
CGX_HD I expand(M m, const int32_t* from) {
  const uint32_t all = lanes(m), low = all & 255, high = all >> 8;
  const I x = {load_words(from).a, load_words(from + __builtin_popcount(low)).a};
  return I{permuted(x.a, kLanesOf.place[low]), permuted(x.b, kLanesOf.place[high])} & I{m.a, m.b};
}

#else

// Four vectors of four numbers, in the vector extension of gcc and clang. SSE2 and NEON have registers of this size.
using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));
using U4 = uint32_t __attribute__((vector_size(16)));
struct F {
  F4 v[4];
};
struct I {
  I4 v[4];
};
using M = I;

// The four calls are written out because gcc would keep the vectors of a loop in memory, and take three times as long
// to compile the loop.
#define CGX_EACH(R, expression)                                                                        \
  const auto each = [&]([[maybe_unused]] int i) __attribute__((always_inline)) { return expression; }; \
  return (R{{each(0), each(1), each(2), each(3)}})

CGX_HD F splat_f(float x) { CGX_EACH(F, (F4{x, x, x, x})); }
CGX_HD I splat_i(int32_t x) { CGX_EACH(I, (I4{x, x, x, x})); }
CGX_HD F load(const float* p) {
  F r;
  memcpy(&r, p, 64);
  return r;
}
CGX_HD void store(float* p, F x) { memcpy(p, &x, 64); }
CGX_HD void stream(float* p, F x) { store(p, x); }
CGX_HD I load_words(const void* p) {
  I r;
  memcpy(&r, p, 64);
  return r;
}
CGX_HD void store_words(void* p, I x) { memcpy(p, &x, 64); }
template <class Small>
CGX_HD I widen(const void* p) {
  Small s[16];
  int32_t wide[16];
  memcpy(s, p, sizeof s);
  for (int i = 0; i < 16; ++i) wide[i] = s[i];
  return load_words(wide);
}
template <class Small>
CGX_HD void narrow(void* p, I x) {
  Small s[16];
  int32_t wide[16];
  store_words(wide, x);
  for (int i = 0; i < 16; ++i) s[i] = static_cast<Small>(wide[i]);
  memcpy(p, s, sizeof s);
}
CGX_HD I load_halves(const void* p) { return widen<uint16_t>(p); }
CGX_HD I load_bytes(const void* p) { return widen<uint8_t>(p); }
CGX_HD void store_halves(void* p, I x) { narrow<uint16_t>(p, x); }
CGX_HD void store_bytes(void* p, I x) { narrow<uint8_t>(p, x); }
CGX_HD F operator+(F a, F b) { CGX_EACH(F, a.v[i] + b.v[i]); }
CGX_HD F operator-(F a, F b) { CGX_EACH(F, a.v[i] - b.v[i]); }
CGX_HD F operator*(F a, F b) { CGX_EACH(F, a.v[i] * b.v[i]); }
CGX_HD F operator/(F a, F b) { CGX_EACH(F, a.v[i] / b.v[i]); }
CGX_HD F multiply_add(F a, F b, F c) { return a * b + c; }
CGX_HD I bits(F x) { CGX_EACH(I, (I4)x.v[i]); }
CGX_HD F as_float(I x) { CGX_EACH(F, (F4)x.v[i]); }
// Unsigned, so that overflow wraps, as in the vector units.
CGX_HD I operator+(I a, I b) { CGX_EACH(I, (I4)((U4)a.v[i] + (U4)b.v[i])); }
CGX_HD I operator-(I a, I b) { CGX_EACH(I, (I4)((U4)a.v[i] - (U4)b.v[i])); }
CGX_HD I operator&(I a, I b) { CGX_EACH(I, a.v[i] & b.v[i]); }
CGX_HD I operator|(I a, I b) { CGX_EACH(I, a.v[i] | b.v[i]); }
CGX_HD I operator^(I a, I b) { CGX_EACH(I, a.v[i] ^ b.v[i]); }
CGX_HD I shl(I a, int n) { CGX_EACH(I, (I4)((U4)a.v[i] << n)); }
CGX_HD I shl(I a, I n) { CGX_EACH(I, (I4)((U4)a.v[i] << (U4)(n.v[i] & 31)) & (I4)((U4)n.v[i] < 32u)); }
CGX_HD I shr(I a, int n) { CGX_EACH(I, (I4)((U4)a.v[i] >> n)); }
CGX_HD I sign_of(I a) { CGX_EACH(I, a.v[i] < 0); }
CGX_HD M less(I a, I b) { CGX_EACH(M, a.v[i] < b.v[i]); }
CGX_HD M less(F a, F b) { CGX_EACH(M, a.v[i] < b.v[i]); }
CGX_HD M unordered(F a, F b) { CGX_EACH(M, (a.v[i] != a.v[i]) | (b.v[i] != b.v[i])); }
CGX_HD M none() { return splat_i(0); }
CGX_HD uint32_t lanes(M m) {
  const I4 r = (m.v[0] & I4{1, 2, 4, 8}) | (m.v[1] & I4{16, 32, 64, 128}) | (m.v[2] & I4{256, 512, 1024, 2048}) |
               (m.v[3] & I4{4096, 8192, 16384, 32768});
  return static_cast<uint32_t>(r[0] | r[1] | r[2] | r[3]);
}
CGX_HD bool any(M m) {
  const I4 r = m.v[0] | m.v[1] | m.v[2] | m.v[3];
  return (r[0] | r[1] | r[2] | r[3]) != 0;
}
CGX_HD I select(M m, I a, I b) { CGX_EACH(I, (m.v[i] & a.v[i]) | (~m.v[i] & b.v[i])); }
CGX_HD F select(M m, F a, F b) { return as_float(select(m, bits(a), bits(b))); }
CGX_HD F min(F a, F b) { return select(less(a, b), a, b); }
CGX_HD F max(F a, F b) { return select(less(b, a), a, b); }
CGX_HD I min(I a, I b) { return select(less(a, b), a, b); }
CGX_HD I max(I a, I b) { return select(less(b, a), a, b); }
CGX_HD F to_float(I x) { CGX_EACH(F, __builtin_convertvector(x.v[i], F4)); }
CGX_HD F round(F x) {  // see codec/base.h
  const F magnitude = as_float(bits(x) & splat_i(0x7fffffff));
  const F magic = as_float((bits(x) & splat_i(INT32_MIN)) | splat_i(0x4b000000));
  return select(less(magnitude, splat_f(8388608.0f)), (x + magic) - magic, x);
}
CGX_HD I round_int(F x) {
  const F whole = round(x);
  CGX_EACH(I, __builtin_convertvector(whole.v[i], I4));
}
template <int kApart>
CGX_HD F swap_lanes(F x) {
  F r;
  for (int i = 0; i < 4; ++i) {
    const F4 v = x.v[kApart < 4 ? i : i ^ (kApart / 4)];
    r.v[i] = kApart == 1 ? F4{v[1], v[0], v[3], v[2]} : kApart == 2 ? F4{v[2], v[3], v[0], v[1]} : v;
  }
  return r;
}
template <int kUsed>
struct Table {
  const float* table;
  CGX_HD explicit Table(const float* t) : table(t) {}
  CGX_HD F operator[](I i) const {
    int32_t index[16];
    float x[16];
    store_words(index, i);
    for (int j = 0; j < 16; ++j) x[j] = table[index[j]];
    return load(x);
  }
};
CGX_HD void mul_wide(I a, uint32_t b, I* high, I* low) {
  int32_t x[16], h[16], l[16];
  store_words(x, a);
  for (int i = 0; i < 16; ++i) jaxcgx::mul_wide(x[i], b, &h[i], &l[i]);
  *high = load_words(h);
  *low = load_words(l);
}
using PhiloxWord = I;
CGX_HD I philox_word(I x) { return x; }
CGX_HD I lanes_in_order(I x) { return x; }
CGX_HD I iota() { return {{I4{0, 1, 2, 3}, I4{4, 5, 6, 7}, I4{8, 9, 10, 11}, I4{12, 13, 14, 15}}}; }
#undef CGX_EACH

#endif

#if !(defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__))
CGX_HD M mask_of(uint32_t bits) {
  return less(shl(splat_i(static_cast<int32_t>(bits)), splat_i(31) - iota()), splat_i(0));
}
CGX_HD I add_where(M m, I a, I b) { return a + select(m, b, splat_i(0)); }
CGX_HD F multiply_where(M m, F a, F b) { return select(m, a * b, splat_f(0.0f)); }
CGX_HD F largest(F a, F b) {
  const I magnitude = splat_i(INT32_MAX);
  return as_float(max(bits(a) & magnitude, bits(b) & magnitude));
}
// Without mask registers, loads and stores of fewer than 16 lanes go through a buffer.
template <int kSize>
CGX_HD void copy_in(uint8_t (&buffer)[16 * kSize], const void* p, int n) {
  memset(buffer, 0, sizeof buffer);
  memcpy(buffer, p, static_cast<size_t>(n) * kSize);
}
CGX_HD F load(const float* p, int n) {
  alignas(64) uint8_t b[64];
  copy_in<4>(b, p, n);
  return load(reinterpret_cast<const float*>(b));
}
CGX_HD I load_words(const void* p, int n) {
  uint8_t b[64];
  copy_in<4>(b, p, n);
  return load_words(b);
}
CGX_HD I load_halves(const void* p, int n) {
  uint8_t b[32];
  copy_in<2>(b, p, n);
  return load_halves(b);
}
CGX_HD I load_bytes(const void* p, int n) {
  uint8_t b[16];
  copy_in<1>(b, p, n);
  return load_bytes(b);
}
CGX_HD void store(float* p, F x, int n) {
  float b[16];
  store(b, x);
  memcpy(p, b, static_cast<size_t>(n) * 4);
}
CGX_HD void store_words(void* p, I x, int n) {
  uint8_t b[64];
  store_words(b, x);
  memcpy(p, b, static_cast<size_t>(n) * 4);
}
CGX_HD void store_halves(void* p, I x, int n) {
  uint8_t b[32];
  store_halves(b, x);
  memcpy(p, b, static_cast<size_t>(n) * 2);
}
CGX_HD void store_bytes(void* p, I x, int n) {
  uint8_t b[16];
  store_bytes(b, x);
  memcpy(p, b, static_cast<size_t>(n));
}
#endif

#if !defined(__AVX2__)
CGX_HD I choose(I i, const int32_t (&of)[3]) {
  const M odd = shl(i, 31), upper = shl(i, 30);
  const I even = select(less(upper, splat_i(0)), splat_i(of[2]), splat_i(of[0]));
  return select(less(odd, splat_i(0)), select(less(upper, splat_i(0)), splat_i(0), splat_i(of[1])), even);
}
CGX_HD int store_where(M m, I i, F x, int32_t* to_i, float* to_x) {
  int32_t b[16];
  float c[16];
  store_words(b, i);
  store(c, x);
  int stored = 0;
  for (uint32_t left = lanes(m); left != 0; left &= left - 1, ++stored) {
    to_i[stored] = b[__builtin_ctz(left)];
    to_x[stored] = c[__builtin_ctz(left)];
  }
  return stored;
}
CGX_HD int compress(M m, I x, int32_t* to) {
  int32_t b[16];
  store_words(b, x);
  const uint32_t all = lanes(m);
  int stored = 0;
  for (int i = 0; i < 16; ++i) {
    to[stored] = b[i];
    stored += static_cast<int>(all >> i & 1);
  }
  return stored;
}
CGX_HD I gather_words(const void* p, I i) {
  int32_t at[16], b[16];
  store_words(at, i);
  for (int j = 0; j < 16; ++j) memcpy(b + j, static_cast<const char*>(p) + 4 * int64_t{at[j]}, 4);
  return load_words(b);
}
CGX_HD I expand(M m, const int32_t* from) {
  int32_t b[16];
  const uint32_t all = lanes(m);
  int taken = 0;
  for (int i = 0; i < 16; ++i) {
    const auto in = static_cast<int>(all >> i & 1);
    b[i] = from[taken] & -in;
    taken += in;
  }
  return load_words(b);
}
template <int kMany>
CGX_HD I highest_of_each(const I (&x)[kMany]) {
  int32_t most[16] = {};
  for (int i = 0; i < kMany; ++i) {
    int32_t b[16];
    store_words(b, x[i]);
    for (int j = 0; j < 16; ++j) most[i] = b[j] > most[i] ? b[j] : most[i];
  }
  return load_words(most);
}
CGX_HD float lowest(F x) {
  float b[16];
  store(b, x);
  float r = b[0];
  for (int i = 1; i < 16; ++i) r = jaxcgx::min(b[i], r);
  return r;
}
CGX_HD float highest(F x) {
  float b[16];
  store(b, x);
  float r = b[0];
  for (int i = 1; i < 16; ++i) r = jaxcgx::max(b[i], r);
  return r;
}
#endif

// Returns the sum of all lanes.
CGX_HD int32_t total(I x) {
  int32_t b[16], sum = 0;
  store_words(b, x);
  for (int i = 0; i < 16; ++i) sum += b[i];
  return sum;
}

// The number type with which codec/*.h is instantiated.
struct Vector {
  using F = cpu::JAXCGX_ISA::F;
  using I = cpu::JAXCGX_ISA::I;
  CGX_HD static F splat(float x) { return splat_f(x); }
  CGX_HD static I splat(int32_t x) { return splat_i(x); }
};

// The number type with which codec/rng.h is instantiated.
struct PhiloxNumber {
  using I = PhiloxWord;
  CGX_HD static I splat(int32_t x) { return philox_word(splat_i(x)); }
};

}  // namespace jaxcgx::cpu::JAXCGX_ISA
