// Kernels that are compiled once per instruction set. Each is a loop over a stretch of memory that fits in the L1
// cache. The drivers (encode.cc, decode.cc, reduce.cc) cut messages into such stretches and call the kernels through a
// table.
#pragma once

#include "codec/grid.h"
#include "codec/lossless.h"
#include "codec/patch.h"
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

// How a kernel writes its output. kOver overwrites `out`. kOnto adds to the contents of `out`. kAround overwrites it
// with non-temporal stores, for an output that will not be read soon and should not fill the caches.
enum class Write { kOver, kOnto, kAround };
// Sets out = so_far + unit * value(code), one rank after another. so_far begins as `base`, or with kOnto as the
// contents of `out`.
using DecodeFn = void (*)(const Terms& terms, int64_t n, float base, float* out, Write write);
using EncodeFn = void (*)(const float* x, int64_t n, const Grid& grid, const uint16_t* noise, uint8_t* codes);
using CastFn = void (*)(const float* x, int64_t n, const uint16_t* noise, void* out);

constexpr int64_t kLosslessGroup = 4 * kLosslessBlock;  // the elements whose overflow is written without gaps

// The memory for a block of a patch. Whole vectors are stored and loaded, past the end of a list, too.
struct PatchScratch {
  static constexpr int64_t kRoom = kPatchBlock + 32;
  uint64_t marks[kPatchBlock / 64];                               // a bit for each word: whether it changes
  uint16_t index[kRoom];                                          // of these words
  int32_t numbers[kRoom], kept[kRoom], small[kRoom], raw[kRoom];  // of these words
  uint64_t wide[kRoom];                                           // raw words of 8 bytes
  uint8_t bytes[9 * kPatchBlock];                                 // the block
  int64_t used;                                                   // of `bytes`
};

struct Kernels {
  const char* name;
  // load sets out[i] to x[i] as float32. store sets out[i] to x[i], rounded to nearest.
  void (*load)(DType dtype, const void* x, int64_t n, float* out);
  void (*store)(DType dtype, const float* x, int64_t n, void* out);
  void (*add)(const float* x, const float* y, int64_t n, float* out);
  // Sets out[i] = x[i] - y[i], or old[i] if the difference is not finite. `out` may be `old`.
  void (*residual)(const float* x, const float* y, const float* old, int64_t n, float* out);
  void (*scale)(const float* x, int64_t n, float factor, float* out);
  void (*divide)(const float* x, int64_t n, float divisor, float* out, Write write);
  // Extends the range in `stats` by n values. The caller starts with Stats{inf, -inf}.
  void (*stats)(const float* x, int64_t n, Stats* stats);
  // Returns the largest magnitude of n values. A NaN may count as any number.
  float (*largest)(const float* x, int64_t n);
  // Returns so_far plus the sum of n magnitudes, in the order of codec/grid.h. n is a multiple of kBlock, except in the
  // last call of a sum.
  float (*sum)(const float* x, int64_t n, float so_far);
  // Draws 16 random bits per element for `blocks` blocks of 128 elements, from element `first` on, a multiple of 128.
  void (*noise)(const uint32_t key[kKeyWords], uint32_t leaf, int64_t first, int64_t blocks, uint16_t* out);
  // Both functions return the number of elements whose magnitude has bits >= `least`. `find` also writes these elements
  // and their indices, where x[0] has the index `first`. Both arrays have room for n + 16, because whole vectors are
  // stored.
  int64_t (*count)(const float* x, int64_t n, uint32_t least);
  int64_t (*find)(const float* x, int64_t n, uint32_t least, int32_t first, int32_t* index, float* values);
  // Sets out[i] = x[i], or old[i] if the magnitude of x[i] has bits >= `least`. `out` may be `old`.
  void (*hold)(const float* x, const float* old, int64_t n, uint32_t least, float* out);
  // Pack and unpack n codes of `bits` (1 to 7) bits, in the format of a bucket.
  void (*pack)(const int32_t* codes, int64_t n, int bits, uint8_t* out);
  void (*unpack)(const uint8_t* in, int64_t n, int bits, int32_t* codes);
  // `rotate` writes the padded(n) numbers of the rotated bucket. `rotate_back` is the inverse: it overwrites `values`,
  // the rotated bucket, and writes the n numbers of the bucket to `out`.
  void (*rotate)(const float* x, int64_t n, const Rotation& rotation, uint32_t seed, float* out);
  void (*rotate_back)(float* values, int64_t n, const RotatedMeta& meta, float* out, Write write);
  // `normal_codes` writes the packed codes of a rotated bucket (codec/eden.h) and returns its unit. `normal_values`
  // writes the level of each code. `size` is padded(n).
  float (*normal_codes)(const float* rotated, int64_t size, int bits, uint8_t* codes);
  void (*normal_values)(const uint8_t* codes, int64_t size, int bits, float* values);
  // Returns the unit with which `values` in place of a rotated bucket are unbiased (codec/micro.h).
  float (*unbiased_unit)(const float* rotated, const float* values, int64_t size);
  // `pack_blocks` writes the heads and planes of blocks of a Lossless piece, and their overflow: that of a group of
  // blocks has no gaps, and room for the most bytes. `unpack_block` is the inverse for one block, of n elements (at
  // most 512). `center` is the first byte of its head, `bytes` the bytes of its overflow.
  void (*pack_blocks)(DType dtype, const void* x, int64_t n, uint8_t* heads, uint8_t* planes, uint8_t* overflow);
  void (*unpack_block)(DType dtype, int64_t n, uint8_t center, const uint8_t* planes, const uint8_t* overflow,
                       int64_t bytes, void* x);
  // `digest` returns what whole groups of bytes add to a digest. `first` is the number of the first group.
  // `encode_patch_block` writes a block of a patch to `scratch`. `apply_patch_block` makes its new words of the old
  // ones, in place. It returns false if the bytes, as many as the head says, don't fit the head.
  uint64_t (*digest)(const void* data, int64_t groups, int64_t first);
  PatchHead (*encode_patch_block)(int64_t width, const void* old, const void* now, int64_t n, PatchScratch* scratch);
  bool (*apply_patch_block)(int64_t width, const PatchHead& head, const uint8_t* in, int64_t n, PatchScratch* scratch,
                            void* words);
  EncodeFn (*encoder)(const Codec& codec);
  DecodeFn (*decoder)(const Codec& codec);
  CastFn (*caster)(const Codec& codec);
};

// Returns the kernels that select_kernels chose, else the fastest that this processor can run. Throws
// std::runtime_error if it can run none that were built.
const Kernels& kernels();
// Chooses the kernels "avx512", "avx2" or "portable". Returns false if the processor can't run them, or they were not
// built.
bool select_kernels(const char* name);

namespace portable {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace jaxcgx::cpu
