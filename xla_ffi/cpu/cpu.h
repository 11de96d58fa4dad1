// The native operations on a CPU, without XLA: raw pointers in, bytes out. A Pool schedules tasks.
#pragma once

#include <functional>

#include "codec/operations.h"

namespace jaxcgx::cpu {

struct Pool {
  int64_t threads;  // that can run tasks, the caller's included
  std::function<void(std::function<void()>)> schedule;
};

// `only`: the only chunk to handle, for codecs other than TopK. Then the payload is [batch, chunk_bytes].
void encode(const Encode& args, const Pool& pool, int64_t only = -1);
void decode(const Decode& args, const Pool& pool, int64_t only = -1);
void reduce(const Reduce& args, const Pool& pool);
void clear(const Clear& args, const Pool& pool);

}  // namespace jaxcgx::cpu
