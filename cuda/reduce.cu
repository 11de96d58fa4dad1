#include <cmath>

#include "cuda/decode_sum.cuh"
#include "cuda/encode_quad.cuh"
#include "cuda/launchers.cuh"

namespace jaxcgx::cuda {
namespace {

template <class C, int kBits, bool kStochastic, bool kFeedback>
__global__ void __launch_bounds__(kThreads, 4)
    reduce_kernel(const __grid_constant__ Table<EncodeRow<kStochastic, kFeedback>> t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const uint32_t unit = p.tile * kThreads + threadIdx.x;
  const bool there = unit < e.count;
  const Quad q(unit, m.log_bucket);
  float x[kRows][4] = {}, undivided[kRows][4];
  if (there) decode_quad<C, kBits, true>(m, e, p, unit, x);
  if constexpr (kFeedback) {
    if (there) add_quad(t.rows[p.index].old, DType::kF32, q, x);
    copy_quad(x, undivided);
  }
  if (there) divide(m, x);
  QuadCodes<C, kBits> codes;
  const Grid g = encode_quad<C, kBits, kStochastic>(t, p, unit, there, x, codes);
  if constexpr (kFeedback) {
    if (there) store_lost(m, t.rows[p.index], q, g, codes, m.divisor, undivided);
  }
}

}  // namespace

Status reduce(const Reduce& a, cudaStream_t stream) {
  const Layout& l = a.layout;
  if (const Status s = check_size(l, a.batch); s.call != nullptr) return s;
  if (is_lossless(l.codec.kind)) return reduce_lossless(a, stream);
  Call call{l,
            a.batch,
            {a.own, a.residuals, a.payload != nullptr ? a.residuals : a.leaves, a.leaf_ids},
            message_of(l),
            stream};
  Message& m = call.message;
  m.payload = a.payload;
  m.payloads = a.payloads;
  m.ranks = static_cast<uint32_t>(a.ranks);
  m.where = a.where;
  m.keys = a.keys;
  m.workspace = static_cast<float*>(a.workspace);
  m.divisor = a.divisor;
  m.inverse = 1.0f / a.divisor;
  int exponent;
  m.exact = std::frexp(a.divisor, &exponent) == 0.5f && std::isnormal(m.inverse);
  m.sums = true;
  m.own = a.own != nullptr;
  if (a.payload == nullptr || is_sparse(l.codec.kind)) return decode_all(call);
  if (is_fast(l.codec)) {
    const Status s = with_encode_variant(l.codec, [&](auto variant) {
      using V = decltype(variant);
      const auto launch = [&](auto kernel) { return launch_quads(call, kernel, "reduce kernel"); };
      return a.residuals != nullptr ? launch(reduce_kernel<typename V::Codec, V::bits, V::stochastic, true>)
                                    : launch(reduce_kernel<typename V::Codec, V::bits, V::stochastic, false>);
    });
    if (s.call != nullptr) return s;
  }
  return encode_rest(call);
}

}  // namespace jaxcgx::cuda
