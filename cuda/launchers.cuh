// What the fast kernels don't do: buckets of any size, short ones behind whole ones, raw elements, Cast, gaps.
#pragma once

#include "cuda/piece_table.cuh"

namespace jaxcgx::cuda {

// Encode the numbers of the leaves or, where m.payloads says so, the sum of payloads; decode to the leaves or, with
// m.sums, the sum to the fp32 results.
Status encode_buckets(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, cudaStream_t stream);
Status decode_buckets(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, cudaStream_t stream);
// gaps: what nothing is written to becomes 0.
Status encode_plain(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, bool gaps,
                    cudaStream_t stream);
Status decode_plain(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, cudaStream_t stream);

inline Status encode_rest(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, bool gaps,
                          cudaStream_t stream) {
  const Status s = encode_buckets(layout, batch, leaves, m, stream);
  return s.call == nullptr ? encode_plain(layout, batch, leaves, m, gaps, stream) : s;
}
inline Status decode_rest(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m,
                          cudaStream_t stream) {
  const Status s = decode_buckets(layout, batch, leaves, m, stream);
  return s.call == nullptr ? decode_plain(layout, batch, leaves, m, stream) : s;
}

// Everything of a message: encode.cu, of the leaves' numbers, and decode.cu.
Status encode_all(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, bool gaps,
                  cudaStream_t stream);
Status decode_all(const Layout& layout, int64_t batch, const Leaves& leaves, const Message& m, cudaStream_t stream);

}  // namespace jaxcgx::cuda
