#include "cuda/encode_quad.cuh"
#include "cuda/launchers.cuh"

namespace jaxcgx::cuda {
namespace {

template <bool kStochastic, bool kFeedback>
struct LargeBlocksRow : EncodeRow<kStochastic, kFeedback>, LargeBuckets {};

// Like encode_kernel, but for the whole blocks of large buckets, whose grids are in the workspace.
template <class C, int kBits, bool kStochastic, bool kFeedback>
__global__ void __launch_bounds__(kThreads, kFeedback || (kStochastic && scales_of<C>() > 0) ? 5 : 8)
    encode_blocks_kernel(const __grid_constant__ Table<LargeBlocksRow<kStochastic, kFeedback>> t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const uint32_t unit = p.tile * kThreads + threadIdx.x;
  const bool there = unit < e.count;
  if (!there && scales_of<C>() == 0) return;  // scales are found by whole warps
  const Quad q(unit, 7);                      // of a block of 16 lanes
  float x[kRows][4] = {};
  const auto set = [&](int r, const float4& row) { set_row(x[r], row); };
  const auto dtype = static_cast<DType>(e.dtype);
  if constexpr (kFeedback) {
    if (there) load_quad(t.rows[p.index].old, DType::kF32, q.element(), q.lanes, set);
    if (there) add_quad(e.leaf, dtype, q, x);
  } else {
    if (there) load_quad(e.leaf, dtype, q.element(), q.lanes, set);
  }
  const int log_quads = m.log_bucket - 5;
  const uint32_t bucket = (there ? unit : e.count - 1) >> log_quads;
  const int64_t parts = div_up(m.codec.bucket_size, kMostStaged);
  const Grid g = *reinterpret_cast<const Grid*>(memory_of(m, t.rows[p.index], bucket, parts));
  QuadCodes<C, kBits> codes;
  codes_of_quad<C, kBits, kStochastic>(t, p, q, g, x, codes);
  if (!there) return;
  uint8_t* chunk = chunk_of(m, p);
  codes.store(chunk + e.codes + codes.at(q), q);
  if ((unit & ((1u << log_quads) - 1)) == 0) store_meta(m, chunk, e.meta + bucket * static_cast<int64_t>(m.meta), g);
  if constexpr (kFeedback) store_lost(m, t.rows[p.index], q, g, codes, 1.0f, x);
}

}  // namespace

Status encode_large_blocks(const Call& call) {
  return with_encode_variant(call.layout.codec, [&](auto variant) {
    using V = decltype(variant);
    const auto launch = [&](auto kernel) { return launch_quads(call, kernel, "encode kernel of blocks"); };
    return call.leaves.residuals != nullptr
               ? launch(encode_blocks_kernel<typename V::Codec, V::bits, V::stochastic, true>)
               : launch(encode_blocks_kernel<typename V::Codec, V::bits, V::stochastic, false>);
  });
}

}  // namespace jaxcgx::cuda
