#include "shm/gpu.h"

namespace jaxcgx::shm {
namespace {

cudaError_t copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const cudaError_t error = cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream);
  return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
}

}  // namespace

Trouble run(Ring& ring, Exchange exchange, tcp::Workspaces& pinned, cudaStream_t stream) {
  const bool scatters = exchange.operation == Operation::kAllToAll;
  const bool gathers = scatters || exchange.operation == Operation::kAllGather;
  const int64_t in_bytes = exchange.bytes * (scatters ? ring.ranks() : 1);
  const int64_t out_bytes = exchange.bytes * (gathers ? ring.ranks() : 1);
  const auto failed = [&](const char* call, cudaError_t error) {
    ring.leave();
    return Trouble{std::nullopt, {call, error}};
  };
  const auto in = pinned.take(in_bytes), out = pinned.take(out_bytes);
  if (in == nullptr || out == nullptr) return failed("cudaHostAlloc", cudaErrorMemoryAllocation);
  cudaError_t error = copy(in.get(), exchange.in, in_bytes, stream);
  if (error != cudaSuccess) return failed("cudaMemcpyAsync", error);
  uint8_t* const to = std::exchange(exchange.out, out.get());
  exchange.in = in.get();
  if (const Status status = ring.run(exchange)) return {status, {}};
  error = copy(to, out.get(), out_bytes, stream);
  return error == cudaSuccess ? Trouble{} : failed("cudaMemcpyAsync", error);
}

}  // namespace jaxcgx::shm
