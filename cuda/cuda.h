// The native operations on a GPU: the same bytes as cpu/cpu.h. A call launches kernels and nothing else: it allocates
// and copies nothing and asks the device nothing, so any stream can be captured into a graph.
//
// Pointers to leaves, residuals, payloads, `where` and `keys` are device memory. The arrays of those pointers and
// leaf_ids are host memory, read only during the call. Payloads and workspace are aligned to 16 bytes, everything else
// to its type.
//
// A reduce whose `where` names a chunk or an own rank that is out of range yields NaNs.
#pragma once

#include <cuda_runtime.h>

#include "codec/operations.h"

namespace jaxcgx::cuda {

// The call that failed, or nullptr.
struct Status {
  const char* call = nullptr;
  cudaError_t error = cudaSuccess;
};

// Encoding needs a workspace for large buckets, those of more than kMostStaged elements. Several blocks share such a
// bucket, one part each, and exchange data through this memory. It has, in floats, for each large bucket: its grid, the
// range of each part and, if the codec needs sums of magnitudes, the sum of each block of each part.
constexpr int64_t kMostStaged = 8192;
constexpr int64_t kGridFloats = 8, kRangeFloats = 2, kSumFloats = kMostStaged / kBlock;

CGX_HD int64_t workspace_floats(Kind kind, int64_t parts) {
  return kGridFloats + parts * (kRangeFloats + (traits_of(kind).sums ? kSumFloats : 0));
}
inline int64_t workspace_floats(const Codec& c, const Piece& p) {
  if (p.bucket <= kMostStaged) return 0;
  return div_up(p.coded, p.bucket) * workspace_floats(c.kind, div_up(p.bucket, kMostStaged));
}
inline int64_t workspace_floats(const Layout& layout) {
  int64_t floats = 0;
  for (const Piece& p : layout.pieces) floats += workspace_floats(layout.codec, p);
  return floats;
}

// Bytes of the workspace of an operation that decodes `payloads` payloads per row (encode: 0). `encodes`: whether it
// encodes. For TopK: TopkWork in topk.cuh.
int64_t workspace_bytes(const Layout& layout, int64_t batch, int64_t payloads, bool encodes);

Status encode(const Encode& args, cudaStream_t stream);
Status decode(const Decode& args, cudaStream_t stream);
Status reduce(const Reduce& args, cudaStream_t stream);
Status clear(const Clear& args, cudaStream_t stream);

// How many kernels this thread has launched.
inline thread_local uint64_t launched = 0;
Status launch_nothing(cudaStream_t stream);

// Runs one of the operations, and launches an empty kernel if it launched none. A captured call would otherwise make an
// empty graph, which is an error in XLA before May 2026.
template <class Args>
Status run(Status (*operation)(const Args&, cudaStream_t), const Args& args, cudaStream_t stream) {
  const uint64_t before = launched;
  const Status s = operation(args, stream);
  return s.call == nullptr && launched == before ? launch_nothing(stream) : s;
}

}  // namespace jaxcgx::cuda
