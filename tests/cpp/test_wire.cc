// The bytes of the wire against independent definitions: published vectors, small formats in double precision, and the
// comments of the headers in codec/.
#include <algorithm>
#include <limits>

#include "check.h"
#include "codec/dispatch.h"
#include "codec/rng.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- codec/rng.h

void philox_vectors() {
  struct Vector {
    uint32_t counter[4], key[2], expected[4];
  };
  const Vector published[] = {// Random123's kat_vectors, philox4x32 10
                              {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                              {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                              {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                               {0xa4093822, 0x299f31d0},
                               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const Vector& v : published) {
    int32_t word[4];
    std::memcpy(word, v.counter, sizeof word);
    philox<Scalar>(word, v.key[0], v.key[1]);
    char got[40];
    std::snprintf(got, sizeof got, "%08x %08x %08x %08x", word[0], word[1], word[2], word[3]);
    CHECK(std::memcmp(word, v.expected, sizeof word) == 0, got);
  }
}

uint16_t noise_at(const uint32_t key[3], uint32_t leaf, int64_t element) {
  const int64_t counter = element / 128 * 16 + element % 16;
  int32_t word[4] = {static_cast<int32_t>(counter & 0xffffffff), static_cast<int32_t>(counter >> 32),
                     static_cast<int32_t>(leaf), 0};
  philox<Scalar>(word, key[0], key[1]);
  const int row = static_cast<int>(element % 128 / 16);
  return static_cast<uint16_t>((static_cast<uint32_t>(word[row / 2]) >> (row % 2 ? 16 : 0)) + key[2]);
}

void noise_kernel() {
  const uint32_t key[kKeyWords] = {0x12345678, 0x9abcdef0, 0xcafe};
  for (const int64_t first :
       {int64_t{0}, int64_t{128}, (int64_t{1} << 35) - 256, int64_t{1} << 40}) {  // counters past 32 bits too
    const Memory out(4 * 128 * 2);
    const auto* noise = reinterpret_cast<uint16_t*>(out.data());
    cpu::kernels().noise(key, 0xdeadbeef, first, 4, reinterpret_cast<uint16_t*>(out.data()));
    bool same = true;
    for (int64_t e = 0; e < 4 * 128; ++e) same &= noise[e] == noise_at(key, 0xdeadbeef, first + e);
    CHECK(same, cpu::kernels().name);
  }
}

// ---- codec/cast.h, codec/float8.h: small formats as sign, exponent, fraction

struct Format {
  int exponent, mantissa, bias;
  double value(int code) const {  // of a finite code
    const int e = code >> mantissa & ((1 << exponent) - 1), m = code & ((1 << mantissa) - 1);
    const double v = e == 0 ? std::ldexp(m, 1 - bias - mantissa) : std::ldexp((1 << mantissa) + m, e - bias - mantissa);
    return code >> (exponent + mantissa) ? -v : v;
  }
};

template <DType kFormat>
void halves(const Format& f) {
  const cpu::Kernels& k = cpu::kernels();
  const std::string context = std::string(k.name) + (kFormat == DType::kBF16 ? " bfloat16" : " float16");
  const int infinity = ((1 << f.exponent) - 1) << f.mantissa;
  const auto round_trip = [&](float x) {  // with vectors and with scalars, which must agree
    uint16_t code;
    k.store(kFormat, &x, 1, &code);
    CHECK((code == Cast<kFormat>::template to_bits<Scalar, false>(x, 0)), context);
    return int{code};
  };
  for (int code = 0; code < 65536; ++code) {
    const auto half = static_cast<uint16_t>(code);
    float x;
    k.load(kFormat, &half, 1, &x);
    CHECK(bits_of(x) == bits_of(Cast<kFormat>::template from_bits<Scalar>(code)), context);
    const int magnitude = code & 0x7fff;
    if (magnitude > infinity) {
      CHECK(std::isnan(x) && round_trip(x) == (infinity | 1 << (f.mantissa - 1)), context);  // the one canonical NaN
    } else if (magnitude == infinity) {
      CHECK(std::isinf(x) && std::signbit(x) == (code > magnitude) && round_trip(x) == code, context);
    } else {
      CHECK(x == f.value(code) && std::signbit(x) == (code > magnitude) && round_trip(x) == code, context);
      // Numbers between this one and the next one. Ties go to even. After the largest number, the next one is where it
      // would be.
      const double here = f.value(magnitude);
      const double next = magnitude + 1 == infinity ? 2 * here - f.value(magnitude - 1) : f.value(magnitude + 1);
      const auto middle = static_cast<float>((here + next) / 2);
      const int sign = code & 0x8000;
      const auto signed_code = [&](float v) { return round_trip(sign ? -v : v); };
      CHECK(signed_code(middle) == (sign | (magnitude + (magnitude & 1))), context);
      CHECK(signed_code(std::nextafterf(middle, 0.0f)) == (sign | magnitude), context);
      CHECK(signed_code(std::nextafterf(middle, kInf)) == (sign | (magnitude + 1)), context);
    }
  }
  for (const float x : {std::numeric_limits<float>::max(), 0x1p-149f, 0.0f, -0.0f}) round_trip(x);
}

// The fraction is the share of the 2^16 noise values that round up. An exact number never changes.
template <DType kFormat>
void stochastic_halves(const Format& f) {
  for (const int code : {0, 5, 0x3ff, 0x400, 0x3c00, 0x3f80, 0x7bfe}) {
    for (const int sixteenths : {0, 1, 5, 15}) {
      const auto x = static_cast<float>(f.value(code) + (f.value(code + 1) - f.value(code)) * sixteenths / 16);
      int up = 0;
      bool neighbours = true;
      for (int32_t noise = 0; noise < 65536; ++noise) {
        const int got = Cast<kFormat>::template to_bits<Scalar, true>(x, noise);
        up += got == code + 1;
        neighbours &= got == code || got == code + 1;
      }
      CHECK(neighbours && up == sixteenths * 4096, std::to_string(code));
    }
  }
}

template <int kExponent>
void float8() {
  const Format f{kExponent, 7 - kExponent, (1 << (kExponent - 1)) - 1};
  const Codec codec{Kind::kFloat8, kExponent, 512, false, false, false};
  const cpu::Kernels& k = cpu::kernels();
  const std::string context = std::string(k.name) + " Float8 " + std::to_string(kExponent);
  Grid g{};
  g.inv = g.unit = g.scale = 1.0f;
  g.finite = true;
  const auto code_of = [&](float x) {  // one element is one byte; the second word has three more elements as padding
    uint8_t packed[8];
    k.encoder(codec)(&x, 1, g, nullptr, packed);
    CHECK((packed[0] == Float8<kExponent>::template quantize<Scalar, 8>(x, g)), context);
    return int{packed[0]};
  };
  constexpr int kLargest = kExponent == 4 ? 0x7e : 0x7b;
  for (int code = 0; code < 256; ++code) {
    const uint8_t packed[8] = {static_cast<uint8_t>(code)};
    float x;
    cpu::Terms term;
    term.add(packed, 1.0f);
    k.decoder(codec)(term, 1, 0.0f, &x, cpu::Write::kOver);
    const int magnitude = code & 0x7f;
    CHECK(x == f.value(code) && (Float8<kExponent>::template value<Scalar, 8>(code)) == x, context);
    if (magnitude > kLargest) continue;  // never written
    CHECK(code_of(x) == code || magnitude == 0, context);
    if (magnitude == kLargest) continue;  // the scale of a bucket is such that no number is larger
    const auto middle = static_cast<float>((f.value(magnitude) + f.value(magnitude + 1)) / 2);
    const auto with_sign = [&](int c) { return c | (code & 0x80); };
    const auto signed_code = [&](float v) { return code_of(code & 0x80 ? -v : v); };
    CHECK(signed_code(middle) == with_sign(magnitude + (magnitude & 1)), context);
    CHECK(signed_code(std::nextafterf(middle, 0.0f)) == with_sign(magnitude), context);
    CHECK(signed_code(std::nextafterf(middle, kInf)) == with_sign(magnitude + 1), context);
  }
}

// ---- codec/pack.h and the grids: the bytes, one element after another

// The code of element e of a bucket of n, read bit by bit as pack.h describes it.
int code_at(const uint8_t* codes, int64_t n, int bits, int64_t e) {
  const int64_t block = e / 128, lanes = (std::min<int64_t>(128, n - block * 128) + 7) / 8;
  const int64_t row = e % 128 / lanes, lane = e % 128 % lanes;
  const uint8_t* at = codes + block * 16 * bits;
  int code = 0, low = 0;
  for (int width = 8; width > 0; width /= 2) {
    if (!(bits & width)) continue;
    for (int b = 0; b < width; ++b) {
      // 8-bit fields are two words of four rows; the others one word of eight.
      const int64_t bit = row * width + b;
      const int64_t byte =
          width == 8 ? (row < 4 ? lane * 4 : lanes * 4 + lane * 4) + bit % 32 / 8 : lane * width + bit / 8;
      code |= (at[byte] >> bit % 8 & 1) << (low + b);
    }
    at += lanes * width;
    low += width;
  }
  return code;
}

template <class C, int kBits, bool kStochastic>
void scalar_wire(const Codec& codec, Random& r) {
  for (const int64_t n : {1, 7, 9, 16, 17, 121, 127, 128, 135, 255, 512, 2049, 5000}) {
    const Trip t(codec, numbers(n, r), r.next());
    const std::vector<float> x = floats(t.m.leaves[0]);
    const Layout& l = t.m.layout;
    bool same = true;
    int64_t at = l.pieces[0].codes;
    for (int64_t from = 0; from < n; from += codec.bucket_size) {
      const int64_t size = std::min(codec.bucket_size, n - from), index = from / codec.bucket_size;
      Stats s{kInf, -kInf};
      for (int64_t e = from; e < from + size; ++e) {
        const float v = x[static_cast<size_t>(e)];
        s.lo = std::isnan(v) ? -kInf : std::min(s.lo, v);
        s.hi = std::isnan(v) ? kInf : std::max(s.hi, v);
      }
      float sum = 0.0f;
      for (int64_t b = 0; b < size; b += 128) {  // here, a bucket is smaller than a group of 256 blocks
        const int64_t lanes = (std::min<int64_t>(128, size - b) + 7) / 8;
        float lane[16] = {};
        for (int64_t e = b; e < std::min(b + 128, size); ++e) {
          float& total = lane[(e - b) % lanes];
          total = total + std::fabs(x[static_cast<size_t>(from + e)] * scale_of(largest_of(s)));
        }
        for (int half = 8; half > 0; half /= 2) {
          for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
        }
        sum = sum + lane[0];
      }
      const Grid g = C::grid(s, sum, size, codec);
      same &= bits_of(t.meta(index, 0)) == (g.finite ? bits_of(g.unit) : kNaNBits);
      if (meta_floats(codec) == 2) same &= bits_of(t.meta(index, 1)) == (g.finite ? bits_of(g.base) : kNaNBits);
      for (int64_t e = 0; e < size; ++e) {
        const float v = x[static_cast<size_t>(from + e)] * g.scale;
        int code = 0;
        if (g.finite) {
          if constexpr (kStochastic) {
            const uint16_t noise = noise_at(t.m.keys.data(), static_cast<uint32_t>(t.m.ids[0]), from + e);
            code = C::template quantize<Scalar, kBits>(v, g, noise);
          } else {
            code = C::template quantize<Scalar, kBits>(v, g);
          }
        }
        same &= code_at(t.payload.data() + at, size, kBits, e) == code;
      }
      at += packed_bytes(size, kBits);
    }
    CHECK(same, cpu::kernels().name + (" " + describe(l)));
  }
}

void scalar_codecs() {
  Random r{11};
  for (const int64_t bucket : {33, 128, 1000}) {
    for (const Codec& codec : codecs(bucket)) {
      if (codec.skip_incomplete || codec.compatible || is_rotated(codec)) continue;
      with_encoder(codec, [&](auto variant) {
        using V = decltype(variant);
        // The scales of blocks are compared with jnp and NumPy.
        if constexpr (!traits_of(V::Codec::kKind).scales)
          scalar_wire<typename V::Codec, V::bits, V::stochastic>(codec, r);
      });
    }
  }
}

// ---- codec/traits.h: `exact`

// Units are multiples of 2^-149. Where they are denormal, a product with a fraction is rounded.
template <class C, int kBits>
void exact_products(const Codec& codec) {
  for (int code = 0; code < 1 << kBits; ++code) {
    const float value = C::template value<Scalar, kBits>(code);
    bool same = true;
    for (int i = 1; i < 0x10000; i += i < 0x100 ? 1 : 0xff) {
      for (const float quantum : {0x1p-149f, 0x1p-140f, 0x1p-16f}) {
        const float unit = static_cast<float>(i) * quantum;
        same &= static_cast<double>(unit * value) == static_cast<double>(unit) * static_cast<double>(value);
      }
    }
    CHECK(same, "kind " + std::to_string(static_cast<int>(codec.kind)) + ", code " + std::to_string(code) +
                    ": a product is rounded, so traits_of must not set `exact`");
  }
}

void exact_codecs() {
  for (const Codec& codec : codecs(33)) {
    if (codec.stochastic || codec.skip_incomplete || codec.compatible || !traits_of(codec.kind).exact) continue;
    with_decoder(codec, [&](auto variant) {
      using V = decltype(variant);
      if constexpr (traits_of(V::Codec::kKind).exact) exact_products<typename V::Codec, V::bits>(codec);
    });
  }
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx;
  using namespace jaxcgx::test;
  philox_vectors();
  const Format bfloat16{8, 7, 127}, float16{5, 10, 15};
  stochastic_halves<DType::kBF16>(bfloat16);
  stochastic_halves<DType::kF16>(float16);
  exact_codecs();
  // If instruction sets agree (test_kernels), these tests are needed only once. Instrumented portable code is slow.
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    noise_kernel();
    halves<DType::kBF16>(bfloat16);
    halves<DType::kF16>(float16);
    float8<4>();
    float8<5>();
    scalar_codecs();
  }
  return finish();
}
