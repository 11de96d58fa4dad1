// Feedback and sums of payloads, against encode, decode and double precision.
#include <algorithm>
#include <limits>

#include "check.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

void feedback() {
  Random r{19};
  auto all = codecs(100);
  for (const Codec& codec : rotated_codecs(256)) all.push_back(codec);
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

      // The leaf as the receiver decodes it, before rounding to the leaf's dtype. A raw tail has that dtype on the
      // wire.
      const bool travels_raw = is_raw(codec.kind) || is_lossless(codec.kind) || codec.skip_incomplete;
      const Layout wide(codec, {{2345, travels_raw ? dtype : DType::kF32}}, 2);
      const Memory narrow = std::move(decode(wide, 1, payload, one_thread())[0]);
      std::vector<float> decoded(2345), x(2345);
      cpu::kernels().load(wide.leaves[0].dtype, narrow.data(), 2345, decoded.data());
      cpu::kernels().load(dtype, m.leaves[0].data(), 2345, x.data());
      bool right = true;
      for (size_t i = 0; i < x.size(); ++i) {
        const float lost = apart[0].floats()[i], whole = x[i] + old[i];
        if (!std::isfinite(whole - decoded[i])) {
          // `decoded` of bfloat16 and float16 leaves was rounded. It may have overflowed even if the encoder's sum had
          // not.
          right &= bits_of(lost) == bits_of(old[i]) || (travels_raw && dtype != DType::kF32);
        } else {
          // x + residual is rounded once, and its error once more. `decoded` in the leaf's dtype is rounded to 2^-8 or
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

// Compares reduce with the sum of each rank's decoded numbers in double precision.
void sums() {
  Random r{23};
  auto all = codecs(100);
  for (const Codec& codec : rotated_codecs(256)) all.push_back(codec);
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
        // At most 2 * ranks + 1 roundings of sums of bases and ranges, each of which is below 4 * ranks.
        const auto count = static_cast<double>(ranks), bound = 4.0 * count * (2.0 * count + 1.0) * 0x1p-24;
        for (size_t i = 0; i < 777; ++i)
          right &= std::fabs(got[i] - expected[i] / divisor) <= bound / divisor + 0x1p-24 * std::fabs(got[i]);
        CHECK(right, describe(m[0].layout));

        // The encoded result is the payload that encoding this sum gives.
        Message summed(codec, {{777, DType::kF32}}, 1, 1, r);
        summed.leaves[0] = as_leaf(DType::kF32, got);
        summed.ids = sum.own.ids, summed.keys = sum.own.keys;
        CHECK(sum.payload(one_thread()) == encode(summed, one_thread()), describe(m[0].layout));
      }
    }
  }
}

// With feedback, the residual is added to a sum before it is encoded, and the new residual is exactly the error.
// Residuals of other chunks don't change.
void sums_with_feedback() {
  Random r{31};
  auto all = codecs(100);
  for (const Codec& codec : rotated_codecs(256)) all.push_back(codec);
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
  using namespace jaxcgx::test;
  feedback();
  sums();
  sums_with_feedback();
  return finish();
}
