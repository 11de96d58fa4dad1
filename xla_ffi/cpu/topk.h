// TopK on a CPU: encode, decode and reduce of this codec, and the selection that they share.
#pragma once

#include <vector>

#include "cpu/spans.h"

namespace jaxcgx::cpu {

void encode_topk(const Encode& args, const Pool& pool);
void decode_topk(const Decode& args, const Pool& pool);
void reduce_topk(const Reduce& args, const Pool& pool);

// The numbers of a piece, as fp32: x + residual, divided.
struct Numbers {
  int64_t n;
  DType dtype;
  const void* x;
  const float* residual;  // may be null
  float divisor;

  // `count` numbers, every stride-th from `first` on. The result is `buffer`, or points into x.
  const float* fetch(int64_t first, int64_t stride, int64_t count, float* buffer) const;
};

// Elements of a piece, in order.
struct Elements {
  std::vector<int32_t> index;
  std::vector<float> values;
};

constexpr int64_t kStretch = 4096;  // elements that a thread selects from at a time

// The elements of `numbers` that are sent, at most k.
//
// new_residual: null, or the new residuals, which may be the memory of numbers.residual. A number that is not sent
// becomes its residual if it is finite. All other elements keep the old residual.
Elements select(const Numbers& numbers, int64_t k, const Sparse& how, int32_t random, float* new_residual,
                const Pool& pool);

// Updates residuals in the same way, for the n numbers x from element `first` on.
void update_unsent(const float* x, const float* old, int64_t first, int64_t n, const Elements& sent, float* updated);

}  // namespace jaxcgx::cpu
