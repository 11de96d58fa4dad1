// Exchanges over shared memory of arrays in a GPU's memory.
#pragma once

#include "cuda/cuda.h"
#include "shm/ring.h"
#include "tcp/workspaces.h"

namespace jaxcgx::shm {

// What went wrong, if anything: among the ranks, or in a call of CUDA. After the latter, this rank has left the others.
struct Trouble {
  Status status;
  cuda::Status cuda;
};

// Runs an exchange whose `in` and `out` are in the GPU's memory. Its bytes go through pinned memory, and the stream
// waits for them.
Trouble run(Ring& ring, Exchange exchange, tcp::Workspaces& pinned, cudaStream_t stream);

}  // namespace jaxcgx::shm
