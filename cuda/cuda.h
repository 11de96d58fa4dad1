// The native operations on a GPU: raw pointers and a stream in, bytes out, the same bytes as cpu/cpu.h. Nothing but
// kernels is launched and nothing is allocated, copied or asked of the device, so that any stream can be captured
// into a graph.
//
// Pointers to leaves, residuals, payloads, `where` and `keys` are device memory; the arrays that hold those pointers,
// and leaf_ids, are host memory and only read during the call. Payloads begin on 16 bytes, everything else on its type.
#pragma once

#include <cuda_runtime.h>

#include "codec/layout.h"

namespace jaxcgx::cuda {

// The call that failed, or nullptr.
struct Status {
  const char* call = nullptr;
  cudaError_t error = cudaSuccess;
};

// Workspace that encode needs, and reduce where its result is a payload. Buckets of more than 8192 elements
// (kMostStaged) are shared among blocks, which meet in this memory, in floats: 8 for each such bucket, and for each
// 8192 elements of it, the last ones counting whole, 2, or 66 if the codec is Sign:
//   batch * sum over the pieces of all chunks with bucket > 8192 of
//     ceil(coded / bucket) * (8 + ceil(bucket / 8192) * (66 if Sign else 2))
constexpr int64_t kMostStaged = 8192;

inline int64_t workspace_floats(const Codec& c, const Piece& p) {
  if (p.bucket <= kMostStaged) return 0;
  return div_up(p.coded, p.bucket) * (8 + div_up(p.bucket, kMostStaged) * (c.kind == Kind::kSign ? 66 : 2));
}
inline int64_t workspace_floats(const Layout& layout) {
  int64_t floats = 0;
  for (const Piece& p : layout.pieces) floats += workspace_floats(layout.codec, p);
  return floats;
}
// Bytes of workspace of an operation that decodes `payloads` of each row (encode: none), and that `encodes`. TopK's are
// topk.cuh's TopkWork.
int64_t workspace_bytes(const Layout& layout, int64_t batch, int64_t payloads, bool encodes);

struct Encode {
  const Layout& layout;
  int64_t batch;
  const void* const* leaves;
  const int64_t* leaf_ids;        // what the noise of a leaf is keyed by
  const uint32_t* keys;           // [batch, 2]; null where the codec draws no noise
  const float* const* residuals;  // null without feedback: added to the leaves before encoding,
  float* const* new_residuals;    // and what encoding lost; may be the same memory
  uint8_t* payload;               // [batch, chunks, chunk_bytes]
  void* workspace;                // of workspace_bytes, on 16 bytes
};
Status encode(const Encode& args, cudaStream_t stream);

struct Decode {
  const Layout& layout;
  int64_t batch;
  const uint8_t* payload;  // [batch, chunks, chunk_bytes]
  void* const* leaves;
  void* workspace;
};
Status decode(const Decode& args, cudaStream_t stream);

// Sums one chunk of `ranks` messages in rank order, in fp32, and divides by `divisor`. Of a chunk or an own rank that
// there is not, every number is NaN.
struct Reduce {
  const Layout& layout;
  int64_t batch, ranks;
  const uint8_t* payloads;  // [batch, ranks, chunk_bytes]
  const int32_t* where;     // [batch, 2]: which chunk the payloads are, and which rank's is replaced by `own`
  const void* const* own;   // that rank's leaves, whole and raw; null: every payload counts
  float divisor;
  // Either the sum itself (one chunk only),
  float* const* leaves;
  // or the sum as a new payload [batch, of_sum(layout, ranks).chunk_bytes].
  uint8_t* payload;
  float* const* residuals;  // null without feedback: of whole leaves; the chunk's are added to the sum before it is
                            // divided, and become what encoding lost
  const int64_t* leaf_ids;
  const uint32_t* keys;
  void* workspace;
};
Status reduce(const Reduce& args, cudaStream_t stream);

// 0 where the payload of TopK has an element.
struct Clear {
  const Layout& layout;
  int64_t batch;
  const uint8_t* payload;  // [batch, chunks, chunk_bytes]
  void* const* arrays;     // of the leaves' sizes and dtypes
  void* workspace;
};
Status clear(const Clear& args, cudaStream_t stream);

}  // namespace jaxcgx::cuda
