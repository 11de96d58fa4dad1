#include "tcp/gpu.h"

#include <algorithm>
#include <future>
#include <map>

#include "tcp/process.h"
#include "tcp/threads.h"

namespace jaxcgx::tcp {
namespace {

// For work that a function must not do which a stream calls: such functions must not call CUDA, nor take long.
Threads& others() {
  static auto& threads = *new Threads(1);
  return threads;
}

// It is never freed: cudaHostAlloc takes milliseconds, and cudaFreeHost waits for the GPU.
Memory pinned_memory() {
  const auto get = [](int64_t bytes) -> uint8_t* {
    void* p = nullptr;
    const auto size = static_cast<size_t>(std::max(bytes, kLine));
    return cudaHostAlloc(&p, size, cudaHostAllocPortable) == cudaSuccess ? static_cast<uint8_t*>(p) : nullptr;
  };
  return {get, nullptr};
}

constexpr std::chrono::milliseconds kLook{100};
constexpr int64_t kWhereBytes = 2 * sizeof(int32_t);  // of each chunk in Reduce::where

// Leaves the other processes after a failure of CUDA. The GPU may still write to the workspace, so the sum stays.
void give_up(Net& net, const std::shared_ptr<Running>& running) {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::shared_ptr<Running>>;
  std::lock_guard<std::mutex> lock(mutex);
  all.push_back(running);
  net.leave();
}

int64_t rows(const Allreduce& sum) { return sum.batch * sum.layout.chunks(); }

}  // namespace

Workspaces& pinned_workspaces() {
  static auto& all = *new std::shared_ptr<Workspaces>(std::make_shared<Workspaces>(pinned_memory()));
  return *all;
}

bool Gpu::allocate(const Allreduce& sum, const std::vector<Outgoing>& outgoing) {
  const Layout& l = sum.layout;
  int64_t bytes = 0;
  const auto place = [&](int64_t needed) {
    const int64_t at = bytes;
    bytes += whole_lines(needed);
    return at;
  };
  place(rows(sum) * l.chunk_bytes);
  const int64_t all = place(sum.two_shot ? 0 : rows(sum) * sum.ranks * l.chunk_bytes);
  const int64_t where = place(sum.two_shot ? 0 : rows(sum) * kWhereBytes);
  const int64_t work =
      place(std::max({cuda::workspace_bytes(l, sum.batch, 0, true), cuda::workspace_bytes(l, sum.batch, 1, false),
                      sum.two_shot ? 0 : cuda::workspace_bytes(l, 1, sum.ranks, false)}));
  const int64_t kept = bytes;
  for (const Outgoing& o : outgoing) {
    for (const Copy& copy : o.copies) place(copy.bytes);
  }
  void* block = nullptr;
  const auto size = static_cast<size_t>(std::max(bytes, kLine));
  if (!ok("cudaMallocFromPoolAsync", cudaMallocFromPoolAsync(&block, size, streams_.blocks, stream_))) return false;
  block_ = static_cast<uint8_t*>(block);
  all_ = block_ + all, workspace_ = block_ + work, kept_ = block_ + kept;
  where_ = reinterpret_cast<int32_t*>(block_ + where);
  return true;
}

bool Gpu::copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return bytes == 0 ||
         ok("cudaMemcpyAsync", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}

void Gpu::encode(const Allreduce& sum, const Allreduce::Inputs& first, std::vector<Outgoing> outgoing) {
  if (!ok(streams_.status) || !allocate(sum, outgoing)) return;
  Encode e = sum.encoding(first, sum.batch, block_);
  e.workspace = workspace_;
  if (!ok(cuda::encode(e, stream_))) return;
  uint8_t* kept = kept_;
  for (const Outgoing& o : outgoing) {
    for (const Copy& c : o.copies) {
      if (!copy(kept, c.there, c.bytes, stream_)) return;
      kept += whole_lines(c.bytes);
    }
  }
  if (!sum.two_shot && !say_where(sum)) return;
  if (!order(stream_, streams_.out)) return;
  kept = kept_;
  for (Outgoing& o : outgoing) {
    if (o.payload != nullptr && !copy(o.payload, payload(sum, o.message, o.chunk), o.bytes, streams_.out)) return;
    for (const Copy& c : o.copies) {
      if (!copy(c.here, kept, c.bytes, streams_.out)) return;
      kept += whole_lines(c.bytes);
    }
    if (!call(streams_.out, std::move(o.ready))) return;
  }
}

bool Gpu::say_where(const Allreduce& sum) {
  where_here_ = pinned_workspaces().take(rows(sum) * kWhereBytes);
  if (where_here_ == nullptr) return ok("cudaHostAlloc", cudaErrorMemoryAllocation);
  auto* const where = reinterpret_cast<int32_t*>(where_here_.get());
  for (int64_t row = 0; row < rows(sum); ++row) {
    where[2 * row] = static_cast<int32_t>(row % sum.layout.chunks());
    where[2 * row + 1] = 0;
  }
  return copy(where_, where, rows(sum) * kWhereBytes, stream_);
}

void Gpu::take(const Allreduce& sum, int64_t message, int64_t chunk, const uint8_t* payload, int64_t bytes) {
  if (!ok("cudaSetDevice", cudaSetDevice(ordinal_))) return;
  uint8_t* const to = sum.two_shot
                          ? this->payload(sum, message, chunk)
                          : all_ + (message * sum.layout.chunks() + chunk) * sum.ranks * sum.layout.chunk_bytes;
  copy(to, payload, bytes, streams_.in);  // after the copies out of the chunk, as its sum came later
}

cuda::Status Gpu::load(const Layout& layout, int64_t batch, bool two_shot, bool feedback) {
  const cuda::Loading loading;  // nothing reads the buffers
  std::vector<void*> leaves(layout.leaves.size());
  std::vector<float*> floats(leaves.size());
  Encode e{layout, batch};
  e.leaves = leaves.data();
  if (feedback) e.residuals = e.new_residuals = floats.data();
  if (const auto status = cuda::encode(e, nullptr); status.call != nullptr) return status;
  Decode d{layout, batch};
  d.leaves = leaves.data();
  if (two_shot) return cuda::decode(d, nullptr);
  Reduce r{layout, 1, 1};
  r.leaves = floats.data();
  return cuda::reduce(r, nullptr);
}

std::pair<std::shared_ptr<Running>, Gpu::Trouble> Gpu::begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce,
                                                             const Allreduce::Inputs& first) {
  auto& gpu = static_cast<Gpu&>(*allreduce.device);
  auto running = tcp::begin(net, std::move(group), std::move(allreduce), first);
  const cuda::Status failure = gpu.status();
  if (failure.call != nullptr) give_up(*net, running);
  return {std::move(running), {std::nullopt, failure}};
}

cuda::Status Gpu::write(uint64_t ticket, int64_t batch, uint32_t* words) {
  const int64_t bytes = batch * kTicketBytes;
  ticket_ = pinned_workspaces().take(bytes);
  if (ticket_ == nullptr) return {"cudaHostAlloc", cudaErrorMemoryAllocation};
  write_ticket(ticket, batch, reinterpret_cast<uint32_t*>(ticket_.get()));
  copy(words, ticket_.get(), bytes, stream_);
  return status();
}

Gpu::Trouble Gpu::end(const std::shared_ptr<Net>& net, std::shared_ptr<Running> running,
                      const Allreduce::Outputs& first, cudaStream_t stream) {
  auto& gpu = static_cast<Gpu&>(*asked(*running).device);
  const auto done = std::make_shared<std::promise<Status>>();
  auto waiting = done->get_future();
  tcp::end(running, [done](const Status& status) { done->set_value(status); });
  // Copies that fail tell nobody.
  while (waiting.wait_for(kLook) != std::future_status::ready) {
    if (const cuda::Status failure = gpu.status(); failure.call != nullptr) {
      give_up(*net, running);
      return {std::nullopt, failure};
    }
  }
  const Status status = waiting.get();
  const bool is_last = status ? gpu.order(gpu.streams_.out, gpu.streams_.in) && gpu.drop(running, gpu.streams_.in)
                              : gpu.finish(running, first, stream);
  if (is_last) return {status, {}};
  give_up(*net, running);
  return {status, gpu.status()};
}

bool Gpu::finish(const std::shared_ptr<Running>& running, const Allreduce::Outputs& first, cudaStream_t stream) {
  if (status().call != nullptr || !order(streams_.in, stream) || !decode(asked(*running), first, stream)) return false;
  for (const Copy& c : replaced(*running, first)) {
    if (!copy(c.there, c.here, c.bytes, stream)) return false;
  }
  return drop(running, stream);
}

bool Gpu::drop(const std::shared_ptr<Running>& running, cudaStream_t stream) {
  const auto drops = [last = running]() mutable { others().run([last = std::move(last)] {}); };
  return ok("cudaFreeAsync", cudaFreeAsync(block_, stream)) && order(stream, streams_.last) &&
         call(streams_.last, drops);
}

bool Gpu::decode(const Allreduce& sum, const Allreduce::Outputs& first, cudaStream_t stream) {
  const Layout& l = sum.layout;
  if (sum.two_shot) {
    Decode d{l, sum.batch};
    d.payload = block_;
    d.leaves = first.results.data();
    d.workspace = workspace_;
    return ok(cuda::decode(d, stream));
  }
  for (int64_t row = 0; row < rows(sum); ++row) {
    std::vector<float*> leaves = first.sums;
    for (size_t i = 0; i < leaves.size(); ++i) leaves[i] += row / l.chunks() * l.leaves[i].size;
    Reduce r{l, 1, sum.ranks};
    r.payloads = all_ + row * sum.ranks * l.chunk_bytes;
    r.where = where_ + 2 * row;
    r.divisor = sum.divisor;
    r.leaves = leaves.data();
    r.leaf_ids = sum.ids.data();
    r.workspace = workspace_;
    if (!ok(cuda::reduce(r, stream))) return false;
  }
  return true;
}

cuda::Status Gpu::status() {
  for (const cudaStream_t stream : {streams_.out, streams_.in}) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady)
      cudaGetLastError();  // it counts as an error of this thread
    else
      ok("cudaStreamQuery", error);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

bool Gpu::ok(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (status_.error == cudaSuccess) status_ = {call, error};
  return false;
}

bool Gpu::order(cudaStream_t earlier, cudaStream_t later) {
  cudaEvent_t event = nullptr;
  return ok("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) &&
         ok("cudaEventRecord", cudaEventRecord(event, earlier)) &&
         ok("cudaStreamWaitEvent", cudaStreamWaitEvent(later, event, 0)) &&
         ok("cudaEventDestroy", cudaEventDestroy(event));
}

bool Gpu::call(cudaStream_t stream, std::function<void()> function) {
  using Function = std::function<void()>;
  const auto run = [](void* p) {
    const std::unique_ptr<Function> function(static_cast<Function*>(p));
    (*function)();
  };
  auto owned = std::make_unique<Function>(std::move(function));
  if (!ok("cudaLaunchHostFunc", cudaLaunchHostFunc(stream, run, owned.get()))) return false;
  owned.release();
  return true;
}

Gpu::Streams& Gpu::streams_of(int32_t ordinal) {
  static std::mutex mutex;
  static auto& all = *new std::map<int32_t, Streams>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = all.try_emplace(ordinal);
  Streams& s = found->second;
  if (!is_new) return s;
  const auto made = [&](const char* call, cudaError_t error) {
    if (error != cudaSuccess && s.status.call == nullptr) s.status = {call, error};
  };
  for (cudaStream_t* each : {&s.out, &s.in, &s.last})
    made("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(each, cudaStreamNonBlocking));
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = ordinal;
  made("cudaMemPoolCreate", cudaMemPoolCreate(&s.blocks, &props));
  uint64_t everything = UINT64_MAX;  // blocks come and go with each sum, so the pool keeps their memory
  if (s.status.call == nullptr)
    made("cudaMemPoolSetAttribute", cudaMemPoolSetAttribute(s.blocks, cudaMemPoolAttrReleaseThreshold, &everything));
  return s;
}

uint8_t* Gpu::payload(const Allreduce& sum, int64_t message, int64_t chunk) const {
  return block_ + (message * sum.layout.chunks() + chunk) * sum.layout.chunk_bytes;
}

}  // namespace jaxcgx::tcp
