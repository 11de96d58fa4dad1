#include "cuda/encode_quad.cuh"
#include "cuda/launchers.cuh"
#include "cuda/topk.cuh"

namespace jaxcgx::cuda {
namespace {

template <class C, int kBits, bool kStochastic, bool kFeedback>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ Table<EncodeRow<kStochastic, kFeedback>> t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const uint32_t unit = p.tile * kThreads + threadIdx.x;
  const bool there = unit < e.count;
  const Quad q(unit, m.log_bucket);
  float x[kRows][4] = {};
  const auto set = [&](int r, const float4& row) { set_row(x[r], row); };
  const auto dtype = static_cast<DType>(e.dtype);
  if constexpr (kFeedback) {
    // The residuals are loaded first, so that all loads of the leaf are issued before one of them is used.
    if (there) load_quad(t.rows[p.index].old, DType::kF32, q.element(), q.lanes, set);
    if (there) add_quad(e.leaf, dtype, q, x);
  } else {
    if (there) load_quad(e.leaf, dtype, q.element(), q.lanes, set);
  }
  QuadCodes<C, kBits> codes;
  const Grid g = encode_quad<C, kBits, kStochastic>(t, p, unit, there, x, codes);
  if constexpr (kFeedback) {
    if (there) store_lost(m, t.rows[p.index], q, g, codes, 1.0f, x);
  }
}

__global__ void nothing_kernel() {}

}  // namespace

Status launch_nothing(cudaStream_t stream) { return launch(config_of(1, 1, stream), nothing_kernel, "empty kernel"); }

bool begins_early() {
  constexpr int kWaits = 90;  // place_of waits from this architecture on
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, nothing_kernel) == cudaSuccess && attributes.ptxVersion >= kWaits;
}

Status encode_all(const Call& call) {
  const Codec& codec = call.layout.codec;
  if (is_fast(codec)) {
    const Status s = with_encode_variant(codec, [&](auto variant) {
      using V = decltype(variant);
      const auto launch = [&](auto kernel) { return launch_quads(call, kernel, "encode kernel"); };
      return call.leaves.residuals != nullptr ? launch(encode_kernel<typename V::Codec, V::bits, V::stochastic, true>)
                                              : launch(encode_kernel<typename V::Codec, V::bits, V::stochastic, false>);
    });
    if (s.call != nullptr) return s;
  }
  return encode_rest(call);
}

Status encode(const Encode& a, cudaStream_t stream) {
  const Layout& l = a.layout;
  if (const Status s = check_size(l, a.batch); s.call != nullptr) return s;
  if (is_lossless(l.codec.kind)) return encode_lossless(a, stream);
  Call call{l, a.batch, {a.leaves, a.residuals, a.new_residuals, a.leaf_ids}, message_of(l), stream};
  Message& m = call.message;
  m.payload = a.payload;
  m.keys = a.keys;
  m.workspace = static_cast<float*>(a.workspace);
  if (is_sparse(l.codec.kind)) return encode_topk(TopkWork(l, a.batch, 0, true), call);
  return encode_all(call);
}

int64_t workspace_bytes(const Layout& l, int64_t batch, int64_t payloads, bool encodes) {
  if (is_sparse(l.codec.kind)) return 4 * TopkWork(l, batch, payloads, encodes).end;
  if (is_lossless(l.codec.kind)) return lossless_workspace_bytes(l, batch, payloads, encodes);
  return encodes ? 4 * batch * workspace_floats(l) : 0;
}

}  // namespace jaxcgx::cuda
