// The guarantees of the wire format: error bounds, exact constants, NaNs, unbiased noise.
#include <algorithm>
#include <limits>

#include "check.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

std::string spell(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

// Checks the error of each element and the unit of each bucket. The slack is relative: unit has 16 significant bits,
// rounded up, so it may be 2^-15 too large; a level of up to 255 has an error of a few 2^-24 of itself, less than 2^-13
// of a unit; the sum base + unit * level is rounded once, to 2^-24 of the largest magnitude. Units of denormals are
// whole multiples of 2^-149.
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
      case Kind::kSign:
        ideal = sum / static_cast<double>(end - begin);
        break;
      case Kind::kRaw:  // these have no buckets
      case Kind::kCast:
      case Kind::kTopK:
      case Kind::kLossless:
      case Kind::kEden:  // bounds() leaves these out
      case Kind::kMicro:
        return;
    }
    const std::string context = cpu::kernels().name + (" " + describe(t.m.layout)) + ", bucket at " +
                                std::to_string(from) + ": " + spell(lo) + " .. " + spell(hi) + ", unit " + spell(unit) +
                                ", ideal unit " + spell(ideal);
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
      if (codec.skip_incomplete || codec.compatible || traits_of(codec.kind).scales || is_rotated(codec)) continue;
      for (const float scale : {0x1p-149f, 0x1p-146f, 0x1p-140f, 0x1p-133f, 0x1p-126f, 1e-30f, 0x1p-60f, 1e-3f, 1.0f,
                                1e10f, 0x1p100f, 1e38f}) {
        for (const float offset : {0.0f, 0.5f, 100.0f}) {
          if (offset * scale > 1e38f) continue;
          std::vector<float> x(static_cast<size_t>(2 * bucket + 5));
          for (float& v : x) v = r.below(20) == 0 ? 0.0f : offset * scale + r.uniform() * scale;
          // The last bucket has no zero, so a large offset matters there.
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
      if (traits_of(codec.kind).scales || is_rotated(codec)) continue;  // they can't be exact
      if (codec.compatible) continue;                                   // Bagua's epsilon gives a constant a range
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
      if (meta_floats(codec) == 0) continue;  // the only bucket is a block
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
          if (bucket == 40000) break;  // to save time
        }
      }
    }
  }
}

// The mean over many keys is within five standard deviations of the number.
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

// Noise belongs to the element. The decoded numbers don't depend on the cuts of the message or on other leaves.
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

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  noise_is_the_elements();
  bounds();
  constants();
  not_finite();
  unbiased();
  return finish();
}
