// The noise, small formats and the trait `exact` against independent definitions. tests/test_golden.py has the bytes of
// messages.
#include <limits>

#include "check.h"
#include "codec/dispatch.h"
#include "codec/rng.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- codec/rng.h

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
  const Codec codec{Kind::kFloat8, kExponent, 512};
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
  }
  return finish();
}
