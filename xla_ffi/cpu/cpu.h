// The native operations on a CPU, without XLA: raw pointers in, bytes out. A Pool says how to run a task elsewhere.
#pragma once

#include <functional>

#include "codec/operations.h"

namespace jaxcgx::cpu {

struct Pool {
  int64_t threads;  // that can run tasks, including the caller's
  std::function<void(std::function<void()>)> schedule;
};

// `only`: this chunk alone, for a codec other than TopK; then the payload is [batch, chunk_bytes].
void encode(const Encode& args, const Pool& pool, int64_t only = -1);
void decode(const Decode& args, const Pool& pool, int64_t only = -1);
void reduce(const Reduce& args, const Pool& pool);
void clear(const Clear& args, const Pool& pool);

}  // namespace jaxcgx::cpu
