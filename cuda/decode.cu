#include "cuda/decode_sum.cuh"
#include "cuda/encode_quad.cuh"
#include "cuda/launchers.cuh"
#include "cuda/topk.cuh"

namespace jaxcgx::cuda {
namespace {

// kSum: sums the payloads of all ranks and writes fp32 results.
template <class C, int kBits, bool kSum>
__global__ void __launch_bounds__(kThreads, kSum ? 4 : 8)
    decode_kernel(const __grid_constant__ Table<If<kSum, Sum>> t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Entry& e = t.entries[p.index];
  const uint32_t unit = p.tile * kThreads + threadIdx.x;
  if (unit >= e.count) return;
  const Quad q(unit, t.message.log_bucket);
  float x[kRows][4];
  decode_quad<C, kBits, kSum>(t.message, e, p, unit, x);
  if constexpr (kSum) {
    divide(t.message, x);
    store_quad(t.rows[p.index].sum, DType::kF32, q.element(), q.lanes, x);
  } else {
    store_quad(const_cast<void*>(e.leaf), static_cast<DType>(e.dtype), q.element(), q.lanes, x);
  }
}

}  // namespace

Status decode_all(const Call& call) {
  const Codec& codec = call.layout.codec;
  if (is_sparse(codec.kind)) return decode_topk(call);
  if (is_fast(codec) || has_large_blocks(codec)) {
    const Status s = with_decode_variant(codec, [&](auto variant) {
      using V = decltype(variant);
      const auto launch = [&](auto kernel) { return launch_quads(call, kernel, "decode kernel"); };
      return call.message.sums ? launch(decode_kernel<typename V::Codec, V::bits, true>)
                               : launch(decode_kernel<typename V::Codec, V::bits, false>);
    });
    if (s.call != nullptr) return s;
  }
  return decode_rest(call);
}

Status decode(const Decode& a, cudaStream_t stream) {
  if (const Status s = check_size(a.layout, a.batch); s.call != nullptr) return s;
  if (is_lossless(a.layout.codec.kind)) return decode_lossless(a, stream);
  Call call{a.layout, a.batch, {const_cast<const void* const*>(a.leaves)}, message_of(a.layout), stream};
  call.message.payloads = a.payload;
  call.message.workspace = static_cast<float*>(a.workspace);
  return decode_all(call);
}

}  // namespace jaxcgx::cuda
