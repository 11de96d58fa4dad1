// Sums over TCP of messages that a GPU has, on the emulator: the bytes of the same sums of messages in this process's
// memory, and the errors if a call of CUDA fails or another process does. And exchanges over shared memory.
#include <cuda_runtime.h>

#include <thread>

#include "cuda_message.h"
#include "exchanges.h"
#include "nets.h"
#include "shm/gpu.h"
#include "tcp/gpu.h"

using namespace jaxcgx;
using namespace jaxcgx::test;

namespace {

// Memory of the GPU, with a copy of some bytes. The emulator's memory is the processor's.
class OnGpu {
 public:
  explicit OnGpu(const Memory& from) : size_(from.size()) {
    void* data = nullptr;
    CHECK(cudaMalloc(&data, std::max<size_t>(size_, 1)) == cudaSuccess, "cudaMalloc");
    data_ = {data, cudaFree};
    std::memcpy(data, from.data(), size_);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  bool fill(int value, cudaStream_t stream) const {
    return cudaMemsetAsync(data_.get(), value, size_, stream) == cudaSuccess;
  }
  Memory copy() const {
    Memory m(static_cast<int64_t>(size_));
    std::memcpy(m.data(), data_.get(), size_);
    return m;
  }

 private:
  size_t size_;
  std::shared_ptr<void> data_;
};

using OnGpus = std::vector<OnGpu>;
OnGpus on_gpu(const std::vector<Memory>& all) {
  OnGpus found;
  for (const Memory& m : all) found.emplace_back(m);
  return found;
}
template <class T>
std::vector<T*> pointers(const OnGpus& all) {
  std::vector<T*> found;
  for (const OnGpu& each : all) found.push_back(each.as<T>());
  return found;
}

struct Asked {
  Codec codec;
  std::vector<Leaf> shapes;
  int64_t ranks = 2, batch = 1, pieces = 1;
  std::vector<int64_t> parents = {};  // empty: one_shot
  bool own = false, feedback = false, sum_feedback = false;
  float divisor = 1.0f;
  bool late = false;  // all payloads on their way to a sum are

  int64_t parts() const { return parents.empty() ? 1 : static_cast<int64_t>(parents.size()) / ranks; }
};

// Each rank is the root of a tree, and the parent of all others.
std::vector<int64_t> all_roots(int64_t ranks) {
  std::vector<int64_t> parents;
  for (int64_t root = 0; root < ranks; ++root) {
    for (int64_t rank = 0; rank < ranks; ++rank) parents.push_back(rank == root ? -1 : root);
  }
  return parents;
}

// What a rank gives and gets.
struct Rank {
  Message m;
  std::vector<Memory> residuals;  // the new ones
  std::vector<Memory> out;
  Memory sum_keys, hop_keys;

  Rank(const Asked& k, uint64_t seed) : Rank(k, Random{seed}, Random{99}) {}
  Rank(const Asked& k, Random own, Random same)
      : m(message_of({k.codec, k.shapes, k.parts() * k.pieces, k.batch, k.ranks, k.feedback, 0, true}, own)),
        sum_keys(4 * kKeyWords * k.batch),
        hop_keys(4 * kKeyWords * k.batch) {
    for (size_t i = 0; i < k.shapes.size(); ++i) {
      const int64_t size = k.batch * k.shapes[i].size;
      m.ids[i] = static_cast<int64_t>(i);
      if (k.feedback) {
        m.residuals.push_back(as_leaf(DType::kF32, similar_numbers(size, own)));
        residuals.emplace_back(4 * size, uint8_t{0x54});
      }
      out.emplace_back(size * (k.parents.empty() ? 4 : size_of(k.shapes[i].dtype)), uint8_t{0x54});
    }
    for (const Memory* keys : {&sum_keys, &hop_keys}) {
      for (size_t i = 0; i < keys->size() / 4; ++i) {
        const auto word = static_cast<uint32_t>(same.next());
        std::memcpy(keys->data() + 4 * i, &word, 4);
      }
    }
  }

  tcp::Allreduce sum(const Asked& k, int64_t rank, tcp::Workspaces& memory) const {
    tcp::Allreduce a{m.layout, k.ranks, k.batch, !k.parents.empty()};
    a.parents = k.parents;
    a.own = k.own, a.feedback = k.feedback, a.sum_feedback = k.sum_feedback, a.divisor = k.divisor;
    if (k.late) a.deadline = std::chrono::microseconds(0);
    a.ids = m.ids;
    a.workspace = memory.take(a.workspace_bytes(rank));
    return a;
  }
};

template <class Buffers>
tcp::Allreduce::Outputs outputs_of(const Asked& k, const Buffers& out, const Buffers& residuals) {
  if (k.parents.empty()) return {pointers<float>(out), {}, pointers<float>(residuals)};
  return {{}, pointers<void>(out), pointers<float>(residuals)};
}

std::string on_cpu(const Asked& k, const std::shared_ptr<Net>& net, int64_t process, Rank& r) {
  static auto& memory = *new std::shared_ptr<tcp::Workspaces>(std::make_shared<tcp::Workspaces>());
  const bool noise = k.codec.stochastic;
  const auto* sum_key = reinterpret_cast<const uint32_t*>(r.sum_keys.data());
  const auto* hop_key = reinterpret_cast<const uint32_t*>(r.hop_keys.data());
  const auto running =
      tcp::begin(net, group(first(k.ranks), process), r.sum(k, process, *memory),
                 {pointers<const void>(r.m.leaves), pointers<const float>(r.m.residuals), pointers<float>(r.residuals),
                  noise ? r.m.keys.data() : nullptr, noise && !k.parents.empty() ? sum_key : nullptr,
                  noise && !k.parents.empty() ? hop_key : nullptr},
                 one_thread());
  Waiter waiter;
  tcp::end(running, outputs_of(k, r.out, r.residuals), waiter.done());
  return waiter.wait();
}

std::string text_of(const tcp::Gpu::Trouble& trouble) {
  return trouble.status ? trouble.status->message : trouble.cuda.call != nullptr ? trouble.cuda.call : "";
}

// The GPU may still use buffers when there is an error.
struct Streams {
  std::vector<cudaStream_t> all;
  ~Streams() {
    for (const cudaStream_t each : all) cudaStreamSynchronize(each), cudaStreamDestroy(each);
  }
};

// A sum that has begun. If it is never ended, it is kept, as its ticket would keep it.
struct Begun {
  std::shared_ptr<tcp::Running> running;
  bool ended = false;
  ~Begun() {
    static std::mutex mutex;
    static auto& kept = *new std::vector<std::shared_ptr<tcp::Running>>;
    std::lock_guard<std::mutex> lock(mutex);
    if (!ended) kept.push_back(running);
  }
};

struct Options {
  bool apart = false;                                 // another stream ends the sum, as the program of a later step may
  std::function<void()> ready = [] {};                // called before begin
  std::function<bool()> begun = [] { return true; };  // called after begin: whether to end the sum
};

std::string on_gpu(const Asked& k, const std::shared_ptr<Net>& net, int64_t process, Rank& r, const Options& options) {
  cudaStream_t stream = nullptr, later = nullptr;
  if (cudaSetDevice(static_cast<int>(process)) != cudaSuccess) return "cudaSetDevice";
  for (cudaStream_t* each : {&stream, &later}) {
    if (cudaStreamCreateWithFlags(each, cudaStreamNonBlocking) != cudaSuccess) return "cudaStreamCreateWithFlags";
  }
  const OnGpus leaves = on_gpu(r.m.leaves), old = on_gpu(r.m.residuals), residuals = on_gpu(r.residuals),
               out = on_gpu(r.out);
  Memory first_keys(static_cast<int64_t>(4 * r.m.keys.size()));
  std::memcpy(first_keys.data(), r.m.keys.data(), first_keys.size());
  const OnGpu keys(first_keys), sum_keys(r.sum_keys), hop_keys(r.hop_keys);
  const bool noise = k.codec.stochastic, two_shot = !k.parents.empty();
  const Streams streams{{stream, later}};
  tcp::Allreduce sum = r.sum(k, process, tcp::pinned_workspaces());
  sum.device = std::make_shared<tcp::Gpu>(static_cast<int32_t>(process), stream);
  check(tcp::Gpu::load(r.m.layout, k.batch, two_shot, k.feedback));
  options.ready();
  auto [running, trouble] = tcp::Gpu::begin(
      net, group(first(k.ranks), process), std::move(sum),
      {pointers<const void>(leaves), pointers<const float>(old), pointers<float>(residuals),
       noise ? keys.as<const uint32_t>() : nullptr, noise && two_shot ? sum_keys.as<const uint32_t>() : nullptr,
       noise && two_shot ? hop_keys.as<const uint32_t>() : nullptr});
  if (trouble) return text_of(trouble);
  Begun sum_begun{running};
  // The program uses its buffers for other data.
  for (const OnGpus* all : {&leaves, &old}) {
    for (const OnGpu& each : *all) {
      if (!each.fill(0x11, stream)) return "cudaMemsetAsync";
    }
  }
  for (const OnGpu* each : {&keys, &sum_keys, &hop_keys}) {
    if (!each->fill(0x11, stream)) return "cudaMemsetAsync";
  }
  if (options.apart && cudaStreamSynchronize(stream) != cudaSuccess) return "cudaStreamSynchronize";
  if (!options.begun()) return "not ended";
  const cudaStream_t last = options.apart ? later : stream;
  sum_begun.ended = true;
  if (const auto failed = tcp::Gpu::end(net, running, outputs_of(k, out, residuals), last)) return text_of(failed);
  if (cudaStreamSynchronize(last) != cudaSuccess) return "cudaStreamSynchronize";
  for (size_t i = 0; i < out.size(); ++i) r.out[i] = out[i].copy();
  for (size_t i = 0; i < residuals.size(); ++i) r.residuals[i] = residuals[i].copy();
  return "";
}

template <class F>
std::vector<Rank> run(const Asked& k, const std::vector<std::shared_ptr<Net>>& nets, F f) {
  std::vector<Rank> ranks;
  for (int64_t rank = 0; rank < k.ranks; ++rank) ranks.emplace_back(k, 7 + static_cast<uint64_t>(rank));
  each_rank(k.ranks, [&](int64_t rank) { f(nets[static_cast<size_t>(rank)], rank, ranks[static_cast<size_t>(rank)]); });
  return ranks;
}

void compare_sums(const Asked& k, const std::vector<std::shared_ptr<Net>>& nets, bool apart) {
  const auto expected =
      run(k, nets, [&](const auto& net, int64_t rank, Rank& r) { CHECK_NO_ERROR(on_cpu(k, net, rank, r)); });
  const auto got =
      run(k, nets, [&](const auto& net, int64_t rank, Rank& r) { CHECK_NO_ERROR(on_gpu(k, net, rank, r, {apart})); });
  for (size_t rank = 0; rank < got.size(); ++rank) {
    const std::string context = describe(got[rank].m.layout) + (k.parents.empty() ? " one_shot" : " two_shot") +
                                " rank " + std::to_string(rank) + (k.own ? " own" : "") +
                                (k.feedback ? " feedback" : "");
    for (size_t i = 0; i < k.shapes.size(); ++i) {
      const DType dtype = k.parents.empty() ? DType::kF32 : k.shapes[i].dtype;
      CHECK(same_numbers(dtype, got[rank].out[i], expected[rank].out[i]), context + " leaf " + std::to_string(i));
      if (k.feedback)
        CHECK(same_numbers(DType::kF32, got[rank].residuals[i], expected[rank].residuals[i]), context + " residual");
    }
  }
}

std::vector<Leaf> leaves_of(Random& r) {
  std::vector<Leaf> shapes;
  for (int64_t i = 0, n = 1 + r.below(4); i < n; ++i)
    shapes.push_back({r.below(4) == 0 ? 0 : r.below(3000), r.pick(kDTypes)});
  return shapes;
}

// Sums that end give back all memory of the GPU. After a failure of CUDA, its memory is given up.
void check_memory() {
  std::shared_lock<std::shared_mutex> lock(cuda_emulator::allocations_mutex);
  for (const auto& [at, allocation] : cuda_emulator::allocations) CHECK(!allocation.device, "a block is left");
}

void test_bytes() {
  Random r{5};
  std::vector<Codec> all = codecs(64);
  for (const Codec& codec : codecs_without_buckets()) all.push_back(codec);
  for (const int64_t ranks : {2, 3}) {
    const auto nets = connected(ranks);
    for (size_t i = 0; i < all.size(); i += everything() ? 1 : 29) {
      for (int kind = 0; kind < 4; ++kind) {
        Asked k{all[(i + static_cast<size_t>(kind)) % all.size()], leaves_of(r), ranks};
        k.batch = 1 + r.below(2);
        k.pieces = 1 + r.below(3);
        k.divisor = r.pick({1.0f, 2.0f, 3.0f});
        if (kind == 1) k.parents = all_roots(ranks);
        if (kind == 2) k.parents = ranks == 2 ? std::vector<int64_t>{-1, 0} : std::vector<int64_t>{-1, 0, 1, 1, 2, -1};
        if (kind == 3) k.parents = all_roots(ranks), k.own = true;
        k.feedback = kind < 3 && r.below(2) == 0;
        k.sum_feedback = k.feedback && kind > 0;
        k.late = kind > 0 && r.below(2) == 0;
        compare_sums(k, nets, r.below(2) == 0);
      }
    }
  }
}

// Processes that last as long as the program, because a sum that failed may be the last to own one.
std::vector<std::shared_ptr<Net>> lasting(int64_t processes) {
  static auto& all = *new std::vector<std::shared_ptr<Net>>;
  auto nets = connected(processes);
  all.insert(all.end(), nets.begin(), nets.end());
  return nets;
}

Asked some(int64_t ranks) {
  Asked k{{Kind::kMaxMin, 4, 64, true}, {{900, DType::kF32}, {70, DType::kBF16}, {1, DType::kF32}}, ranks};
  k.pieces = 2;
  k.parents = all_roots(ranks);
  k.feedback = k.sum_feedback = true;
  return k;
}

void test_orders() {
  const auto nets = connected(2);
  for (int i = 0; i < (everything() ? 1000 : 20); ++i) compare_sums(some(2), nets, i % 2 == 0);
}

// Every call of a sum fails once. Whoever makes it says so. The other rank succeeds, or says that this one has left.
void test_calls_that_fail() {
  const Asked k = some(2);
  int64_t reached = 0;
  for (int64_t n = 1; n <= 300; n += everything() ? 1 : n < 60 ? 2 : 11) {
    const auto nets = lasting(2);
    std::atomic<int64_t> missing{2};
    std::string errors[2];
    run(k, nets, [&](const auto& net, int64_t rank, Rank& r) {
      const auto ready = [&] {
        for (--missing; missing > 0;) std::this_thread::sleep_for(1ms);  // for the other rank
        if (rank == 0) cuda_emulator::fail(n, cudaErrorLaunchFailure);
      };
      errors[rank] = on_gpu(k, net, rank, r, {n % 2 == 0, ready});
    });
    cuda_emulator::fail(0, cudaSuccess);
    int64_t calls = 0;
    for (const std::string& error : errors) {
      const bool of_cuda = error.compare(0, 4, "cuda") == 0 || has(error, "kernel");
      calls += of_cuda;
      CHECK(error.empty() || of_cuda || has(error, "has ended or left"), error);
    }
    CHECK(calls <= 1, errors[0] + " and " + errors[1]);
    reached += calls;
  }
  CHECK(reached > 20, std::to_string(reached));
}

// A process dies after it has begun: with or without its payloads on the way.
void test_a_process_that_leaves() {
  const Asked k = some(3);
  for (int i = 0; i < 10; ++i) {
    const auto nets = lasting(3);
    run(k, nets, [&](const auto& net, int64_t rank, Rank& r) {
      const auto begun = [&] {
        if (rank != 1) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(i % 3));
        net->leave();
        return false;
      };
      const std::string error = on_gpu(k, net, rank, r, {false, [] {}, begun});
      if (rank != 1) CHECK(has(error, "process 1"), error);
    });
  }
}

// Runs an exchange over shared memory of arrays in the GPU's memory. `fails`: its first call of CUDA fails.
std::string on_gpu(shm::Ring& ring, const shm::Exchange& e, bool fails) {
  Memory in(e.bytes * (shm::scatters(e.operation) ? ring.ranks() : 1)),
      out(e.bytes * (shm::gathers(e.operation) ? ring.ranks() : 1));
  if (in.size() > 0) std::memcpy(in.data(), e.in, in.size());
  const OnGpu from(in), to(out);
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "");
  if (fails) cuda_emulator::fail(1, cudaErrorLaunchFailure);  // other ranks call CUDA at the same time
  const auto [status, cuda] = shm::run(ring, {e.operation, e.argument, e.bytes, from.as<uint8_t>(), to.as<uint8_t>()},
                                       tcp::pinned_workspaces(), stream);
  cudaStreamDestroy(stream);
  const Memory found = to.copy();
  if (found.size() > 0) std::memcpy(e.out, found.data(), found.size());
  return status ? status->message : cuda.call != nullptr ? cuda.call : "";
}

// A call of CUDA that fails is an error of its rank, which leaves the other one.
void test_shared_memory() {
  const Runner runner = [](shm::Ring& ring, const shm::Exchange& e) { return on_gpu(ring, e, false); };
  for (int64_t ranks = 1; ranks <= 3; ++ranks) {
    const auto all = [&](shm::Ring& ring, int64_t rank) { return run_all(ring, rank, runner); };
    for (const std::string& message : on_ranks(ranks, all)) CHECK_NO_ERROR(message);
  }
  const auto fails = [](shm::Ring& ring, int64_t rank) {
    const Runner failing = [](shm::Ring& ring, const shm::Exchange& e) { return on_gpu(ring, e, true); };
    return test::run(ring, rank, shm::Operation::kAllGather, 0, 300000, 0, rank == 1 ? failing : run_here);
  };
  const auto messages = on_ranks(2, fails);
  CHECK(has(messages[0], "has left") && messages[1].rfind("cuda", 0) == 0, messages[0] + messages[1]);
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions() {
  return "leak:cudaMalloc\nleak:cudaEventCreateWithFlags\nleak:cudaStreamCreateWithFlags";
}
#endif

int main() {
  test_shared_memory();
  test_bytes();
  test_orders();
  check_memory();
  test_calls_that_fail();
  test_a_process_that_leaves();
  return finish();
}
