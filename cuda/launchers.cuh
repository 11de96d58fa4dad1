// The launchers that encode and decode parts of a message, and all of it.
//
// encode_*: encode the numbers of the leaves or, if the call's message has payloads, the sum of the payloads.
// decode_*: decode to the leaves or, if the call's message sums, write the sum to the fp32 results.
#pragma once

#include "cuda/piece_table.cuh"

namespace jaxcgx::cuda {

// Buckets that the fast kernels don't take: those of other sizes, and short ones behind whole ones. any_bucket.cu
Status encode_buckets(const Call& call);
Status decode_buckets(const Call& call);

// Buckets that are rotated. rotated.cu
Status encode_rotated(const Call& call);
Status decode_rotated(const Call& call);

// Elements without buckets: Cast, Raw and raw tails; and gaps. unbucketed.cu
Status encode_unbucketed(const Call& call);
Status decode_unbucketed(const Call& call);

// Lossless, which packs the chunks of Raw. lossless.cu
int64_t lossless_workspace_bytes(const Layout& layout, int64_t batch, int64_t payloads, bool encodes);
Status encode_lossless(const Encode& args, cudaStream_t stream);
Status decode_lossless(const Decode& args, cudaStream_t stream);
Status reduce_lossless(const Reduce& args, cudaStream_t stream);

// All pieces, or parts of pieces, that the fast kernels don't take.
inline Status encode_rest(const Call& call) {
  const Status s = encode_buckets(call);
  return s.call == nullptr ? encode_unbucketed(call) : s;
}
inline Status decode_rest(const Call& call) {
  const Status s = decode_buckets(call);
  return s.call == nullptr ? decode_unbucketed(call) : s;
}

// A whole message. encode_all is for leaves, and for codecs other than TopK. encode.cu, decode.cu
Status encode_all(const Call& call);
Status decode_all(const Call& call);

}  // namespace jaxcgx::cuda
