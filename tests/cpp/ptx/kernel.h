// PTX kernels, and their translation: for each instruction a C++ function and the places of its operands.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace jaxcgx::ptx {

struct Thread;
struct Instruction;
using Operation = void (*)(Thread&, const Instruction&);

// A register or a constant. Each has 64 bits, of which an instruction uses the low ones.
enum Bank : uint32_t { kRegisters, kConstants };
struct Operand {
  uint32_t bank : 1, index : 31;
};

struct Instruction {
  static constexpr int kMostOperands = 6;
  Operation operation;
  int64_t offset;                   // of an address
  Operand operands[kMostOperands];  // in the order in which PTX has them
  uint32_t target;                  // of a branch: the index of an instruction
  Operand guard;                    // the instruction runs if this is `expected`
  bool expected;
};

// Registers that have values when a kernel begins.
enum Given : uint32_t { kSink, kThread, kThreads, kBlockX, kBlockY, kBlocksX, kBlocksY, kLocal, kFirstParameter };

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::string_view> texts;  // of the instructions
  std::vector<uint64_t> constants;
  uint32_t parameters = 0, registers = 0;
  uint32_t shared_bytes = 0, local_bytes = 0;
  uint64_t launches = 0, instructions = 0;  // kernels that ran, and the instructions of all their threads
};

struct Thread {
  const Kernel* kernel;
  char* shared;
  const uint64_t* banks[2];
  uint64_t* registers;
  const Instruction* next;

  template <class T>
  T get(Operand o) const {
    const uint64_t bits = banks[o.bank][o.index];
    if constexpr (std::is_same_v<T, bool>) {
      return bits != 0;
    } else {
      T x;
      std::memcpy(&x, &bits, sizeof(T));
      return x;
    }
  }
  // Small integers are extended to the width of a register.
  template <class T>
  void set(Operand o, T x) {
    uint64_t bits = 0;
    if constexpr (std::is_integral_v<T>)
      bits = static_cast<uint64_t>(x);
    else
      std::memcpy(&bits, &x, sizeof(T));
    registers[o.index] = bits;
  }
  [[noreturn]] void fail(const Instruction& i, const char* what) const {
    const std::string text(kernel->texts[&i - kernel->code.data()]);
    std::fprintf(stderr, "ptx: %s: %s: %s\n", kernel->name.c_str(), text.c_str(), what);
    std::abort();
  }
};

// Returns the function for an instruction, by its name with all suffixes, or null if the instruction isn't known.
// instructions.cc
Operation operation_of(const std::string& name);

// Returns the kernels of a PTX file, whose text must outlive them. An unknown instruction ends the program.
// translate.cc
std::vector<Kernel> translate(std::string_view text);

}  // namespace jaxcgx::ptx
