// Loads and stores of elements and codes between global memory and registers.
#pragma once

#include "codec/cast.h"
#include "cuda/arithmetic.cuh"

namespace jaxcgx::cuda {

constexpr uint32_t kWarpSize = 32, kWholeWarp = 0xffffffffu;  // kWholeWarp: the mask of all lanes of a warp

CGX_D bool aligned(const void* p, uint32_t bytes) { return (reinterpret_cast<uintptr_t>(p) & (bytes - 1)) == 0; }

// The conversions of codec/cast.h, with the GPU's conversion instructions where it has them.
CGX_D float widen(DType dtype, uint32_t half) {
  if (dtype == DType::kBF16) return float_of(half << 16);
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(half)));
  return x;
#else
  return Cast<DType::kF16>::from_bits<Scalar>(static_cast<int32_t>(half));
#endif
}
CGX_D uint32_t narrow(DType dtype, float x) {
#if defined(__CUDA_ARCH__)
  uint16_t half;
  if (dtype == DType::kF16) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return x == x ? half : Cast<DType::kF16>::kNaN;
  }
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return x == x ? half : Cast<DType::kBF16>::kNaN;
#endif
#endif
  return static_cast<uint32_t>(dtype == DType::kF16 ? Cast<DType::kF16>::to_bits<Scalar, false>(x, 0)
                                                    : Cast<DType::kBF16>::to_bits<Scalar, false>(x, 0));
}

// Returns two numbers as one word, the first in its low half. The conversion instructions turn every NaN into 0x7fff.
// As a signed integer, 0x7fff is the only result above kNaN. So the minimum with kNaN turns it into kNaN and keeps all
// numbers.
CGX_D uint32_t narrow(DType dtype, float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if (dtype == DType::kBF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return __vmins2(pair,
                  dtype == DType::kBF16 ? Cast<DType::kBF16>::kNaN * 0x10001u : Cast<DType::kF16>::kNaN * 0x10001u);
#else
  return narrow(dtype, x) | narrow(dtype, y) << 16;
#endif
}

// __ldcs marks loads as streaming, because most elements are read only once.
CGX_D float load_element(const void* leaf, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? __ldcs(static_cast<const float*>(leaf) + i)
                              : widen(dtype, __ldcs(static_cast<const uint16_t*>(leaf) + i));
}
CGX_D void store_element(void* leaf, DType dtype, int64_t i, float x) {
  if (dtype == DType::kF32)
    static_cast<float*>(leaf)[i] = x;
  else
    static_cast<uint16_t*>(leaf)[i] = static_cast<uint16_t>(narrow(dtype, x));
}

// The elements of a thread of the fast kernels: four neighbouring lanes of one block of codec/pack.h, in all eight
// rows. This layout has three advantages:
//  - A thread makes whole words of codes without a shuffle: 16 bytes of 4-bit codes, adjacent to the next thread's.
//  - One call of Philox serves the eight rows of a lane.
//  - A thread reads 16 bytes of each row, adjacent to the next thread's. So the 64 bytes of a row are whole sectors.
// If a warp read whole rows, it would read whole cache lines, but the codes of a lane would be spread over eight
// threads (benchmarks/notes/gpu-kernels.md). In buckets of 64 and 32 elements, blocks have 8 and 4 lanes.
struct Quad {
  int64_t block;   // index of the block in the piece
  uint32_t place;  // index of the quad in its block
  uint32_t lanes;  // lanes of a block: 16, 8 or 4

  CGX_D Quad(uint32_t unit, int log_bucket) {
    const int log_quads = log_bucket < 7 ? log_bucket - 5 : 2;
    block = unit >> log_quads;
    place = unit & ((1u << log_quads) - 1);
    lanes = 4u << log_quads;
  }
  // Returns the first element, in row 0. The next row is `lanes` elements further.
  CGX_D int64_t element() const { return block * lanes * kRows + place * 4; }
};

// Four neighbouring numbers in memory.
CGX_D float4 four(DType, const float4& numbers) { return numbers; }
CGX_D float4 four(DType dtype, const uint2& halves) {
  return {widen(dtype, halves.x & 0xffff), widen(dtype, halves.x >> 16), widen(dtype, halves.y & 0xffff),
          widen(dtype, halves.y >> 16)};
}

// Calls f(row, its four elements) for the eight rows. All loads are issued before the first result is used, to hide
// their latency, if there are enough registers.
template <class Fn>
CGX_D void load_quad(const void* leaf, DType dtype, int64_t element, uint32_t lanes, Fn f) {
  if (dtype == DType::kF32) {
    const float* p = static_cast<const float*>(leaf) + element;
    float4 rows[kRows];
    if (aligned(p, 16)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = __ldcs(reinterpret_cast<const float4*>(p + r * lanes));
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r, p += lanes) rows[r] = {__ldcs(p), __ldcs(p + 1), __ldcs(p + 2), __ldcs(p + 3)};
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) f(r, rows[r]);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(leaf) + element;
    uint2 rows[kRows];
    if (aligned(p, 8)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = __ldcs(reinterpret_cast<const uint2*>(p + r * lanes));
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r, p += lanes) {
        rows[r] = {__ldcs(p) | static_cast<uint32_t>(__ldcs(p + 1)) << 16,
                   __ldcs(p + 2) | static_cast<uint32_t>(__ldcs(p + 3)) << 16};
      }
    }
    const auto each = [&](DType d) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) f(r, four(d, rows[r]));
    };
    if (dtype == DType::kBF16)
      each(DType::kBF16);
    else
      each(DType::kF16);
  }
}

CGX_D void set_row(float (&x)[4], const float4& row) { x[0] = row.x, x[1] = row.y, x[2] = row.z, x[3] = row.w; }
CGX_D void add_row(float (&x)[4], const float4& row) { x[0] += row.x, x[1] += row.y, x[2] += row.z, x[3] += row.w; }
CGX_D void add_quad(const void* leaf, DType dtype, const Quad& q, float (&x)[kRows][4]) {
  load_quad(leaf, dtype, q.element(), q.lanes, [&](int r, const float4& row) { add_row(x[r], row); });
}
CGX_D void copy_quad(const float (&from)[kRows][4], float (&to)[kRows][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[r][j] = from[r][j];
  }
}

CGX_D void store_halves(uint16_t* p, bool together, uint2 row) {
  if (together) {
    __stcs(reinterpret_cast<uint2*>(p), row);
  } else {
    p[0] = static_cast<uint16_t>(row.x), p[1] = static_cast<uint16_t>(row.x >> 16), p[2] = static_cast<uint16_t>(row.y),
    p[3] = static_cast<uint16_t>(row.y >> 16);
  }
}
CGX_D void store_quad(void* leaf, DType dtype, int64_t element, uint32_t lanes, const float (&x)[kRows][4]) {
  if (dtype == DType::kF32) {
    float* p = static_cast<float*>(leaf) + element;
    if (aligned(p, 16)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        __stcs(reinterpret_cast<float4*>(p + r * lanes), float4{x[r][0], x[r][1], x[r][2], x[r][3]});
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r, p += lanes) p[0] = x[r][0], p[1] = x[r][1], p[2] = x[r][2], p[3] = x[r][3];
    }
  } else {
    uint16_t* p = static_cast<uint16_t*>(leaf) + element;
    const bool together = aligned(p, 8);
    const auto each = [&](DType d) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        store_halves(p + r * lanes, together, uint2{narrow(d, x[r][0], x[r][1]), narrow(d, x[r][2], x[r][3])});
    };
    if (dtype == DType::kBF16)
      each(DType::kBF16);
    else
      each(DType::kF16);
  }
}

// load_words and store_words access kWords neighbouring words of 4 bytes. They are aligned to kAligned bytes. 0: the
// pointer is tested, because in blocks of fewer than 16 lanes whose codes have several fields, words may be less
// aligned.
template <int kAligned, int kWords>
CGX_D void load_words(const uint8_t* at, uint32_t (&w)[kWords]) {
  if (kWords == 4 && (kAligned == 16 || (kAligned == 0 && aligned(at, 16)))) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(at));
    w[0] = v.x, w[1 % kWords] = v.y, w[2 % kWords] = v.z, w[3 % kWords] = v.w;
  } else if (kWords > 1 && (kAligned >= 8 || (kAligned == 0 && kWords == 2 && aligned(at, 8)))) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(at + 4 * i));
      w[i] = v.x, w[(i + 1) % kWords] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) w[i] = __ldcs(reinterpret_cast<const uint32_t*>(at) + i);
  }
}
template <int kAligned, int kWords>
CGX_D void store_words(uint8_t* at, const uint32_t (&w)[kWords]) {
  if (kWords == 4 && (kAligned == 16 || (kAligned == 0 && aligned(at, 16)))) {
    *reinterpret_cast<uint4*>(at) = {w[0], w[1 % kWords], w[2 % kWords], w[3 % kWords]};
  } else if (kWords > 1 && (kAligned >= 8 || (kAligned == 0 && kWords == 2 && aligned(at, 8)))) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) *reinterpret_cast<uint2*>(at + 4 * i) = {w[i], w[(i + 1) % kWords]};
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(at)[i] = w[i];
  }
}

// Loads and stores test the alignment, because words of buckets of odd sizes are not aligned.
template <class U>
CGX_D int32_t load_word(const uint8_t* p) {
  if (aligned(p, sizeof(U))) return static_cast<int32_t>(*reinterpret_cast<const U*>(p));
  uint32_t word = 0;
#pragma unroll
  for (uint32_t i = 0; i < sizeof(U); ++i) word |= static_cast<uint32_t>(p[i]) << (8 * i);
  return static_cast<int32_t>(word);
}
template <class U>
CGX_D void store_word(uint8_t* p, int32_t word) {
  if (aligned(p, sizeof(U))) {
    *reinterpret_cast<U*>(p) = static_cast<U>(word);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(U); ++i) p[i] = static_cast<uint8_t>(static_cast<uint32_t>(word) >> (8 * i));
  }
}
// Calls f(a type of the word's size, the word, its offset in the block) for each word of a lane.
template <int kBits, class W, class Fn>
CGX_D void each_word(W& w, int32_t lane, int32_t lanes, Fn f) {
  int32_t at = 0;
  if constexpr (kBits & 12) f(uint32_t(), w.a, at + 4 * lane), at += 4 * lanes;
  if constexpr (kBits & 8) f(uint32_t(), w.b, at + 4 * lane);
  if constexpr (kBits & 2) f(uint16_t(), w.c, at + 2 * lane), at += 2 * lanes;
  if constexpr (kBits & 1) f(uint8_t(), w.d, at + lane);
}

// Clears the padding of a chunk after codes that end at byte `at`.
CGX_D void pad(uint8_t* chunk, int64_t at) {
  for (const int64_t end = align16(at); at < end; ++at) chunk[at] = 0;
}

// The codes of a quad. For codecs with scales: also those of its block's scales.
template <class C, int kBits>
struct QuadCodes {
  static constexpr int kScales = scales_of<C>(), kScaleWords = kScales > 0 ? kScales / 4 : 1;
  // A block with scales has a multiple of 8 or of 4 bytes.
  static constexpr int kAligned = kScales > 0 ? kScales : (kBits & (kBits - 1)) == 0 ? 16 : 0;
  Words<Scalar, kBits> lane[4];
  uint32_t scales[kScaleWords];

  // Returns the byte offset of the codes of a quad's block.
  CGX_D static int64_t at(const Quad& q) { return q.block * (q.lanes * kBits + kScales); }

  // Returns the code of the scale of a row.
  CGX_D int32_t scale_code(int row) const {
    const int i = row / C::kScaleRows;
    return static_cast<int32_t>(scales[i / 4] >> 8 * (i % 4) & 255);
  }
  // Returns the scale of a row: 1 for codecs without scales.
  CGX_D float scale(int row) const {
    if constexpr (kScales > 0)
      return C::template scale<Scalar>(scale_code(row));
    else
      return 1.0f;
  }

  CGX_D void load(const uint8_t* block, const Quad& q) {
    uint32_t w[4];
    const auto each = [&](auto set) {
#pragma unroll
      for (int j = 0; j < 4; ++j) set(lane[j], j);
    };
    if constexpr (kBits & 12) {
      load_words<kAligned>(block + q.place * 16, w);
      each([&](auto& l, int j) { l.a = static_cast<int32_t>(w[j]); });
      block += q.lanes * 4;
    }
    if constexpr (kBits & 8) {
      load_words<kAligned>(block + q.place * 16, w);
      each([&](auto& l, int j) { l.b = static_cast<int32_t>(w[j]); });
      block += q.lanes * 4;
    }
    if constexpr (kBits & 2) {
      uint32_t c[2];
      load_words<kAligned>(block + q.place * 8, c);
      each([&](auto& l, int j) { l.c = static_cast<int32_t>(c[j / 2] >> (16 * (j & 1)) & 0xffff); });
      block += q.lanes * 2;
    }
    if constexpr (kBits & 1) {
      uint32_t d[1];
      load_words<4>(block + q.place * 4, d);
      each([&](auto& l, int j) { l.d = static_cast<int32_t>(d[0] >> (8 * j) & 0xff); });
    }
    if constexpr (kScales > 0) load_words<kAligned>(block, scales);
  }
  CGX_D void store(uint8_t* block, const Quad& q) const {
    const auto word = [](int32_t x) { return static_cast<uint32_t>(x); };
    if constexpr (kBits & 12) {
      store_words<kAligned>(block + q.place * 16, {word(lane[0].a), word(lane[1].a), word(lane[2].a), word(lane[3].a)});
      block += q.lanes * 4;
    }
    if constexpr (kBits & 8) {
      store_words<kAligned>(block + q.place * 16, {word(lane[0].b), word(lane[1].b), word(lane[2].b), word(lane[3].b)});
      block += q.lanes * 4;
    }
    if constexpr (kBits & 2) {
      store_words<kAligned>(block + q.place * 8,
                            {word(lane[0].c) | word(lane[1].c) << 16, word(lane[2].c) | word(lane[3].c) << 16});
      block += q.lanes * 2;
    }
    if constexpr (kBits & 1) {
      store_words<4>(block + q.place * 4,
                     {word(lane[0].d) | word(lane[1].d) << 8 | word(lane[2].d) << 16 | word(lane[3].d) << 24});
    }
    if constexpr (kScales > 0) {
      if (q.place == 0) store_words<kAligned>(block, scales);
    }
  }
};

}  // namespace jaxcgx::cuda
