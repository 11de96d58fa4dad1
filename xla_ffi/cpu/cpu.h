// The native operations on a CPU. They do not depend on XLA: they take raw pointers, and a Pool that schedules tasks.
#pragma once

#include <functional>

#include "codec/operations.h"

namespace jaxcgx::cpu {

struct Pool {
  int64_t threads;  // number of threads that can run tasks, including the caller's
  std::function<void(std::function<void()>)> schedule;
};

// Returns a pointer to n numbers of a leaf from an element on, in `buffer` or elsewhere. n is at most kMostTogether
// (cpu/spans.h).
using Source = std::function<const float*(size_t leaf, int64_t element, int64_t n, float* buffer)>;

// `only`: a chunk; -1 means all. With a chunk, the operation handles only this chunk, and the payload is [batch,
// chunk_bytes]. TopK ignores it. The caller asks for large pages. `source`: the numbers of float32 leaves, in place of
// `leaves`; the batch is 1.
void encode(const Encode& args, const Pool& pool, int64_t only = -1, const Source& source = nullptr);
void decode(const Decode& args, const Pool& pool, int64_t only = -1);
void reduce(const Reduce& args, const Pool& pool);
void clear(const Clear& args, const Pool& pool);

}  // namespace jaxcgx::cpu
