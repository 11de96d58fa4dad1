// The basis of all codec headers: the CGX_HD macro, the dtypes of a leaf, a codec's settings, and the scalar version of
// the operations in which codecs are written.
//
// A codec's arithmetic is a template over a number type: `float` in a GPU thread, a vector of 16 on a CPU
// (cpu/simd.h). Both types have the operations from `Scalar` on under the same names. So each formula is written once,
// and CPU and GPU agree byte for byte.
//
// These rules keep all implementations bitwise equal, including the one in jnp:
//  - IEEE arithmetic, round to nearest even, denormals kept;
//  - a product is an operand of an addition only if the product is exact, so that a fused multiply-add gives the same
//    bits as a separate multiplication and addition;
//  - no reassociation: the order of every sum is part of the specification.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CGX_HD __host__ __device__ __forceinline__
#else
// always_inline: these functions are compiled once per instruction set. As ordinary inline functions they would have
// one symbol, and the linker could keep the AVX-512 copy for all callers.
#define CGX_HD inline __attribute__((always_inline))
#endif

namespace jaxcgx {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

CGX_HD int64_t size_of(DType d) { return d == DType::kF32 ? 4 : 2; }

// Kind crosses the FFI boundary: Kind in jaxcgx/codecs/attribute.py has the same values. Every kind has a row in
// codec/traits.h. Kinds with buckets also have a row in codec/dispatch.h. kRaw has no arithmetic, so it has no header.
enum class Kind : int32_t {
  kRaw = 0,
  kMaxMin = 1,
  kByteGrad = 2,
  kAbsMax = 3,
  kFloat8 = 4,
  kCast = 5,
  kSign = 6,
  kTopK = 7,
  kEden = 8,
  kMicro = 9,
  kLossless = 10,
};

// How TopK selects elements. Select crosses the FFI boundary, too: jaxcgx/codecs/topk.py has the same values.
enum class Select : int32_t { kExact = 0, kQuantile = 1, kExponential = 2 };

// How each element of a vector becomes a code.
struct Dense {
  Kind kind = Kind::kRaw;
  int32_t bits = 0;  // width of a code; Float8: exponent bits, 4 = e4m3 and 5 = e5m2; Cast: the DType; Micro: the
                     // MicroFormat
  int64_t bucket_size = 0;  // number of elements that share metadata; 0: one bucket for the whole piece
  bool stochastic = false;
  bool skip_incomplete = false;  // an incomplete last bucket of a leaf is sent raw
  bool compatible = false;
  bool rotate = false;  // buckets are rotated before quantization: codec/rotation.h
};

// Which elements TopK sends, and how it codes them; see codec/topk.h. All fields are zero for other codecs.
struct Sparse {
  double ratio = 0;
  int64_t lists = 0;
  bool top = false;  // true: a sum keeps only its largest elements; false: it keeps every element that any rank sent
  Select select = Select::kExact;
  double share = 0, lower = 0;
  int32_t refinements = 0;
  Dense values = {};
};

// The fields of the FFI attribute "codec" are listed in codec/fields.h.
struct Codec : Dense {
  Sparse sparse = {};
};

constexpr int64_t kUnit = 512;                // for codecs without buckets, chunks begin at multiples of this
constexpr uint32_t kNaNBits = 0x7fc00000u;    // the only NaN in metadata
constexpr uint32_t kNotFinite = 0x7f800000u;  // magnitudes with these bits and above are infinite or NaN

// Numbers below kTiny are multiplied by kUp before arithmetic whose results may be denormal. This product is exact.
constexpr float kTiny = 0x1p-60f, kUp = 0x1p80f, kDown = 0x1p-80f;

CGX_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
CGX_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
CGX_HD float abs(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
CGX_HD bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
CGX_HD int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
CGX_HD int64_t align16(int64_t n) { return (n + 15) & ~int64_t{15}; }

// The number type of one element, for GPU threads. cpu/simd.h has each of the names below for vectors, too.
struct Scalar {
  using F = float;
  using I = int32_t;
  CGX_HD static float splat(float x) { return x; }
  CGX_HD static int32_t splat(int32_t x) { return x; }
};
CGX_HD int32_t bits(float x) { return static_cast<int32_t>(bits_of(x)); }
CGX_HD float as_float(int32_t i) { return float_of(static_cast<uint32_t>(i)); }
CGX_HD float to_float(int32_t i) { return static_cast<float>(i); }
CGX_HD int32_t shl(int32_t i, int n) { return static_cast<int32_t>(static_cast<uint32_t>(i) << n); }
CGX_HD int32_t shr(int32_t i, int n) { return static_cast<int32_t>(static_cast<uint32_t>(i) >> n); }
CGX_HD float min(float a, float b) { return a < b ? a : b; }
CGX_HD float max(float a, float b) { return a > b ? a : b; }
CGX_HD int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
CGX_HD int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }
CGX_HD bool less(int32_t a, int32_t b) { return a < b; }
CGX_HD float select(bool c, float a, float b) { return c ? a : b; }
CGX_HD int32_t select(bool c, int32_t a, int32_t b) { return c ? a : b; }
// Returns the nearest integer, ties to even. Adding and subtracting 2^23 drops the fraction. Larger numbers have no
// fraction.
CGX_HD float round(float x) {
  const float magic = float_of((bits_of(x) & 0x80000000u) | 0x4b000000u);
  return abs(x) < 8388608.0f ? (x + magic) - magic : x;
}
CGX_HD int32_t round_int(float x) {
#if defined(__CUDA_ARCH__)
  return __float2int_rn(x);
#else
  return static_cast<int32_t>(round(x));
#endif
}

}  // namespace jaxcgx
