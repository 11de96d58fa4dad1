// The native operations on a GPU. They give the same bytes as cpu/cpu.h. A call only launches kernels: it does not
// allocate, copy or synchronize. So it can run on a stream that is captured into a CUDA graph. Its kernels should be
// loaded before (Loading).
//
// Leaves, residuals, payloads, `where`, `keys` and the workspace are in device memory. The arrays of pointers to leaves
// and residuals, and leaf_ids, are in host memory and are read only during the call. Payloads and the workspace are
// aligned to 16 bytes, everything else to its type.
//
// If a chunk or an own rank in `where` is out of range, reduce yields NaNs.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "codec/operations.h"
#include "codec/patch.h"

namespace jaxcgx::cuda {

// The name of the call that failed, and its error. `call` is nullptr if no call failed.
struct Status {
  const char* call = nullptr;
  cudaError_t error = cudaSuccess;
};

// Encoding needs a workspace for large buckets: buckets of more than kMostStaged elements. Several thread blocks share
// such a bucket. Each processes one part, and they exchange data through the workspace. It has, in floats, for each
// large bucket: its grid, the range of each part and, if the codec needs sums of magnitudes, the sum of each
// 128-element block of each part.
constexpr int64_t kMostStaged = 8192;
constexpr int64_t kGridFloats = 8, kRangeFloats = 2, kSumFloats = kMostStaged / kBlock;

CGX_HD int64_t workspace_floats(Kind kind, int64_t parts) {
  return kGridFloats + parts * (kRangeFloats + (traits_of(kind).sums ? kSumFloats : 0));
}
inline bool is_large(const Piece& p) { return p.bucket > kMostStaged; }
// Returns the floats of the workspace of one bucket of a piece.
inline int64_t bucket_floats(const Codec& c, const Piece& p) {
  return is_large(p) ? workspace_floats(c.kind, div_up(p.bucket, kMostStaged)) : 0;
}
inline int64_t workspace_floats(const Codec& c, const Piece& p) {
  return is_large(p) ? div_up(p.coded, p.bucket) * bucket_floats(c, p) : 0;
}
inline int64_t workspace_floats(const Layout& layout) {
  int64_t floats = 0;
  for (const Piece& p : layout.pieces) floats += workspace_floats(layout.codec, p);
  return floats;
}

// Returns the bytes of the workspace of an operation that decodes `payloads` payloads per row (encode: 0). `encodes`:
// whether the operation encodes. TopkWork in topk.cuh describes the workspace of TopK, Work in lossless.cu that of
// Lossless.
int64_t workspace_bytes(const Layout& layout, int64_t batch, int64_t payloads, bool encodes);

Status encode(const Encode& args, cudaStream_t stream);
Status decode(const Decode& args, cudaStream_t stream);
Status reduce(const Reduce& args, cudaStream_t stream);
Status clear(const Clear& args, cudaStream_t stream);

// Patches of words (docs/wire-format.md#patches). All memory is on the device, aligned to its type; `words` is
// positive.
struct PatchEncode {
  int64_t words, width;  // a word has `width` bytes: 1, 2, 4 or 8
  const void *old, *now;
  PatchHead* heads;  // of each block
  uint8_t* slots;    // of each block, as long as kPatchBlock words: its bytes are at the beginning, the rest is garbage
};
struct PatchApply {
  int64_t words, width;
  const void* old;
  const PatchHead* heads;
  const int64_t* begins;  // where the bytes of each block begin
  const uint8_t* blocks;
  int64_t bytes;  // of all blocks. Any heads and bytes are safe.
  void* now;      // may be `old`
  uint8_t* fits;  // of each block: 0 if its bytes are not those of an encoder. Then its new words are garbage.
};
Status encode_patch(const PatchEncode& args, cudaStream_t stream);
Status apply_patch(const PatchApply& args, cudaStream_t stream);

// The number of kernels that this host thread has launched or loaded.
inline thread_local uint64_t launched = 0;
// While one lives, this host thread's launches only load their kernels. CUDA loads a kernel when it is first used. In a
// launch, that may wait until another kernel has ended.
class Loading {
 public:
  ~Loading() { now = before_; }
  static inline thread_local bool now = false;

 private:
  const bool before_ = std::exchange(now, true);
};
Status launch_nothing(cudaStream_t stream);

// Runs an operation. If it launches no kernel, launches an empty one. Otherwise capturing the call would make an empty
// graph, which is an error in XLA before May 2026.
template <class Args>
Status run(Status (*operation)(const Args&, cudaStream_t), const Args& args, cudaStream_t stream) {
  const uint64_t before = launched;
  const Status s = operation(args, stream);
  return s.call == nullptr && launched == before ? launch_nothing(stream) : s;
}

}  // namespace jaxcgx::cuda
