// The part of CUDA's runtime that nvcc's object files call. A launch runs the kernel's PTX on the emulator's fibers. So
// launchers and kernels are nvcc's output, with their tables of parameters.
//
// JAXCGX_PTX names the folder with the PTX. At the end the program lists the kernels that ran, with their counts.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <list>
#include <map>

#include "cuda_emulator/cuda_runtime.h"
#include "kernel.h"

namespace jaxcgx::ptx {
namespace {

// Returns the name of the kernel for a function of the host.
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> all;
  return all;
}

// Returns all kernels in the folder's PTX.
class Kernels {
 public:
  explicit Kernels(const char* folder) {
    if (folder == nullptr) fail("JAXCGX_PTX names no folder", "");
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      if (file.path().extension() != ".ptx") continue;
      texts_.push_back(without_comments(file.path()));
      for (Kernel& k : translate(texts_.back())) all_.emplace(k.name, std::move(k));
    }
  }
  ~Kernels() {
    for (const auto& [name, k] : all_) {
      std::printf("ptx: %s: %llu instructions in %llu launches\n", name.c_str(),
                  static_cast<unsigned long long>(k.instructions), static_cast<unsigned long long>(k.launches));
    }
  }
  Kernel& operator[](const std::string& name) {
    const auto found = all_.find(name);
    if (found == all_.end()) fail("no PTX of the kernel", name.c_str());
    return found->second;
  }

 private:
  [[noreturn]] static void fail(const char* what, const char* which) {
    std::fprintf(stderr, "ptx: %s %s\n", what, which);
    std::abort();
  }
  static std::string without_comments(const std::filesystem::path& file) {
    std::ifstream lines(file);
    std::string text;
    for (std::string line; std::getline(lines, line);) text += line.substr(0, line.find("//")) + '\n';
    return text;
  }

  std::list<std::string> texts_;
  std::map<std::string, Kernel> all_;
};

constexpr char kGarbage = 0x7f;  // shared memory begins with this byte: NaNs, and large numbers

// The memory of a block and its threads, for the largest kernel so far. Blocks that take turns share `shared`.
struct Memory {
  std::vector<char> shared;
  std::vector<std::vector<uint64_t>> registers;
  std::vector<std::vector<char>> local;
};

void run_thread(Kernel& k, Memory& memory, void** arguments) {
  const auto& block = *cuda_emulator::state;
  const uint32_t thread = block.current->index.x, index = block.number * block.threads + thread;
  uint64_t* const registers = memory.registers[index].data();
  registers[kThread] = thread;
  registers[kThreads] = blockDim.x;
  registers[kBlockX] = block.index.x, registers[kBlockY] = block.index.y;
  registers[kBlocksX] = gridDim.x, registers[kBlocksY] = gridDim.y;
  registers[kLocal] = reinterpret_cast<uint64_t>(memory.local[index].data());
  for (uint32_t i = 0; i < k.parameters; ++i) registers[kFirstParameter + i] = reinterpret_cast<uint64_t>(arguments[i]);
  Thread t{&k, memory.shared.data(), {registers, k.constants.data()}, registers, k.code.data()};
  uint64_t count = 0;
  for (; const Instruction* i = t.next; ++count) {
    t.next = i + 1;
    if (t.get<bool>(i->guard) == i->expected) i->operation(t, *i);
  }
  k.instructions += count;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* function, void** arguments) {
  static Kernels kernels(std::getenv("JAXCGX_PTX"));
  static Memory memory;
  Kernel& k = kernels[names()[function]];
  ++k.launches;
  memory.registers.resize(std::max<size_t>(memory.registers.size(), config.blockDim.x * cuda_emulator::kProcessors));
  memory.local.resize(memory.registers.size());
  for (auto& registers : memory.registers) registers.resize(std::max<size_t>(registers.size(), k.registers));
  for (auto& local : memory.local) local.resize(std::max<size_t>(local.size(), k.local_bytes));
  const auto begin = [&] { memory.shared.assign(k.shared_bytes, kGarbage); };
  return cuda_emulator::launch(config, function, begin, [&] { run_thread(k, memory, arguments); });
}

}  // namespace
}  // namespace jaxcgx::ptx

extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  jaxcgx::ptx::names()[host] = name;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return jaxcgx::ptx::launch(*config, function, arguments);
}

// The emulator's cudaFuncAttributes is smaller than the toolkit's, in which nvcc's code reads ptxVersion: it stays 0.
cudaError_t cudaFuncGetAttributes(void*, const void* function) {
  cuda_emulator::loaded.insert(function);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

// For kernel<<<...>>>(), which the launchers don't use.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t __cudaGetKernel(void**, const void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, void*) { std::abort(); }

}  // extern "C"
