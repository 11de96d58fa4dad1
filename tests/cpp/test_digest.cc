// The bytes of random messages of all codecs, encoded, decoded and summed, are those that they have always been. This
// test needs no Python, so it also runs where there is only a compiler, or in QEMU's emulation of another processor.
#include "check.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

struct Digest {  // FNV-1a
  uint64_t value = 1469598103934665603u;

  void add(const Memory& m) {
    for (size_t i = 0; i < m.size(); ++i) value = (value ^ m.data()[i]) * 1099511628211u;
  }
  // All NaNs count as one, because the processor chooses their bits.
  void add_floats(const Memory& m) {
    Memory same = m.copy();
    for (size_t i = 0; i < m.size() / sizeof(float); ++i) {
      if (std::isnan(same.floats()[i])) same.floats()[i] = 0.0f;
    }
    add(same);
  }
};

Codec any_codec(int round, Random& r) {
  return r.one_of(round % 4 == 0   ? codecs(1 + r.below(int64_t{1} << r.below(13)))
                  : round % 4 == 1 ? rotated_codecs(kBlock << r.below(3))
                  : round % 4 == 2 ? codecs_without_buckets()
                                   : sparse_codecs(true));
}

uint64_t digest_of(int rounds) {
  Random r{42};
  Digest digest;
  for (int round = 0; round < rounds; ++round) {
    const Codec codec = any_codec(round, r);
    std::vector<Leaf> shapes;
    for (int64_t k = r.below(3); k >= 0; --k) shapes.push_back({r.below(int64_t{1} << r.below(13)), r.pick(kDTypes)});
    const int64_t chunks = 1 + r.below(3), batch = 1 + r.below(2);
    const Message m(codec, shapes, chunks, batch, r);
    std::vector<Memory> residuals;
    if (r.below(2) == 0) {
      for (const Leaf& leaf : shapes) residuals.push_back(as_leaf(DType::kF32, numbers(batch * leaf.size, r)));
    }
    const auto* const fed = residuals.empty() ? nullptr : &residuals;
    const Memory payload = encode(m, one_thread(), 0xAB, fed);
    digest.add(payload);
    for (const Memory& left : residuals) digest.add_floats(left);
    const std::vector<Memory> leaves = decode(m.layout, batch, payload, one_thread(), 0xAB);
    for (size_t k = 0; k < leaves.size(); ++k) {
      if (shapes[k].dtype == DType::kF32)
        digest.add_floats(leaves[k]);
      else
        digest.add(leaves[k]);
    }
    const std::vector<int32_t> where = any_chunks(m, 2, false, r);
    std::vector<Memory> messages;
    messages.push_back(payload.copy());
    messages.push_back(payload.copy());
    const Memory payloads = gather(m.layout, batch, messages, where);
    const Sum sum{m, 2, payloads, where, 3.0f};
    digest.add(sum.payload(one_thread(), 0xAB, fed));
    for (const Memory& left : residuals) digest.add_floats(left);
  }
  return digest.value;
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  for (const char* isa : kIsas) {
    if (!jaxcgx::cpu::select_kernels(isa)) continue;
    const uint64_t digest = digest_of(100);
    CHECK(digest == 0x6e0fa06387171f99u, std::string(isa) + ": " + std::to_string(digest));
  }
  return finish();
}
