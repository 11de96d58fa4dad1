// Reads PTX as nvcc writes it, one kernel after another, and looks every instruction up in the table of
// instructions.cc.
#include <algorithm>
#include <charconv>
#include <map>

#include "kernel.h"

namespace jaxcgx::ptx {
namespace {

using Text = std::string_view;

[[noreturn]] void fail(const char* what, Text where) {
  std::fprintf(stderr, "ptx: %s: %.*s\n", what, static_cast<int>(where.size()), where.data());
  std::abort();
}

constexpr const char* kSpace = " \t\r\n";
Text trim(Text s) {
  const size_t first = s.find_first_not_of(kSpace);
  return first == Text::npos ? Text() : s.substr(first, s.find_last_not_of(kSpace) + 1 - first);
}
// Removes the text before one of these characters, and the character, and returns the text.
Text take(Text& text, const char* ends) {
  const size_t end = text.find_first_of(ends);
  const Text taken = text.substr(0, end);
  text = end == Text::npos ? Text() : text.substr(end + 1);
  return trim(taken);
}
std::vector<Text> split(Text text, const char* at) {
  std::vector<Text> parts;
  while (!text.empty()) {
    if (const Text part = take(text, at); !part.empty()) parts.push_back(part);
  }
  return parts;
}

uint64_t number(Text s, int base = 10) {
  const bool negative = !s.empty() && s[0] == '-';
  const Text digits = s.substr(negative);
  uint64_t x = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), x, base);
  if (error != std::errc() || end != digits.data() + digits.size()) fail("not a number", s);
  return negative ? 0 - x : x;
}
// 12, -1, 0x1F; 0f3F800000 and 0d3FF0000000000000 as the bits of a float and a double.
uint64_t constant(Text s) {
  const bool coded = s.size() > 2 && s[0] == '0' && Text("xfFdD").find(s[1]) != Text::npos;
  return coded ? number(s.substr(2), 16) : number(s);
}

// The offsets of shared memory's variables.
struct Shared {
  std::map<Text, uint32_t> at;
  uint32_t bytes = 0;

  // .shared .align 4 .b8 name[64]
  void add(Text declaration) {
    const std::vector<Text> words = split(declaration, " \t[]");
    if (words.size() < 5 || words[1] != ".align") fail("unknown variable", declaration);
    const auto align = static_cast<uint32_t>(number(words[2])),
               size = static_cast<uint32_t>(number(words[3].substr(2)) / 8),  // 1 for .b8
        count = words.size() > 5 ? static_cast<uint32_t>(number(words[5])) : 1;
    at[words[4]] = (bytes + align - 1) / align * align;
    bytes = at[words[4]] + size * count;
  }
};

// Translates one kernel: `Kernel k = Reader(...).read(body)`.
class Reader {
 public:
  // header: .entry name(.param .align 8 .b8 name_param_0[32680], ...)
  Reader(Text header, const Shared& shared) : shared_(shared) {
    const std::vector<Text> words = split(header, " \t\r\n(),[]");
    kernel_.name = words[std::find(words.begin(), words.end(), ".entry") - words.begin() + 1];
    kernel_.registers = kFirstParameter;
    for (const Text word : words) {
      if (word.find("_param_") != Text::npos) names_[word] = kernel_.registers++;
    }
    kernel_.parameters = kernel_.registers - kFirstParameter;
    names_.insert({{"_", kSink},
                   {"%tid.x", kThread},
                   {"%ntid.x", kThreads},
                   {"%ctaid.x", kBlockX},
                   {"%ctaid.y", kBlockY},
                   {"%nctaid.x", kBlocksX},
                   {"%nctaid.y", kBlocksY}});
  }

  Kernel read(Text body) {
    while (!(body = trim(body)).empty()) {
      if (body[0] == '{' || body[0] == '}') {  // of inline assembly
        body.remove_prefix(1);
      } else if (const size_t end = body.find_first_of(":;"); end == Text::npos) {
        fail("unknown text", body);
      } else if (body[end] == ':') {
        labels_[take(body, ":")] = static_cast<uint32_t>(kernel_.code.size());
      } else if (const Text statement = take(body, ";"); statement[0] == '.') {
        declare(statement);
      } else {
        instruct(statement);
      }
    }
    for (const auto& [index, label] : branches_) {
      if (labels_.count(label) == 0) fail("no such label", label);
      kernel_.code[index].target = labels_[label];
    }
    kernel_.shared_bytes = shared_.bytes;
    return std::move(kernel_);
  }

 private:
  void declare(Text statement) {
    const std::vector<Text> words = split(statement, " \t[]<>");
    if (words[0] == ".reg") {  // .reg .b32 %r<12>
      names_[words[2]] = kernel_.registers;
      kernel_.registers += words.size() > 3 ? static_cast<uint32_t>(number(words[3])) : 1;
    } else if (words[0] == ".shared") {
      shared_.add(statement);
    } else if (words[0] == ".local") {  // .local .align 16 .b8 name[128]
      names_[words[4]] = kLocal;
      kernel_.local_bytes = static_cast<uint32_t>(number(words[5]));
    } else if (words[0] != ".pragma") {
      fail("unknown directive", statement);
    }
  }

  // @%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+8]
  void instruct(Text statement) {
    Instruction i = {};
    kernel_.texts.push_back(statement);
    i.guard = kAlways_;
    i.expected = true;
    if (statement[0] == '@') {
      Text guard = take(statement, " \t").substr(1);
      i.expected = guard[0] != '!';
      i.guard = operand(guard.substr(!i.expected));
    }
    std::string name(take(statement, " \t\n"));
    statement = trim(statement);
    if (name.rfind("mov", 0) == 0 && statement.find('{') != Text::npos)
      name += statement[0] == '{' ? " split" : " join";
    i.operation = operation_of(name);
    if (i.operation == nullptr) fail("unknown instruction", kernel_.texts.back());
    const std::vector<Text> operands = split(statement, ",{}|");
    if (operands.size() > Instruction::kMostOperands) fail("too many operands", kernel_.texts.back());
    for (size_t k = 0; k < operands.size(); ++k) {
      const Text s = operands[k];
      if (s[0] == '[') {
        const std::vector<Text> parts = split(s, "[+]");
        i.operands[k] = operand(parts[0]);
        if (parts.size() > 1) i.offset = static_cast<int64_t>(number(parts[1]));
      } else if (s[0] == '$') {
        branches_.push_back({kernel_.code.size(), s});
      } else {
        i.operands[k] = operand(s);
      }
    }
    kernel_.code.push_back(i);
  }

  Operand operand(Text s) {
    if (const auto name = names_.find(s); name != names_.end()) return {kRegisters, name->second};
    if (s[0] == '%') {  // %r12 of .reg .b32 %r<20>
      const size_t digits = s.find_last_not_of("0123456789") + 1;
      const auto name = names_.find(s.substr(0, digits));
      if (name == names_.end()) fail("unknown register", s);
      return {kRegisters, name->second + static_cast<uint32_t>(number(s.substr(digits)))};
    }
    const auto variable = shared_.at.find(s);
    return constant_of(variable != shared_.at.end() ? variable->second : constant(s));
  }
  Operand constant_of(uint64_t bits) {
    kernel_.constants.push_back(bits);
    return {kConstants, static_cast<uint32_t>(kernel_.constants.size() - 1)};
  }

  Kernel kernel_;
  Shared shared_;
  std::map<Text, uint32_t> names_, labels_;
  std::vector<std::pair<size_t, Text>> branches_;
  const Operand kAlways_ = constant_of(1);
};

}  // namespace

std::vector<Kernel> translate(Text text) {
  std::vector<Kernel> kernels;
  Shared shared;  // of all kernels of the file
  while (!text.empty()) {
    const size_t entry = text.find(".entry"), variable = text.find(".shared");
    if (variable < entry) {
      text.remove_prefix(variable);
      shared.add(take(text, ";"));
      continue;
    }
    if (entry == Text::npos) break;
    text.remove_prefix(entry);
    const Text header = take(text, ")");
    take(text, "{");
    // A function's closing brace is alone on its line.
    const size_t end = text.find("\n}");
    kernels.push_back(Reader(header, shared).read(text.substr(0, end)));
    text.remove_prefix(end + 2);
  }
  return kernels;
}

}  // namespace jaxcgx::ptx
