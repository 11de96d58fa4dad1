// Runs the CUDA kernels on the CPU by cuda_emulator/, and compares them with the CPU kernels.
#pragma once

#include <algorithm>

#include "check.h"
#include "cpu/kernels.h"
#include "cuda/cuda.h"
#include "message.h"

namespace jaxcgx::test {

// Copies that begin `elements` elements after a multiple of 64 bytes and end with their memory.
class Shifted {
 public:
  Shifted(const std::vector<Memory>& from, const std::vector<int64_t>& sizes, int64_t elements) {
    for (size_t i = 0; i < from.size(); ++i) {
      const int64_t shift = elements * sizes[i];
      memory_.emplace_back(static_cast<int64_t>(from[i].size()) + shift, uint8_t{0xCD});
      at_.push_back(memory_.back().data() + shift);
      if (from[i].size() > 0) std::memcpy(at_.back(), from[i].data(), from[i].size());
    }
  }
  template <class T>
  std::vector<T*> pointers() const {
    std::vector<T*> p;
    for (uint8_t* at : at_) p.push_back(reinterpret_cast<T*>(at));
    return p;
  }
  Memory copy(size_t i) const {
    const auto size = static_cast<int64_t>(memory_[i].size()) - (at_[i] - memory_[i].data());
    Memory m(size);
    if (size > 0) std::memcpy(m.data(), at_[i], static_cast<size_t>(size));
    return m;
  }

 private:
  std::vector<Memory> memory_;
  std::vector<uint8_t*> at_;
};

inline void check(const cuda::Status& s) { CHECK(s.call == nullptr, s.call == nullptr ? "" : s.call); }

// Loads the kernels of an operation, as before a program begins, then runs it. Emulators launch no others.
template <class Args>
void run(cuda::Status (*operation)(const Args&, cudaStream_t), const std::common_type_t<Args>& args) {
  CHECK(cudaDeviceReset() == cudaSuccess, "cudaDeviceReset");
  {
    const cuda::Loading loading;
    check(cuda::run(operation, args, nullptr));
  }
  check(cuda::run(operation, args, nullptr));
}

// Encodes a message of one row, whose bytes must be those of the CPU. Returns the workspace as it was left.
inline Memory compare_encoded(const Message& m) {
  const Layout& l = m.layout;
  const Memory payload(l.chunk_bytes, 0x54);
  Memory work(cuda::workspace_bytes(l, 1, 0, true));
  const auto leaves = pointers<const void>(m.leaves);
  run(cuda::encode, {l, 1, leaves.data(), m.ids.data(), m.keys.data(), nullptr, nullptr, payload.data(), work.data()});
  CHECK(payload == encode(m, one_thread()), describe(l));
  return work;
}

struct Case {
  Codec codec;
  std::vector<Leaf> shapes;
  int64_t chunks = 1, batch = 1, ranks = 2;
  bool feedback = false;
  int64_t shift = 0;   // elements from an aligned address to the begin of a leaf
  bool alike = false;  // numbers of a similar size. Of others, a large bucket nearly always has a NaN
};

// Numbers below 2^7 in magnitude, all of a similar size or, rarely, all very large or very small. The largest one may
// be anywhere, or at either end.
inline std::vector<float> similar_numbers(int64_t n, Random& r) {
  const float scale =
      r.below(8) == 0 ? r.pick({0x1p110f, 0x1p-140f}) : std::ldexp(1.0f, static_cast<int>(r.below(16)) - 10);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = r.below(50) == 0 ? r.pick({0.0f, -0.0f}) : r.uniform() * scale;
  if (n > 0) x[static_cast<size_t>(r.pick({int64_t{0}, n - 1, r.below(n)}))] *= 4;
  if (n > 0) x[static_cast<size_t>(r.pick({int64_t{0}, n - 1, r.below(n)}))] *= -4;
  return x;
}

inline Message message_of(const Case& k, Random& r) {
  Message m(k.codec, k.shapes, k.chunks, k.batch, r);
  for (size_t i = 0; k.alike && i < k.shapes.size(); ++i)
    m.leaves[i] = as_leaf(k.shapes[i].dtype, similar_numbers(k.batch * k.shapes[i].size, r));
  return m;
}

inline void compare(const Case& k, Random& r) {
  Message m = message_of(k, r);
  const Layout& l = m.layout;
  const std::string context = describe(l) + " batch " + std::to_string(k.batch) + " shift " + std::to_string(k.shift) +
                              (k.feedback ? " feedback" : "");
  std::vector<int64_t> sizes, fours(k.shapes.size(), 4);
  for (const Leaf& leaf : k.shapes) sizes.push_back(size_of(leaf.dtype));
  if (k.feedback) {
    for (const Leaf& leaf : k.shapes) {
      const int64_t size = k.batch * leaf.size;
      m.residuals.push_back(as_leaf(DType::kF32, k.alike ? similar_numbers(size, r) : numbers(size, r)));
    }
  }
  const auto work = [&](int64_t payloads, bool encodes) {
    return Memory(cuda::workspace_bytes(l, k.batch, payloads, encodes));
  };
  const auto garbage = [&](DType* as) {
    std::vector<Memory> v;
    for (const Leaf& leaf : k.shapes)
      v.emplace_back(k.batch * leaf.size * size_of(as ? *as : leaf.dtype), uint8_t{0x54});
    return v;
  };
  DType f32 = DType::kF32;

  const Shifted leaves(m.leaves, sizes, k.shift), old(m.residuals, fours, k.shift);
  const bool in_place = r.below(2) == 0;
  std::vector<Memory> lost = k.feedback ? garbage(&f32) : std::vector<Memory>();
  const Shifted apart(lost, fours, k.shift);
  const auto& results = in_place ? old : apart;
  const Memory expected = encode(m, one_thread(), 0xAB, k.feedback ? &lost : nullptr);
  const Memory payload(static_cast<int64_t>(expected.size()), 0x54);
  run(cuda::encode, {l, k.batch, leaves.pointers<const void>().data(), m.ids.data(), m.keys.data(),
                     k.feedback ? old.pointers<const float>().data() : nullptr,
                     k.feedback ? results.pointers<float>().data() : nullptr, payload.data(), work(0, true).data()});
  // Raw elements with feedback may be the NaN of a sum.
  const auto same_raw = [&] {
    if (!is_lossless(k.codec.kind))
      return (is_raw(k.codec.kind) || k.codec.skip_incomplete) && same_numbers(DType::kF32, payload, expected);
    const std::vector<Memory> a = decode(l, k.batch, payload, one_thread()),
                              b = decode(l, k.batch, expected, one_thread());
    bool same = true;
    for (size_t i = 0; i < a.size(); ++i) same &= same_numbers(k.shapes[i].dtype, a[i], b[i]);
    return same;
  };
  CHECK(payload == expected || (k.feedback && same_raw()), context);
  for (size_t i = 0; i < lost.size(); ++i) {
    CHECK(same_numbers(DType::kF32, results.copy(i), lost[i]), context + " in place " + std::to_string(in_place));
  }

  const auto compare_decoded = [&](const Memory& from, const char* what) {
    const std::vector<Memory> right = decode(l, k.batch, from, one_thread());
    const Shifted out(garbage(nullptr), sizes, k.shift);
    run(cuda::decode, {l, k.batch, from.data(), out.pointers<void>().data(), work(1, false).data()});
    for (size_t i = 0; i < right.size(); ++i)
      CHECK(same_numbers(k.shapes[i].dtype, out.copy(i), right[i]), what + context);
    if (!is_sparse(k.codec.kind)) return;
    const std::vector<Memory> cleared = copies(m.leaves);
    const Shifted clear(m.leaves, sizes, k.shift);
    cpu::clear({l, k.batch, from.data(), pointers<void>(cleared).data()}, one_thread());
    run(cuda::clear, {l, k.batch, from.data(), clear.pointers<void>().data(), work(1, false).data()});
    for (size_t i = 0; i < cleared.size(); ++i) CHECK(clear.copy(i) == cleared[i], "clear " + (what + context));
  };
  compare_decoded(expected, "decode ");
  // Any bytes decode. Products that are not exact are rounded once, as in AVX2's kernels.
  const char* const best = cpu::kernels().name;
  if (cpu::select_kernels("avx2")) {
    Memory any = expected.copy();
    for (size_t i = 0; i < any.size(); ++i)
      any.data()[i] = r.below(4) == 0 ? uint8_t{0x7f} : static_cast<uint8_t>(r.next());
    compare_decoded(any, "decode any bytes ");
    cpu::select_kernels(best);
  }

  std::vector<Memory> messages;
  messages.push_back(expected.copy());
  for (int64_t i = 1; i < k.ranks; ++i) messages.push_back(encode(message_of(k, r), one_thread()));
  const bool own = r.below(2) == 0;
  const std::vector<int32_t> where = any_chunks(m, k.ranks, own, r);
  const Memory payloads = gather(l, k.batch, messages, where);
  const float divisor = r.pick({1.0f, 3.0f, 8.0f, 7.0f});
  const Sum sum{m, k.ranks, payloads, where, divisor};
  const auto ranks = " ranks " + std::to_string(k.ranks) + " divisor " + std::to_string(divisor) + (own ? " own" : "");
  const auto own_leaves = leaves.pointers<const void>();
  const auto reduce = [&](float* const* to, uint8_t* to_payload, float* const* residuals) {
    run(cuda::reduce,
        {l, k.batch, k.ranks, payloads.data(), where.data(), own ? own_leaves.data() : nullptr, divisor, to, to_payload,
         residuals, m.ids.data(), m.keys.data(), work(k.ranks, to_payload != nullptr).data()});
  };
  const Memory reduced(k.batch * of_sum(l, k.ranks).chunk_bytes, 0x54);
  lost = copies(m.residuals);
  const Shifted sum_lost(lost, fours, k.shift);
  reduce(nullptr, reduced.data(), k.feedback ? sum_lost.pointers<float>().data() : nullptr);
  // Raw elements may be the NaN of a sum, whose bits the processor chooses.
  CHECK(same_sums(of_sum(l, k.ranks), where, reduced, sum.payload(one_thread(), 0xAB, k.feedback ? &lost : nullptr)),
        "reduce " + context + ranks);
  for (size_t i = 0; i < lost.size(); ++i)
    CHECK(same_numbers(DType::kF32, sum_lost.copy(i), lost[i]), "reduce " + context + ranks);
  if (k.chunks > 1) return;
  const std::vector<Memory> right = sum.leaves(one_thread());
  const Shifted out(garbage(&f32), fours, k.shift);
  reduce(out.pointers<float>().data(), nullptr, nullptr);
  for (size_t i = 0; i < right.size(); ++i)
    CHECK(same_numbers(DType::kF32, out.copy(i), right[i]), "sum " + context + ranks);
}

}  // namespace jaxcgx::test
