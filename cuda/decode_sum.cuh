// Decodes a payload, or the sum of several payloads, into registers.
#pragma once

#include "cuda/load_store.cuh"
#include "cuda/piece_table.cuh"

namespace jaxcgx::cuda {

// Returns a / divisor, correctly rounded, without a division. The product with the rounded reciprocal is corrected
// twice by its exact remainder (Markstein). Small numbers are scaled first, as on the CPU.
CGX_D float divide(float a, float divisor, float inverse) {
  const bool tiny = fabsf(a) < kTiny;
  const float scaled = tiny ? a * kUp : a, first = scaled * inverse;
  float q = first;
#pragma unroll
  for (int i = 0; i < 2; ++i) q = __fmaf_rn(__fmaf_rn(-q, divisor, scaled), inverse, q);
  // The remainder of an infinity would be a NaN, and a zero would lose its sign.
  q = is_finite(first) && first != 0.0f ? q : first;
  return tiny ? q * kDown : q;
}
template <int n>
CGX_D void divide(const Message& m, float (&x)[n]) {
  if (m.exact) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] *= m.inverse;
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = divide(x[i], m.divisor, m.inverse);
  }
}
CGX_D void divide(const Message& m, float (&x)[kRows][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) divide(m, x[r]);
}

// The metadata of a bucket in the payload of each rank.
struct Metadata {
  const float* first;
  int64_t next;  // in floats
  int floats;

  CGX_D Metadata(const Message& m, const uint8_t* payloads, int64_t at) : next(m.chunk_bytes / 4), floats(m.meta) {
    first = reinterpret_cast<const float*>(payloads) + at;
  }
  CGX_D float unit(uint32_t rank) const { return floats == 0 ? 1.0f : first[rank * next]; }
  // Returns the sum of all ranks' bases, which is the first term of a sum. Without a sum, it returns the payload's
  // base, to which no 0 is added. If `where` is out of range, it returns NaN.
  CGX_D float base(const Message& m, uint32_t own) const {
    if (own == kNowhere) return float_of(kNaNBits);
    if (floats < 2) return 0.0f;
    if (!m.sums) return first[1];
    constexpr uint32_t kAhead = 8;  // loads in flight
    const float* at = first + 1;
    float base = 0.0f, of[kAhead];
    for (uint32_t rank = 0; rank < m.ranks; rank += kAhead) {
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i, at += next) of[i] = rank + i < m.ranks && rank + i != own ? *at : 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) base += of[i];
    }
    return base;
  }
};

// Adds a decoded quad to x.
template <class C, int kBits>
CGX_D void plus_quad(const QuadCodes<C, kBits>& codes, float unit, int32_t top, float (&x)[kRows][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float scale = codes.scale(r);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[r][j] = plus<C, kBits>(x[r][j], unit, codes.lane[j], r, top, scale);
  }
}

// Decodes a quad. kSum: sums the quads of all ranks. The caller divides.
template <class C, int kBits, bool kSum>
CGX_D void decode_quad(const Message& m, const Entry& e, const Place& p, uint32_t unit, float (&x)[kRows][4]) {
  const Quad q(unit, m.log_bucket);
  const uint8_t* payloads = payloads_of(m, p);
  const Metadata meta(m, payloads, e.meta + (unit >> (m.log_bucket - 5)) * static_cast<int64_t>(m.meta));
  const int32_t top = Levels::top(m.codec);
  const auto begin = [&] {
    const float base = meta.base(m, p.rank);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r][0] = x[r][1] = x[r][2] = x[r][3] = base;
  };
  using Codes = QuadCodes<C, kBits>;
  const uint8_t* at = payloads + e.codes + Codes::at(q);
  if constexpr (!kSum) {
    Codes codes;
    codes.load(at, q);
    begin();
    return plus_quad(codes, meta.unit(0), top, x);
  }
  const int64_t to_meta = reinterpret_cast<const uint8_t*>(meta.first) - at;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr uint32_t kMost = 3;  // with 4, ptxas spills for this architecture
#else
  constexpr uint32_t kMost = 4;
#endif
  // Payloads whose loads are in flight. Registers limit it.
  constexpr uint32_t kAhead = kBits == 8 || kBits == 3 ? 2 : kBits <= 4 ? kMost : 1;
  for (uint32_t rank = 0; rank < m.ranks;) {
    const uint32_t stop = rank <= p.rank && p.rank < m.ranks ? p.rank : m.ranks;
    Codes codes[kAhead];
    float unit[kAhead];
    const uint8_t* from = at;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i, from += m.chunk_bytes) {
      if (rank + i >= stop) break;
      codes[i].load(from, q);
      unit[i] = has_unit<C>() ? *reinterpret_cast<const float*>(from + to_meta) : 1.0f;
    }
    if (rank == 0) begin();  // its loads are in flight together with the loads of the first codes
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i, ++rank, at += m.chunk_bytes) {
      if (rank >= stop) break;
      plus_quad(codes[i], unit[i], top, x);
    }
    if (rank == p.rank && rank < m.ranks) {
      add_quad(e.leaf, static_cast<DType>(e.dtype), q, x);
      ++rank, at += m.chunk_bytes;
    }
  }
}

}  // namespace jaxcgx::cuda
