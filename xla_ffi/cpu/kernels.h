// Kernels that are compiled once per instruction set: loops over a stretch of memory that fits the first cache. The
// drivers (encode.cc, decode.cc, reduce.cc) cut messages into such stretches and call the kernels through a table.
#pragma once

#include "codec/grid.h"
#include "codec/rng.h"
#include "codec/rotation.h"

namespace jaxcgx::cpu {

// The codes of one bucket from several ranks.
struct Terms {
  static constexpr int64_t kMost = 16;
  const uint8_t* codes[kMost];
  float unit[kMost];
  int64_t ranks = 0;

  void add(const uint8_t* c, float u) {
    codes[ranks] = c;
    unit[ranks++] = u;
  }
};

// out = so_far + unit * value(code), one rank after another. so_far begins as `base`, with kOnto as the contents of
// out. kAround: out will not be read soon, and is written past the caches.
enum class Write { kOver, kOnto, kAround };
using DecodeFn = void (*)(const Terms& terms, int64_t n, float base, float* out, Write write);
using EncodeFn = void (*)(const float* x, int64_t n, const Grid& grid, const uint16_t* noise, uint8_t* codes);
using CastFn = void (*)(const float* x, int64_t n, const uint16_t* noise, void* out);

struct Kernels {
  const char* name;
  // out[i] = x[i] as float32; x[i] rounded to nearest
  void (*load)(DType dtype, const void* x, int64_t n, float* out);
  void (*store)(DType dtype, const float* x, int64_t n, void* out);
  void (*add)(const float* x, const float* y, int64_t n, float* out);
  // out[i] = x[i] - y[i], or old[i] where that is not finite; out may be old
  void (*residual)(const float* x, const float* y, const float* old, int64_t n, float* out);
  void (*scale)(const float* x, int64_t n, float factor, float* out);
  void (*divide)(const float* x, int64_t n, float divisor, float* out, Write write);
  // Widens `stats` by n values; starts from Stats{inf, -inf}.
  void (*stats)(const float* x, int64_t n, Stats* stats);
  // Continues a sum of magnitudes, in the order of codec/sign.h; n is a multiple of the block, except in the last call.
  float (*sum)(const float* x, int64_t n, float so_far);
  // Bits for the blocks of 128 elements that begin at `first`, a multiple of 128.
  void (*noise)(const uint32_t key[kKeyWords], uint32_t leaf, int64_t first, int64_t blocks, uint16_t* out);
  // Counts the magnitudes that are at least `least` (bits). `find` also returns these numbers and their indices, where
  // the index of x[0] is `first`. Both arrays have room for n + 16.
  int64_t (*count)(const float* x, int64_t n, uint32_t least);
  int64_t (*find)(const float* x, int64_t n, uint32_t least, int32_t first, int32_t* index, float* values);
  // out[i] = x[i], or old[i] where the magnitude is at least `least`; out may be old
  void (*hold)(const float* x, const float* old, int64_t n, uint32_t least, float* out);
  // n codes of `bits` (1 to 7) bits, packed as in a bucket
  void (*pack)(const int32_t* codes, int64_t n, int bits, uint8_t* out);
  void (*unpack)(const uint8_t* in, int64_t n, int bits, int32_t* codes);
  // Rotates a bucket of n: padded(n) numbers. `rotate_back` overwrites `values`, the rotated bucket, and writes its
  // first n numbers.
  void (*rotate)(const float* x, int64_t n, const Rotation& rotation, uint32_t seed, float* out);
  void (*rotate_back)(float* values, int64_t n, const RotatedMeta& meta, float* out, Write write);
  // Writes the packed codes of a rotated bucket (codec/eden.h), and returns its unit. `size` is padded(n).
  float (*normal_codes)(const float* rotated, int64_t size, int bits, uint8_t* codes);
  void (*normal_values)(const uint8_t* codes, int64_t size, int bits, float* values);
  // Packs a block of a Lossless piece, of n elements (at most 512), to its planes and to the overflow. Returns the
  // number of bytes that it writes to the overflow. `center` is the first byte of the block's head.
  int64_t (*pack_block)(DType dtype, const void* x, int64_t n, uint8_t* center, uint8_t* planes, uint8_t* overflow);
  void (*unpack_block)(DType dtype, int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow,
                       int64_t bytes, void* x);
  EncodeFn (*encoder)(const Codec& codec);
  DecodeFn (*decoder)(const Codec& codec);
  CastFn (*caster)(const Codec& codec);
};

const Kernels& kernels();               // those that select_kernels chose, or the best that this processor runs
bool select_kernels(const char* name);  // "avx512", "avx2", "portable"; false if the processor can't run them

namespace portable {
extern const Kernels kKernels;
}
#if defined(JAXCGX_X86)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

}  // namespace jaxcgx::cpu
