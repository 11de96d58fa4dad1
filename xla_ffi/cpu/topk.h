// TopK on a CPU: what encode, decode and reduce do where that is the codec, and the selection that they share.
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

  // `count` of them, every stride-th from `first` on: in `buffer`, or where they are.
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
// new_residual: null, or where numbers.residual is to be updated, which may be the same memory: there become all that
// are not sent the numbers themselves where they are finite; all others, and those that are sent, remain what they
// were.
Elements select(const Numbers& numbers, int64_t k, const Sparse& how, int32_t random, float* new_residual,
                const Pool& pool);

// The same for the n numbers x from element `first` on: old to updated.
void update_unsent(const float* x, const float* old, int64_t first, int64_t n, const Elements& sent, float* updated);

}  // namespace jaxcgx::cpu
