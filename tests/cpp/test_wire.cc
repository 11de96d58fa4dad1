// The arithmetic of the wire against independent statements of it: double precision, published vectors, and the
// prose of the headers in codec/.
#include <algorithm>
#include <limits>

#include "check.h"
#include "codec/absmax.h"
#include "codec/bytegrad.h"
#include "codec/float8.h"
#include "codec/maxmin.h"
#include "codec/pack.h"
#include "codec/rng.h"
#include "codec/sign.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> floats(const Memory& m) { return std::vector<float>(m.floats(), m.floats() + m.size() / 4); }

// A float32 vector as a message of one chunk.
struct Trip {
  Message m;
  Memory payload;
  std::vector<float> out;

  Trip(const Codec& codec, const std::vector<float>& x, uint64_t seed = 7) : Trip(codec, x, Random{seed}) {}
  float meta(int64_t bucket, int which) const {
    float v;
    std::memcpy(&v, payload.data() + 4 * (bucket * meta_floats(m.layout.codec.kind) + which), 4);
    return v;
  }

 private:
  Trip(const Codec& codec, const std::vector<float>& x, Random r)
      : m(codec, {{static_cast<int64_t>(x.size()), DType::kF32}}, 1, 1, r), payload(0) {
    m.leaves[0] = as_leaf(DType::kF32, x);
    payload = encode(m, one_thread());
    out = floats(decode(m.layout, 1, payload, one_thread())[0]);
  }
};

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

uint16_t noise_at(uint32_t key0, uint32_t key1, uint32_t leaf, int64_t element) {
  const int64_t counter = element / 128 * 16 + element % 16;
  int32_t word[4] = {static_cast<int32_t>(counter & 0xffffffff), static_cast<int32_t>(counter >> 32),
                     static_cast<int32_t>(leaf), 0};
  philox<Scalar>(word, key0, key1);
  const int row = static_cast<int>(element % 128 / 16);
  return static_cast<uint16_t>(static_cast<uint32_t>(word[row / 2]) >> (row % 2 ? 16 : 0));
}

void noise_kernel() {
  const uint32_t key[2] = {0x12345678, 0x9abcdef0};
  for (const int64_t first :
       {int64_t{0}, int64_t{128}, (int64_t{1} << 35) - 256, int64_t{1} << 40}) {  // counters past 32 bits too
    const Memory out(4 * 128 * 2);
    const auto* noise = reinterpret_cast<uint16_t*>(out.data());
    cpu::kernels().noise(key, 0xdeadbeef, first, 4, reinterpret_cast<uint16_t*>(out.data()));
    bool same = true;
    for (int64_t e = 0; e < 4 * 128; ++e) same &= noise[e] == noise_at(key[0], key[1], 0xdeadbeef, first + e);
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
  const auto round_trip = [&](float x) {  // by the vector unit and by the scalar code, which must agree
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
      // Between this number and the next (past the largest: where the next would be), ties go to even.
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

// Of the 2^16 noises as many round up as the fraction says; an exact number never moves.
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
  const auto code_of = [&](float x) {  // one element is one byte; the second word's three are padding
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
    if (magnitude == kLargest) continue;  // the scale of a bucket leaves nothing above
    const auto middle = static_cast<float>((f.value(magnitude) + f.value(magnitude + 1)) / 2);
    const auto with_sign = [&](int c) { return c | (code & 0x80); };
    const auto signed_code = [&](float v) { return code_of(code & 0x80 ? -v : v); };
    CHECK(signed_code(middle) == with_sign(magnitude + (magnitude & 1)), context);
    CHECK(signed_code(std::nextafterf(middle, 0.0f)) == with_sign(magnitude), context);
    CHECK(signed_code(std::nextafterf(middle, kInf)) == with_sign(magnitude + 1), context);
  }
}

// ---- codec/pack.h and the grids: the bytes, an element at a time

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

template <class C, int kBits>
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
      for (int64_t b = 0; b < size; b += 128) {  // a bucket here is less than a group of 256 blocks
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
      if (meta_floats(codec.kind) == 2) same &= bits_of(t.meta(index, 1)) == (g.finite ? bits_of(g.base) : kNaNBits);
      for (int64_t e = 0; e < size; ++e) {
        const float v = x[static_cast<size_t>(from + e)] * g.scale;
        int code = 0;
        if (g.finite) {
          if constexpr (std::is_same_v<C, MaxMin>) {
            const uint16_t noise = noise_at(t.m.keys[0], t.m.keys[1], static_cast<uint32_t>(t.m.ids[0]), from + e);
            code = codec.stochastic ? C::template quantize<Scalar, kBits>(v, g, noise)
                                    : C::template quantize<Scalar, kBits>(v, g);
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

template <int kBits>
void scalar_width(int64_t bucket, Random& r) {
  scalar_wire<MaxMin, kBits>({Kind::kMaxMin, kBits, bucket, false, false, false}, r);
  scalar_wire<MaxMin, kBits>({Kind::kMaxMin, kBits, bucket, true, false, false}, r);
  if constexpr (kBits > 1) scalar_wire<AbsMax, kBits>({Kind::kAbsMax, kBits, bucket, false, false, false}, r);
}

void scalar_codecs() {
  Random r{11};
  for (const int64_t bucket : {33, 128, 1000}) {
    scalar_width<1>(bucket, r), scalar_width<2>(bucket, r), scalar_width<3>(bucket, r), scalar_width<4>(bucket, r);
    scalar_width<5>(bucket, r), scalar_width<6>(bucket, r), scalar_width<7>(bucket, r), scalar_width<8>(bucket, r);
    scalar_wire<ByteGrad, 8>({Kind::kByteGrad, 8, bucket, false, false, false}, r);
    scalar_wire<Float8<4>, 8>({Kind::kFloat8, 4, bucket, false, false, false}, r);
    scalar_wire<Float8<5>, 8>({Kind::kFloat8, 5, bucket, false, false, false}, r);
    scalar_wire<Sign, 1>({Kind::kSign, 1, bucket, false, false, false}, r);
  }
}

// ---- error bounds

// The farthest that element x of a bucket may decode from itself, and the largest unit that the bucket may have.
// Slack, all relative: unit has 16 significant bits, rounded up, so it may be 2^-15 too large; a level of up to 255
// is known to a few 2^-24 of itself, less than 2^-13 of a unit; the sum base + unit * level is rounded once, to 2^-24
// of the largest magnitude. Units of denormals are whole multiples of 2^-149.
void error_bounds(const Codec& codec, const std::vector<float>& x) {
  const Trip t(codec, x, bits_of(x[0]));
  const auto n = static_cast<int64_t>(x.size());
  for (int64_t from = 0; from < n; from += codec.bucket_size) {
    const auto begin = static_cast<size_t>(from), end = static_cast<size_t>(std::min(n, from + codec.bucket_size));
    double lo = x[begin], hi = lo, sum = 0.0;
    for (size_t e = begin; e < end; ++e)
      lo = std::min<double>(lo, x[e]), hi = std::max<double>(hi, x[e]), sum += std::fabs(static_cast<double>(x[e]));
    const double largest = std::max(-lo, hi), unit = t.meta(from / codec.bucket_size, 0), quantum = 0x1p-149;
    double ideal = 0.0, slack = largest * 0x1p-24 + quantum;
    const double steps = std::ldexp(1.0, codec.bits) - 1.0;
    switch (codec.kind) {
      case Kind::kMaxMin:
        ideal = (hi - lo) / steps;
        break;
      case Kind::kByteGrad:  // here a level is x / unit, which may be far more than 255
        ideal = (hi - lo) / 255.0;
        slack += largest * 0x1p-21;
        break;
      case Kind::kAbsMax:
        ideal = lo == hi ? largest : largest / (std::ldexp(1.0, codec.bits - 1) - 1.0);
        break;
      case Kind::kFloat8:
        ideal = lo == hi ? largest : largest / (codec.bits == 4 ? 448.0 : 57344.0);
        break;
      default:
        ideal = sum / static_cast<double>(end - begin);
        break;
    }
    const std::string context = cpu::kernels().name + (" " + describe(t.m.layout)) + ", bucket at " +
                                std::to_string(from) + ": " + std::to_string(lo) + " .. " + std::to_string(hi);
    CHECK(unit <= ideal * (1.0 + 0x1p-15 + 0x1p-20) + quantum && unit >= ideal * (1.0 - 0x1p-20), context);
    bool within = true;
    for (size_t e = begin; e < end; ++e) {
      const double error = std::fabs(static_cast<double>(t.out[e]) - static_cast<double>(x[e]));
      double bound = unit * (codec.stochastic ? 1.0 + 0x1p-13 : 0.5 + 0x1p-13);
      if (codec.kind == Kind::kFloat8) {
        const int mantissa = 7 - codec.bits, bias = (1 << (codec.bits - 1)) - 1;
        bound = std::max(std::fabs(static_cast<double>(x[e])) * std::ldexp(1.0 + 0x1p-13, -mantissa - 1),
                         unit * std::ldexp(0.5 + 0x1p-13, 1 - bias - mantissa));
      }
      if (codec.kind == Kind::kSign) {
        within &= std::fabs(static_cast<double>(t.out[e])) == unit &&
                  (x[e] == 0.0f || std::signbit(t.out[e]) == std::signbit(x[e]));
      } else {
        within &= error <= bound + slack;
      }
      const bool keeps_zero =
          codec.kind == Kind::kByteGrad || codec.kind == Kind::kAbsMax || codec.kind == Kind::kFloat8;
      if (keeps_zero && x[e] == 0.0f) within &= t.out[e] == 0.0f;
    }
    CHECK(within, context);
  }
}

void bounds() {
  Random r{13};
  for (const int64_t bucket : {33, 512, 3000}) {
    for (const Codec& codec : codecs(bucket)) {
      if (codec.skip_incomplete || codec.compatible) continue;
      for (const float scale : {0x1p-149f, 0x1p-146f, 0x1p-140f, 0x1p-133f, 0x1p-126f, 1e-30f, 0x1p-60f, 1e-3f, 1.0f,
                                1e10f, 0x1p100f, 1e38f}) {
        for (const float offset : {0.0f, 0.5f, 100.0f}) {
          if (offset * scale > 1e38f) continue;
          std::vector<float> x(static_cast<size_t>(2 * bucket + 5));
          for (float& v : x) v = r.below(20) == 0 ? 0.0f : offset * scale + r.uniform() * scale;
          // Without a zero in it the last bucket shows what a large offset does.
          for (size_t i = static_cast<size_t>(2 * bucket); i < x.size(); ++i)
            x[i] = offset * scale + r.uniform() * scale;
          error_bounds(codec, x);
        }
      }
    }
  }
}

void constants() {
  for (const int64_t bucket : {1, 7, 512, 40000}) {
    for (const Codec& codec : codecs(bucket)) {
      if (codec.compatible) continue;  // Bagua's epsilon gives a constant a range
      for (const float c : {0.0f, -0.0f, 1.0f, -0.1f, 1.0f / 3.0f, 0x1p-149f, -0x1.8p-140f, 1e38f,
                            -std::numeric_limits<float>::max()}) {
        const Trip t(codec, std::vector<float>(static_cast<size_t>(bucket + 3), c));
        CHECK(std::all_of(t.out.begin(), t.out.end(), [&](float v) { return v == c; }),
              describe(t.m.layout) + " " + std::to_string(c));
      }
    }
  }
}

void not_finite() {
  for (const int64_t bucket : {1, 7, 100, 512, 5000, 40000}) {
    for (const Codec& codec : codecs(bucket)) {
      for (const float bad : {kNaN, float_of(0xff800001u), kInf, -kInf}) {
        for (const int64_t at : {bucket, bucket + bucket / 2, 2 * bucket - 1}) {  // in the second of three buckets
          std::vector<float> x(static_cast<size_t>(3 * bucket), 1.0f);
          for (size_t i = 0; i < x.size(); i += 2) x[i] = -0.5f;
          x[static_cast<size_t>(at)] = bad;
          const Trip t(codec, x);
          bool right = true;
          for (int64_t i = 0; i < 3 * bucket; ++i)
            right &= std::isnan(t.out[static_cast<size_t>(i)]) == (i / bucket == 1);
          CHECK(right, describe(t.m.layout) + " " + std::to_string(bad) + " at " + std::to_string(at));
          if (bucket == 40000) break;  // time
        }
      }
    }
  }
}

// The mean over many keys is the number itself: within five standard deviations of it.
void unbiased() {
  const std::vector<float> x = {-1.0f, -0.73f, -0.1f, 0.0f, 0.01f, 0.3f, 0.5f, 0.99f, 1.0f};
  constexpr int kDraws = 4000;
  for (const Codec& codec :
       {Codec{Kind::kMaxMin, 1, 16, true, false, false}, Codec{Kind::kMaxMin, 4, 16, true, false, false},
        Codec{Kind::kCast, 1, 0, true, false, false}, Codec{Kind::kCast, 2, 0, true, false, false}}) {
    std::vector<double> mean(x.size());
    for (int i = 0; i < kDraws; ++i) {
      const Trip t(codec, x, static_cast<uint64_t>(i));
      for (size_t e = 0; e < x.size(); ++e) mean[e] += t.out[e] / static_cast<double>(kDraws);
    }
    const double unit = codec.kind == Kind::kMaxMin ? 2.0 / (std::ldexp(1.0, codec.bits) - 1.0)
                        : codec.bits == 1           ? 0x1p-8
                                                    : 0x1p-11;
    for (size_t e = 0; e < x.size(); ++e)
      CHECK(std::fabs(mean[e] - x[e]) <= 5.0 * 0.5 * unit / std::sqrt(kDraws), std::to_string(x[e]));
  }
}

// Noise belongs to the element: cutting the message differently or adding leaves does not change what is decoded.
void noise_is_the_elements() {
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    Random r{17};
    const std::vector<float> x = numbers(5000, r);
    for (const Codec& codec :
         {Codec{Kind::kMaxMin, 3, 100, true, false, false}, Codec{Kind::kCast, 1, 0, true, false, false}}) {
      const Trip alone(codec, x);
      Message m(codec, {{77, DType::kF32}, {5000, DType::kF32}}, 7, 1, r);
      m.leaves[1] = as_leaf(DType::kF32, x);
      m.ids[1] = alone.m.ids[0];
      m.keys = alone.m.keys;
      const auto out = decode(m.layout, 1, encode(m, one_thread()), one_thread());
      CHECK(same_numbers(DType::kF32, out[1], as_leaf(DType::kF32, alone.out)), isa);
    }
  }
}

// ---- feedback and sums

void feedback() {
  Random r{19};
  auto all = codecs(100);
  for (const Codec& codec : codecs_without_buckets()) all.push_back(codec);
  for (const Codec& codec : all) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Message m(codec, {{2345, dtype}}, 2, 1, r);
      m.residuals.push_back(as_leaf(DType::kF32, numbers(2345, r)));
      const std::vector<float> old = floats(m.residuals[0]);
      std::vector<Memory> apart;
      apart.emplace_back(4 * 2345);
      const Memory payload = encode(m, one_thread(), 0xAB, &apart);
      const Memory again = encode(m, one_thread(), 0xAB, &m.residuals);  // in place
      CHECK(payload == again && apart[0] == m.residuals[0], describe(m.layout));

      // As the receiver decodes it, but not yet rounded to the leaf's dtype. A raw tail travels in that dtype.
      const bool travels_raw = codec.kind == Kind::kRaw || codec.skip_incomplete;
      const Layout wide(codec, {{2345, travels_raw ? dtype : DType::kF32}}, 2);
      const Memory narrow = std::move(decode(wide, 1, payload, one_thread())[0]);
      std::vector<float> decoded(2345), x(2345);
      cpu::kernels().load(wide.leaves[0].dtype, narrow.data(), 2345, decoded.data());
      cpu::kernels().load(dtype, m.leaves[0].data(), 2345, x.data());
      bool right = true;
      for (size_t i = 0; i < x.size(); ++i) {
        const float lost = apart[0].floats()[i], whole = x[i] + old[i];
        if (!std::isfinite(whole - decoded[i])) {
          // With bfloat16 and float16 leaves `decoded` was rounded, and may have overflowed where the encoder's had
          // not.
          right &= bits_of(lost) == bits_of(old[i]) || (travels_raw && dtype != DType::kF32);
        } else {
          // x + residual is rounded once, and what is lost once more; `decoded` in the leaf's dtype once to 2^-8 or
          // 2^-11 of itself, or among float16's denormals to 2^-25.
          const double narrowing = travels_raw && dtype != DType::kF32 ? 0x1p-8 * std::fabs(decoded[i]) + 0x1p-24 : 0.0;
          const double sum = static_cast<double>(x[i]) + old[i],
                       error = std::fabs(static_cast<double>(lost) + decoded[i] - sum);
          right &= error <= 0x1p-24 * (std::fabs(sum) + std::fabs(static_cast<double>(lost))) + narrowing + 0x1p-149;
        }
      }
      CHECK(right, describe(m.layout) + " " + cpu::kernels().name);
    }
  }
}

// reduce against the sum in double precision of what decode gives for each rank.
void sums() {
  Random r{23};
  auto all = codecs(100);
  for (const Codec& codec : codecs_without_buckets()) all.push_back(codec);
  for (const Codec& codec : all) {
    for (const int64_t ranks : {1, 2, 5, 18}) {
      for (const int32_t own : {-1, 0, static_cast<int32_t>(ranks) - 1}) {
        const float divisor = own == 0 ? 1.0f : static_cast<float>(ranks);
        std::vector<Message> m;
        std::vector<Memory> payloads;
        std::vector<double> expected(777);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          m.emplace_back(codec, std::vector<Leaf>{{777, DType::kF32}}, 1, 1, r);
          for (int i = 0; i < 777; ++i) m.back().leaves[0].floats()[i] = r.uniform();
          payloads.push_back(encode(m.back(), one_thread()));
          const auto out = decode(m.back().layout, 1, payloads.back(), one_thread());
          const float* counted = rank == own ? m.back().leaves[0].floats() : out[0].floats();
          for (size_t i = 0; i < 777; ++i) {
            expected[i] += counted[i];
          }
        }
        const std::vector<int32_t> where = {0, own};
        const Memory gathered = gather(m[0].layout, 1, payloads, where);
        const Sum sum{m[static_cast<size_t>(std::max(own, 0))], ranks, gathered, where, divisor};
        const std::vector<float> got = floats(sum.leaves(one_thread())[0]);
        bool right = true;
        // At most 2 * ranks + 1 roundings of sums of bases and ranges, each of which is under 4 * ranks.
        const auto count = static_cast<double>(ranks), bound = 4.0 * count * (2.0 * count + 1.0) * 0x1p-24;
        for (size_t i = 0; i < 777; ++i)
          right &= std::fabs(got[i] - expected[i] / divisor) <= bound / divisor + 0x1p-24 * std::fabs(got[i]);
        CHECK(right, describe(m[0].layout));

        // Encoded, it is the payload that encoding this sum gives.
        Message summed(codec, {{777, DType::kF32}}, 1, 1, r);
        summed.leaves[0] = as_leaf(DType::kF32, got);
        summed.ids = sum.own.ids, summed.keys = sum.own.keys;
        CHECK(sum.payload(one_thread()) == encode(summed, one_thread()), describe(m[0].layout));
      }
    }
  }
}

// Encoded with feedback, a sum takes in the residual and is encoded as any other numbers; exactly what that loses is
// left of the residual, and nothing of a residual changes that belongs to another chunk.
void sums_with_feedback() {
  Random r{31};
  auto all = codecs(100);
  for (const Codec& codec : codecs_without_buckets()) all.push_back(codec);
  for (const Codec& codec : all) {
    for (const float divisor : {1.0f, 2.0f, 3.0f}) {
      for (const int64_t chunks : {1, 3}) {
        const std::vector<Leaf> shapes{{777, DType::kF32}, {64, DType::kBF16}};
        std::vector<Message> m;
        std::vector<Memory> payloads;
        for (int rank = 0; rank < 2; ++rank) {
          m.emplace_back(codec, shapes, chunks, 1, r);
          for (int i = 0; i < 777; ++i) m.back().leaves[0].floats()[i] = i == 700 ? kInf : r.uniform();
          payloads.push_back(encode(m.back(), one_thread()));
        }
        const Layout& l = m[0].layout;
        const std::vector<int32_t> where = {static_cast<int32_t>(chunks) - 1, -1};
        const Memory gathered = gather(l, 1, payloads, where);
        std::vector<Memory> old;
        for (const Leaf& leaf : shapes) {
          std::vector<float> x;
          for (int64_t i = 0; i < leaf.size; ++i) x.push_back(r.uniform());
          old.push_back(as_leaf(DType::kF32, x));
        }
        const std::vector<Memory> lost = copies(old);
        const Memory payload = Sum{m[0], 2, gathered, where, divisor}.payload(one_thread(), 0xAB, &lost);
        if (chunks > 1) {
          for (const Piece& p : l.pieces) {
            if (p.chunk == where[0]) continue;
            const auto i = static_cast<size_t>(p.leaf), at = static_cast<size_t>(p.start),
                       n = static_cast<size_t>(p.coded + p.raw);
            CHECK(std::memcmp(lost[i].floats() + at, old[i].floats() + at, 4 * n) == 0, describe(l));
          }
          continue;
        }
        const std::vector<float> total = floats(Sum{m[0], 2, gathered, where, 1.0f}.leaves(one_thread())[0]);
        std::vector<float> whole(777), quotient(777);
        for (size_t i = 0; i < 777; ++i) whole[i] = total[i] + old[0].floats()[i], quotient[i] = whole[i] / divisor;
        Message summed(codec, {{777, DType::kF32}}, 1, 1, r);
        summed.leaves[0] = as_leaf(DType::kF32, quotient);
        summed.ids = m[0].ids, summed.keys = m[0].keys;
        const std::vector<float> decoded =
            floats(decode(summed.layout, 1, encode(summed, one_thread()), one_thread())[0]);
        const Memory received = std::move(decode(l, 1, payload, one_thread())[0]);
        CHECK(same_numbers(DType::kF32, received, as_leaf(DType::kF32, decoded)), describe(l));
        bool right = true;
        for (size_t i = 0; i < 777; ++i) {
          const float product = divisor * decoded[i], expected = whole[i] - product;
          right &= bits_of(lost[0].floats()[i]) == bits_of(std::isfinite(expected) ? expected : old[0].floats()[i]);
        }
        CHECK(right, describe(l));
      }
    }
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
  noise_is_the_elements();
  // Instruction sets that agree (test_kernels) need these only once, and portable code is slow when instrumented.
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    noise_kernel();
    halves<DType::kBF16>(bfloat16);
    halves<DType::kF16>(float16);
    float8<4>();
    float8<5>();
    scalar_codecs();
  }
  bounds();
  constants();
  not_finite();
  unbiased();
  feedback();
  sums();
  sums_with_feedback();
  return finish();
}
