// The launchers that encode and decode a message or parts of it.
//
// encode_*: encode the numbers of the leaves. If the call's message has payloads, they encode the sum of the payloads.
//
// decode_*: decode to the leaves. If the call's message sums, they write the sum to the fp32 results.
#pragma once

#include "cuda/piece_table.cuh"

namespace jaxcgx::cuda {

// Process buckets that the fast kernels don't take: buckets of other sizes, and the short last bucket of a piece. They
// also process rotated buckets. any_bucket.cu
Status encode_buckets(const Call& call);
Status decode_buckets(const Call& call);

// Encodes the whole blocks of large buckets of leaves. Their grids are in the workspace. large_bucket.cu
Status encode_large_blocks(const Call& call);

// Process rotated buckets. rotated.cu
Status encode_rotated(const Call& call);
Status decode_rotated(const Call& call);

// Process elements without buckets: Cast, Raw and raw tails. Encoding also clears padding. unbucketed.cu
Status encode_unbucketed(const Call& call);
Status decode_unbucketed(const Call& call);

// Process messages of Lossless. lossless.cu
int64_t lossless_workspace_bytes(const Layout& layout, int64_t batch, int64_t payloads, bool encodes);
Status encode_lossless(const Encode& args, cudaStream_t stream);
Status decode_lossless(const Decode& args, cudaStream_t stream);
Status reduce_lossless(const Reduce& args, cudaStream_t stream);

// Process all pieces, and parts of pieces, that the fast kernels don't take.
inline Status encode_rest(const Call& call) {
  const Status s = encode_buckets(call);
  return s.call == nullptr ? encode_unbucketed(call) : s;
}
inline Status decode_rest(const Call& call) {
  const Status s = decode_buckets(call);
  return s.call == nullptr ? decode_unbucketed(call) : s;
}

// Process a whole message. encode_all encodes only leaves, and not TopK. encode.cu, decode.cu
Status encode_all(const Call& call);
Status decode_all(const Call& call);

}  // namespace jaxcgx::cuda
