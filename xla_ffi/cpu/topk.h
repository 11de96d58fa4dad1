// TopK on a CPU: encode, decode and reduce of this codec, and the selection that encode and reduce share.
#pragma once

#include <vector>

#include "cpu/spans.h"

namespace jaxcgx::cpu {

void encode_topk(const Encode& args, const Pool& pool);
void decode_topk(const Decode& args, const Pool& pool);
void reduce_topk(const Reduce& args, const Pool& pool);

// The numbers of a piece, as fp32: (x + residual) / divisor.
struct Numbers {
  int64_t n;
  DType dtype;
  const void* x;
  const float* residual;  // may be null
  float divisor;

  // Returns `count` numbers, every stride-th one from `first` on. The result is `buffer`, or a pointer into x. With a
  // stride above 1, `count` is at most kStretch.
  const float* fetch(int64_t first, int64_t stride, int64_t count, float* buffer) const;
};

// Some elements of a piece, with ascending indices.
struct Elements {
  std::vector<int32_t> index;
  std::vector<float> values;
};

constexpr int64_t kStretch = 4096;  // elements that a thread processes at a time

// Selects the elements of `numbers` that are sent, at most k.
//
// new_residual: null, or the memory for the new residuals, which may be the memory of numbers.residual. The new
// residual of an element that is not sent is its number if that is finite. All other elements keep the old residual.
Elements select(const Numbers& numbers, int64_t k, const Sparse& how, int32_t random, float* new_residual,
                const Pool& pool);

// Updates residuals by the same rule, for the n numbers x of the elements from `first` on. `old` and `updated` may be
// the same memory.
void update_unsent(const float* x, const float* old, int64_t first, int64_t n, const Elements& sent, float* updated);

}  // namespace jaxcgx::cpu
