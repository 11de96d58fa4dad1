// Any bytes of the right length decode, without an access outside of the buffers.
//   fuzz_decode [rounds] [seed]
#include "check.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

Codec any_codec(Random& r) {
  if (r.below(3) == 0) return r.one_of(r.below(2) == 0 ? sparse_codecs(true) : codecs_without_buckets());
  if (r.below(8) == 0) return r.one_of(rotated_codecs(kBlock << r.below(3)));
  return r.one_of(codecs(1 + r.below(int64_t{1} << r.below(13))));
}

void fill(uint8_t* p, uint8_t* end, Random& r) {
  // Bytes are often extremes: NaNs, infinities, denormals, the largest numbers.
  const bool extreme = r.below(2) == 0;
  for (; p < end; ++p)
    *p = extreme && r.below(2) == 0 ? r.pick({uint8_t{0}, uint8_t{0x7f}, uint8_t{0x80}, uint8_t{0xff}, uint8_t{1}})
                                    : static_cast<uint8_t>(r.next());
}

struct Results {
  std::vector<Memory> leaves, sum_leaves;
  Memory sum;
  std::vector<Memory> residuals;
  std::vector<Memory> cleared;  // of TopK
};

void round(Random& r, bool guarded) {
  std::vector<Leaf> shapes;
  for (int64_t k = r.below(4); k >= 0; --k) shapes.push_back({r.below(int64_t{1} << r.below(13)), r.pick(kDTypes)});
  const int64_t chunks = 1 + r.below(r.below(2) == 0 ? 1 : 7), batch = 1 + r.below(3), ranks = 1 + r.below(3);
  const Message m(any_codec(r), shapes, chunks, batch, r, guarded);
  const Layout& l = m.layout;
  const bool own = r.below(2) == 0;
  const std::vector<int32_t> where = any_chunks(m, ranks, own, r);
  std::vector<Memory> residuals;
  if (r.below(2) == 0) {
    for (const Leaf& leaf : shapes) residuals.push_back(as_leaf(DType::kF32, numbers(batch * leaf.size, r), guarded));
  }
  const auto run = [&](const Memory& payload, const Memory& payloads) {
    const Sum sum{m, ranks, payloads, where, 3.0f};
    auto leaves = decode(l, batch, payload, one_thread(), 0xAB, guarded);
    auto sum_leaves = chunks == 1 ? sum.leaves(one_thread(), 0xAB, guarded) : std::vector<Memory>();
    auto lost = copies(residuals);
    auto sum_payload = sum.payload(one_thread(), 0xAB, residuals.empty() ? nullptr : &lost, guarded);
    auto cleared = copies(m.leaves);
    if (is_sparse(l.codec.kind)) cpu::clear({l, batch, payload.data(), pointers<void>(cleared).data()}, one_thread());
    return Results{std::move(leaves), std::move(sum_leaves), std::move(sum_payload), std::move(lost),
                   std::move(cleared)};
  };
  const auto same = [&](const Results& a, const Results& b, const std::string& context) {
    CHECK(same_sums(l, where, a.sum, b.sum), context);  // raw elements keep their NaNs
    for (size_t i = 0; i < shapes.size(); ++i) {
      CHECK(same_numbers(shapes[i].dtype, a.leaves[i], b.leaves[i]), context);
      CHECK(a.cleared[i] == b.cleared[i], context);
      if (chunks == 1) CHECK(same_numbers(DType::kF32, a.sum_leaves[i], b.sum_leaves[i]), context);
      if (!residuals.empty()) CHECK(same_numbers(DType::kF32, a.residuals[i], b.residuals[i]), context);
    }
  };

  // Arbitrary metadata: unit * value may need rounding, and the result depends on whether the addition is fused with
  // it. So only instruction sets that fuse are compared: all except the portable code.
  Memory payload(batch * chunks * l.chunk_bytes, 0, guarded), payloads(batch * ranks * l.chunk_bytes, 0, guarded);
  fill(payload.data(), payload.data() + payload.size(), r);
  fill(payloads.data(), payloads.data() + payloads.size(), r);
  std::vector<Results> fused;
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    Results got = run(payload, payloads);
    if (std::string(isa) != "portable") fused.push_back(std::move(got));
  }
  if (fused.size() == 2) same(fused[0], fused[1], "arbitrary " + describe(l));

  // Metadata as encoders make it, and arbitrary codes: all instruction sets agree.
  const auto keep_metadata = [&](uint8_t* to, const uint8_t* from, int64_t c) {
    const auto n = static_cast<size_t>(l.meta_end[static_cast<size_t>(c)]);
    std::memcpy(to, from, n);
    // The unit of a constant bucket has 24 bits and may be the largest number, because only level 1 is used. Here all
    // levels are used, so the unit gets 16 bits, as in other buckets, and is less than 2.
    if (l.codec.kind == Kind::kAbsMax) {
      for (size_t i = 0; i < n; i += 4) to[i] = 0, to[i + 3] &= 0xbf;
    }
  };
  const Memory encoded = encode(m, one_thread(), 0xAB, nullptr, guarded);
  for (int64_t row = 0; row < batch; ++row) {
    const auto at = [&](int64_t c) { return (row * chunks + c) * l.chunk_bytes; };
    for (int64_t c = 0; c < chunks; ++c) keep_metadata(payload.data() + at(c), encoded.data() + at(c), c);
    const int64_t c = where[static_cast<size_t>(2 * row)];
    for (int64_t rank = 0; rank < ranks; ++rank)
      keep_metadata(payloads.data() + (row * ranks + rank) * l.chunk_bytes, encoded.data() + at(c), c);
  }
  cpu::select_kernels("portable");
  const Results expected = run(payload, payloads);
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    same(run(payload, payloads), expected, std::string(isa) + " " + describe(l));
    CHECK(encode(m, one_thread(), 0x54, nullptr, guarded) == encoded, isa);
  }
}

}  // namespace
}  // namespace jaxcgx::test

int main(int argc, char** argv) {
  using namespace jaxcgx::test;
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : everything() ? 800 : 400;
  Random r{argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1};
  // Heap and guard pages take turns. The heap also detects accesses before a buffer, guard pages those of masked
  // vectors.
  for (int64_t i = 0; i < rounds; ++i) round(r, i % 2 == 1);
  return finish();
}
