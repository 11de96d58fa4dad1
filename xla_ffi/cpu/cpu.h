// The native operations on a CPU. They do not depend on XLA: they take raw pointers, and a Pool that schedules tasks.
#pragma once

#include <functional>

#include "codec/operations.h"

namespace jaxcgx::cpu {

struct Pool {
  int64_t threads;  // number of threads that can run tasks, including the caller's
  std::function<void(std::function<void()>)> schedule;
};

// `only`: a chunk; -1 means all. With a chunk, the operation handles only this chunk, and the payload is [batch,
// chunk_bytes]. TopK ignores it.
void encode(const Encode& args, const Pool& pool, int64_t only = -1);
void decode(const Decode& args, const Pool& pool, int64_t only = -1);
void reduce(const Reduce& args, const Pool& pool);
void clear(const Clear& args, const Pool& pool);

}  // namespace jaxcgx::cpu
