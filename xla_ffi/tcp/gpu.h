// The part of a sum that a GPU does. Kernels encode and decode in the stream of the program, as the platform's other
// operations do. Streams of this engine's own copy payloads between the GPU and pinned memory, in both directions at
// once, so the program's kernels run meanwhile. They call functions when copies are complete, so no thread waits for
// the GPU. Kernels encode a whole message at once: that takes a hundredth of the time of its transfer.
//
// The sum has a block of the GPU's memory, from its begin to its end, which the program's stream allocates and frees.
// In the block are the encoded messages, later the encoded sums, and what the sum keeps of the leaves, because the
// program uses its buffers for other data after begin.
#pragma once

#include <mutex>

#include "cuda/cuda.h"
#include "tcp/allreduce.h"
#include "tcp/workspaces.h"

namespace jaxcgx::tcp {

// Returns the pinned memory for payloads. Never destroyed: an XLA program may still be running when the process ends.
Workspaces& pinned_workspaces();

class Gpu : public Device {
 public:
  // `stream`: the stream of the program that begins the sum, on the GPU with this ordinal.
  Gpu(int32_t ordinal, cudaStream_t stream) : ordinal_(ordinal), stream_(stream), streams_(streams_of(ordinal)) {}

  void encode(const Allreduce& sum, const Allreduce::Inputs& first, std::vector<Outgoing> outgoing) override;
  void take(const Allreduce& sum, int64_t message, int64_t chunk, const uint8_t* payload, int64_t bytes) override;

  // What went wrong, if anything: among the processes, or in a call of CUDA.
  struct Trouble {
    Status status;
    cuda::Status cuda;
    explicit operator bool() const { return status || cuda.call != nullptr; }
  };

  // Loads the kernels of a sum, those of its begin and of its end.
  static cuda::Status load(const Layout& layout, int64_t batch, bool two_shot, bool feedback);
  // Begins a sum of messages whose leaves are in the GPU's memory. `allreduce.device` is the Gpu.
  static std::pair<std::shared_ptr<Running>, Trouble> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce,
                                                            const Allreduce::Inputs& first);
  // Writes the ticket of the sum for each message of the batch to the GPU's memory.
  cuda::Status write(uint64_t ticket, int64_t batch, uint32_t* words);
  // Ends it: waits until the GPU has been given everything, then lets `stream`, that of the program, write the outputs.
  // After a failure of CUDA, this process has left the others.
  static Trouble end(const std::shared_ptr<Net>& net, std::shared_ptr<Running> running, const Allreduce::Outputs& first,
                     cudaStream_t stream);

 private:
  // The streams of a GPU, and the memory of its blocks. A stream that calls functions waits for them.
  struct Streams {
    cudaStream_t out = nullptr, in = nullptr, last = nullptr;  // for copies from the GPU, to the GPU, and no copies
    cudaMemPool_t blocks = nullptr;
    cuda::Status status;  // of making them
  };
  static Streams& streams_of(int32_t ordinal);

  // Frees the block, and drops the sum when a stream no longer uses its workspace.
  bool drop(const std::shared_ptr<Running>& running, cudaStream_t stream);
  bool finish(const std::shared_ptr<Running>& running, const Allreduce::Outputs& first, cudaStream_t stream);
  // Returns the first failure of a call, or of copies that have begun.
  cuda::Status status();
  // Remembers a failure. Returns whether there is none.
  bool ok(const char* call, cudaError_t error);
  bool ok(const cuda::Status& status) { return ok(status.call, status.error); }
  // Lets work in stream `later` wait for what is in stream `earlier` now.
  bool order(cudaStream_t earlier, cudaStream_t later);
  // Calls a function when what is in a stream now is done. The function must not call CUDA.
  bool call(cudaStream_t stream, std::function<void()> function);
  bool copy(void* to, const void* from, int64_t bytes, cudaStream_t stream);
  uint8_t* payload(const Allreduce& sum, int64_t message, int64_t chunk) const;
  bool allocate(const Allreduce& sum, const std::vector<Outgoing>& outgoing);
  bool say_where(const Allreduce& sum);
  bool decode(const Allreduce& sum, const Allreduce::Outputs& first, cudaStream_t stream);

  const int32_t ordinal_;
  const cudaStream_t stream_;
  const Streams& streams_;
  std::mutex mutex_;
  cuda::Status status_;
  // In the block, from its begin: the messages' payloads. Then, with one_shot, for each chunk the payloads of all
  // ranks, and Reduce::where. Then the workspace of kernels, and the copies of what the sum keeps.
  uint8_t *block_ = nullptr, *all_ = nullptr, *workspace_ = nullptr, *kept_ = nullptr;
  int32_t* where_ = nullptr;
  std::shared_ptr<uint8_t> where_here_, ticket_;  // pinned
};

}  // namespace jaxcgx::tcp
