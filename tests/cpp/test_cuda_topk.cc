// TopK's CUDA kernels, run on the CPU by cuda_emulator/, give the bytes of the CPU kernels, write all of them and touch
// nothing else.
#include "cuda_message.h"

namespace jaxcgx::test {
namespace {

constexpr Codec kRaw{Kind::kRaw};
constexpr Select kSelections[] = {Select::kExact, Select::kQuantile, Select::kExponential};

// Messages of several leaves, chunks, rows and ranks; values in codecs of every kind of kernel.
void every_selection() {
  Random r{1};
  const Codec values[] = {kRaw,
                          {Kind::kMaxMin, 4, 64},
                          {Kind::kMaxMin, 3, 128, true},
                          {Kind::kCast, 1, 0},
                          {Kind::kByteGrad},
                          {Kind::kMaxMin, 5, 33, true, true}};
  for (int turn = 0; turn < 12; ++turn) {
    Codec c =
        topk(r.pick({0.0, 0.003, 0.02, 0.06, 0.3, 0.7, 1.0}), kSelections[turn % 3], values[turn % 6], r.below(3) == 0);
    c.sparse.share = r.pick({0.002, 0.1, 1.0});
    c.sparse.lower = r.pick({0.5, 0.9, 1.0});
    c.sparse.refinements = r.pick({0, 3, 100});
    Case k{c, {{r.below(3000), r.pick(kDTypes)}, {r.below(90), r.pick(kDTypes)}, {r.below(700), r.pick(kDTypes)}}};
    k.chunks = r.pick({1, 1, 2, 3});
    k.batch = 1 + (r.below(4) == 0);
    k.ranks = 1 + r.below(3);
    k.feedback = turn % 4 != 0;
    k.shift = r.below(3);
    compare(k, r);
  }
}

// More segments than a block has, lists of several stretches, samples and value buckets that several blocks share.
void large() {
  Random r{2};
  compare({topk(0.02, Select::kExact, {Kind::kMaxMin, 4, 512}), {{34000, DType::kF32}}, 1, 1, 2, false, 0}, r);
  Codec c = topk(0.45, Select::kQuantile, {Kind::kByteGrad});
  c.sparse.share = 1.0;
  compare({c, {{19000, DType::kBF16}}, 1, 1, 1, true, 0}, r);
  c.sparse.ratio = 0.01, c.sparse.select = Select::kExponential;
  compare({c, {{10000, DType::kF32}}, 1, 1, 1, false, 0}, r);
}

// Pieces whose sample misleads, and equal magnitudes: the bytes are those of the CPU.
void misleading() {
  Random r{3};
  const auto encoded = [&](const Codec& c, auto number, int64_t n = 5000) {
    Message m(c, {{n, DType::kF32}}, 1, 1, r);
    for (int64_t i = 0; i < n; ++i) m.leaves[0].floats()[i] = number(i);
    compare_encoded(m);
  };
  for (const Select select : kSelections) {
    Codec c = topk(0.02, select, kRaw);
    c.sparse.share = 0.04, c.sparse.lower = 0.9, c.sparse.refinements = 20;
    encoded(c, [&](int64_t i) {
      return i % 25 == 3 ? r.uniform() : 1e-3f * r.uniform();
    });  // a stride may have this period
    encoded(c, [&](int64_t i) { return i < 80 ? 3.0f * r.uniform() : 1e-5f * r.uniform(); });
    encoded(c, [&](int64_t i) { return i % 3 == 0 ? -0.5f : 0.5f; });
    encoded(c, [&](int64_t i) { return i % 200 == 0 ? 1e-44f * static_cast<float>(i / 200) : 0.0f; });
  }
  // More equal magnitudes than a thread block's list has room for.
  encoded(topk(0.1, Select::kExact, kRaw), [&](int64_t i) { return i % 6 == 0 ? 0.5f : 0.4f * r.uniform(); }, 34000);
}

// Lists that no encoder writes: runs of ones that cross from one stretch into the next, with unordered indices.
void any_list() {
  Random r{4};
  const Layout l(topk(0.1, Select::kExact, kRaw), {{20000, DType::kF32}}, 1);
  for (const int64_t zeros : {0, 1000, 3}) {
    Memory payload(l.chunk_bytes, 0xff);
    const auto bits = IndexList(20000, 2000).bits;
    for (size_t i = static_cast<size_t>(bitmap_bytes(bits)); i < payload.size(); ++i)
      payload.data()[i] = static_cast<uint8_t>(r.next());
    for (int64_t i = 0; zeros > 0 && i < bits / 8; i += zeros) payload.data()[i] = 0x6d;
    const std::vector<Memory> right = decode(l, 1, payload, one_thread());
    const Memory out(20000 * 4, 0x54), work(cuda::workspace_bytes(l, 1, 1, false));
    void* leaf = out.data();
    run(cuda::decode, {l, 1, payload.data(), &leaf, work.data()});
    CHECK(out == right[0], "zeros " + std::to_string(zeros));
  }
}

// An out-of-range chunk or own rank yields NaN everywhere and keeps the residuals.
void nowhere() {
  Random r{5};
  const Message m(topk(0.1, Select::kExact, kRaw), {{1000, DType::kF32}}, 2, 1, r);
  const Layout &l = m.layout, sum = of_sum(l, 2);
  const auto own = pointers<const void>(m.leaves);
  for (const bool rank : {false, true}) {
    const Memory payloads(2 * l.chunk_bytes, 0), old = as_leaf(DType::kF32, std::vector<float>(1000, 0.25f)),
                                                 residual = old.copy();
    const Memory payload(sum.chunk_bytes, 0x54), work(cuda::workspace_bytes(l, 1, 2, true), 0x54);
    const int32_t where[2] = {rank ? 1 : 2, rank ? 7 : 0};
    float* const residuals[1] = {residual.floats()};
    run(cuda::reduce, {l, 1, 2, payloads.data(), where, rank ? own.data() : nullptr, 1.0f, nullptr, payload.data(),
                       residuals, m.ids.data(), m.keys.data(), work.data()});
    CHECK(residual == old, "residuals");
    Memory message(2 * sum.chunk_bytes, 0);
    std::memcpy(message.data() + (rank ? sum.chunk_bytes : 0), payload.data(), payload.size());
    const std::vector<Memory> decoded = decode(sum, 1, message, one_thread());
    const Piece& p = sum.pieces[rank ? 1 : 0];
    const int64_t k = capacity(sum.codec.sparse, p.coded);
    for (int64_t i = 0; i < p.coded; ++i)
      CHECK(std::isnan(decoded[0].floats()[p.start + i]) == (i < k), std::to_string(i));
  }
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  nowhere();
  any_list();
  misleading();
  every_selection();
  large();
  return finish();
}
