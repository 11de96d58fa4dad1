#include "shm/gpu.h"

namespace jaxcgx::shm {
namespace {

cuda::Status copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return {};
  const cudaError_t error = cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream);
  if (error != cudaSuccess) return {"cudaMemcpyAsync", error};
  return {"cudaStreamSynchronize", cudaStreamSynchronize(stream)};
}

}  // namespace

Trouble run(Ring& ring, Exchange exchange, tcp::Workspaces& pinned, cudaStream_t stream) {
  const int64_t in_bytes = exchange.bytes * (scatters(exchange.operation) ? ring.ranks() : 1);
  const int64_t out_bytes = exchange.bytes * (gathers(exchange.operation) ? ring.ranks() : 1);
  const auto failed = [&](cuda::Status status) {
    ring.leave();
    return Trouble{std::nullopt, status};
  };
  const auto in = pinned.take(in_bytes), out = pinned.take(out_bytes);
  if (in == nullptr || out == nullptr) return failed({"cudaHostAlloc", cudaErrorMemoryAllocation});
  if (const auto copied = copy(in.get(), exchange.in, in_bytes, stream); copied.error != cudaSuccess)
    return failed(copied);
  uint8_t* const to = std::exchange(exchange.out, out.get());
  exchange.in = in.get();
  if (const Status status = ring.run(exchange)) return {status, {}};
  const auto copied = copy(to, out.get(), out_bytes, stream);
  return copied.error == cudaSuccess ? Trouble{} : failed(copied);
}

}  // namespace jaxcgx::shm
