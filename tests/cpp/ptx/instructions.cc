// The instructions of PTX that the kernels use, as C++. An instruction is fused or flushes to zero only if its name
// says so. The table has no instruction without a rounding mode, and none with .ftz or .approx.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "cuda_emulator/cuda_runtime.h"
#include "kernel.h"

namespace jaxcgx::ptx {
namespace {

using Table = std::map<std::string, Operation>;

// The only NaN that a GPU's arithmetic makes.
constexpr uint32_t kNaN = 0x7fffffff;
float arithmetic(float x) { return x == x ? x : std::bit_cast<float>(kNaN); }
double arithmetic(double x) { return x == x ? x : std::bit_cast<double>(0x7fffffffffffffff); }

// An instruction that sets a register to f(the other operands).
template <class To, class... From, class F>
Operation sets(F) {
  static_assert(std::is_empty_v<F>, "a lambda, which F() makes anew");
  return [](Thread& t, const Instruction& i) {
    const auto call = [&]<size_t... k>(std::index_sequence<k...>) { return F()(t.get<From>(i.operands[1 + k])...); };
    t.set<To>(i.operands[0], static_cast<To>(call(std::index_sequence_for<From...>())));
  };
}

template <class T>
std::string suffix(char kind) {
  return std::string(".") + kind + std::to_string(8 * sizeof(T));
}
template <class T>
std::string suffix() {
  if constexpr (std::is_floating_point_v<T>)
    return suffix<T>('f');
  else
    return suffix<T>(std::is_signed_v<T> ? 's' : 'u');
}
// Calls f with a zero of each type.
template <class... T, class F>
void each(F f) {
  (f(T()), ...);
}
template <class F>
void each_integer(F f) {
  each<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(f);
}

template <class T>
T shift_left(T x, uint32_t by) {
  return by < 8 * sizeof(T) ? static_cast<T>(x << by) : T(0);
}
template <class T>
T shift_right(T x, uint32_t by) {
  return static_cast<T>(x >> std::min<uint32_t>(by, 8 * sizeof(T) - 1)) >>
         (std::is_unsigned_v<T> && by >= 8 * sizeof(T));
}

void add_integers(Table& table) {
  table["min.s16x2"] = sets<uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b) {
    const auto half = [&](int shift) {
      return static_cast<uint16_t>(std::min(static_cast<int16_t>(a >> shift), static_cast<int16_t>(b >> shift)));
    };
    return static_cast<uint32_t>(half(16)) << 16 | half(0);
  });
  each_integer([&](auto zero) {
    using T = decltype(zero);
    const std::string type = suffix<T>();
    table["add" + type] = sets<T, T, T>([](T a, T b) { return a + b; });
    table["sub" + type] = sets<T, T, T>([](T a, T b) { return a - b; });
    table["mul.lo" + type] =
        sets<T, T, T>([](T a, T b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); });
    table["mad.lo" + type] = sets<T, T, T, T>(
        [](T a, T b, T c) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b) + static_cast<uint64_t>(c); });
    table["div" + type] = sets<T, T, T>([](T a, T b) { return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b); });
    table["rem" + type] = sets<T, T, T>([](T a, T b) { return b == 0 ? a : static_cast<T>(a % b); });
    table["min" + type] = sets<T, T, T>([](T a, T b) { return std::min(a, b); });
    table["max" + type] = sets<T, T, T>([](T a, T b) { return std::max(a, b); });
    table["shr" + type] = sets<T, T, uint32_t>([](T a, uint32_t by) { return shift_right(a, by); });
  });
  each<int16_t, int32_t, int64_t>([&](auto zero) {
    using T = decltype(zero);
    table["neg" + suffix<T>()] = sets<T, T>([](T a) { return -a; });
    table["abs" + suffix<T>()] = sets<T, T>([](T a) { return a < 0 ? -a : a; });
  });
  table["mul.wide.u16"] = sets<uint32_t, uint16_t, uint16_t>([](uint32_t a, uint32_t b) { return a * b; });
  table["mul.wide.s16"] = sets<int32_t, int16_t, int16_t>([](int32_t a, int32_t b) { return a * b; });
  table["mul.wide.u32"] = sets<uint64_t, uint32_t, uint32_t>([](uint64_t a, uint64_t b) { return a * b; });
  table["mul.wide.s32"] = sets<int64_t, int32_t, int32_t>([](int64_t a, int64_t b) { return a * b; });
  table["mul.hi.u32"] = sets<uint32_t, uint32_t, uint32_t>([](uint64_t a, uint64_t b) { return a * b >> 32; });
  table["mul.hi.s32"] = sets<int32_t, int32_t, int32_t>([](int64_t a, int64_t b) { return a * b >> 32; });
}

uint32_t reversed(uint32_t x) {
  uint32_t y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}

void add_bits(Table& table) {
  each<uint16_t, uint32_t, uint64_t>([&](auto zero) {
    using T = decltype(zero);
    const std::string type = suffix<T>('b');
    table["and" + type] = sets<T, T, T>([](T a, T b) { return a & b; });
    table["or" + type] = sets<T, T, T>([](T a, T b) { return a | b; });
    table["xor" + type] = sets<T, T, T>([](T a, T b) { return a ^ b; });
    table["not" + type] = sets<T, T>([](T a) { return ~a; });
    table["shl" + type] = sets<T, T, uint32_t>([](T a, uint32_t by) { return shift_left(a, by); });
    table["bfi" + type] = sets<T, T, T, uint32_t, uint32_t>([](T field, T into, uint32_t at, uint32_t bits) {
      const T mask = shift_left(static_cast<T>(shift_left(T(1), bits) - T(1)), at);
      return (into & static_cast<T>(~mask)) | (shift_left(field, at) & mask);
    });
  });
  table["and.pred"] = sets<bool, bool, bool>([](bool a, bool b) { return a && b; });
  table["or.pred"] = sets<bool, bool, bool>([](bool a, bool b) { return a || b; });
  table["xor.pred"] = sets<bool, bool, bool>([](bool a, bool b) { return a != b; });
  table["not.pred"] = sets<bool, bool>([](bool a) { return !a; });
  // Bit i of the table is the result if the bits of a, b and c form the number i.
  table["lop3.b32"] =
      sets<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b, uint32_t c, uint32_t truth) {
        uint32_t result = 0;
        for (uint32_t i = 0; i < 8; ++i) {
          if (truth >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        }
        return result;
      });
  table["prmt.b32"] = sets<uint32_t, uint32_t, uint32_t, uint32_t>(
      [](uint32_t a, uint32_t b, uint32_t bytes) { return __byte_perm(a, b, bytes); });
  table["popc.b32"] = sets<uint32_t, uint32_t>([](uint32_t a) { return std::popcount(a); });
  table["clz.b32"] = sets<uint32_t, uint32_t>([](uint32_t a) { return std::countl_zero(a); });
  table["brev.b32"] = sets<uint32_t, uint32_t>([](uint32_t a) { return reversed(a); });
  table["bfind.shiftamt.u32"] =
      sets<uint32_t, uint32_t>([](uint32_t a) { return a == 0 ? 0xffffffffu : uint32_t(std::countl_zero(a)); });
}

// Of a number and a NaN, the result is the number. -0 is less than 0.
float smaller(float a, float b) {
  if (a != a || b != b) return arithmetic(a != a ? b : a);
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
float larger(float a, float b) {
  if (a != a || b != b) return arithmetic(a != a ? b : a);
  return a > b || (a == b && std::signbit(b)) ? a : b;
}

void add_floats(Table& table) {
  each<float, double>([&](auto zero) {
    using F = decltype(zero);
    const std::string type = ".rn" + suffix<F>();
    table["add" + type] = sets<F, F, F>([](F a, F b) { return arithmetic(a + b); });
    table["sub" + type] = sets<F, F, F>([](F a, F b) { return arithmetic(a - b); });
    table["mul" + type] = sets<F, F, F>([](F a, F b) { return arithmetic(a * b); });
    table["div" + type] = sets<F, F, F>([](F a, F b) { return arithmetic(a / b); });
    table["fma" + type] = sets<F, F, F, F>([](F a, F b, F c) { return arithmetic(std::fma(a, b, c)); });
    table["rcp" + type] = sets<F, F>([](F a) { return arithmetic(1 / a); });
    table["sqrt" + type] = sets<F, F>([](F a) { return arithmetic(std::sqrt(a)); });
  });
  using F = float;
  table["min.f32"] = sets<F, F, F>([](F a, F b) { return smaller(a, b); });
  table["max.f32"] = sets<F, F, F>([](F a, F b) { return larger(a, b); });
  table["min.NaN.f32"] = sets<F, F, F>([](F a, F b) { return a == a && b == b ? smaller(a, b) : arithmetic(a + b); });
  table["max.NaN.f32"] = sets<F, F, F>([](F a, F b) { return a == a && b == b ? larger(a, b) : arithmetic(a + b); });
  table["neg.f32"] = sets<uint32_t, uint32_t>([](uint32_t a) { return a ^ 0x80000000; });
  table["abs.f32"] = sets<uint32_t, uint32_t>([](uint32_t a) { return a & 0x7fffffff; });
}

// Halves follow their definition. The codecs have their own code for this, which these programs test.
float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  float x = std::ldexp(static_cast<float>(exponent == 0 ? fraction : 1024 + fraction), std::max(exponent, 1) - 25);
  if (exponent == 31) x = fraction != 0 ? std::bit_cast<float>(kNaN) : INFINITY;
  return x == x && half >> 15 ? -x : x;
}
uint16_t to_half(float x) {
  if (x != x) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (x >= 65520.0f) return sign | 0x7c00;
  const int exponent = x < 0x1p-14f ? -14 : std::ilogb(x);
  // A fraction that rounds up to 2048 carries into the exponent, as it should.
  const auto fraction = static_cast<int>(std::nearbyint(std::ldexp(x, 10 - exponent)));
  return static_cast<uint16_t>(sign + (exponent + 14) * 1024 + fraction);
}
uint16_t to_brain(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return x != x ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Conversions to an integer saturate. A NaN becomes 0.
template <class T, class F>
T saturated(F whole) {
  const F end = std::ldexp(F(1), std::numeric_limits<T>::digits);
  if (whole != whole) return 0;
  if (whole >= end) return std::numeric_limits<T>::max();
  if (whole <= (std::is_signed_v<T> ? -end : F(0))) return std::numeric_limits<T>::min();
  return static_cast<T>(whole);
}

void add_conversions(Table& table) {
  const auto to = [&](auto zero) {
    using To = decltype(zero);
    each<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>([&](auto other) {
      using From = decltype(other);
      table["cvt" + suffix<To>() + suffix<From>()] = sets<To, From>([](From a) { return a; });
    });
    each<float, double>([&](auto float_zero) {
      using F = decltype(float_zero);
      table["cvt.rn" + suffix<F>() + suffix<To>()] = sets<F, To>([](To a) { return a; });
      table["cvt.rni" + suffix<To>() + suffix<F>()] = sets<To, F>([](F a) { return saturated<To>(std::nearbyint(a)); });
      table["cvt.rzi" + suffix<To>() + suffix<F>()] = sets<To, F>([](F a) { return saturated<To>(std::trunc(a)); });
    });
  };
  each<uint8_t, int8_t>(to);
  each_integer(to);
  table["cvt.f64.f32"] = sets<double, float>([](float a) { return arithmetic(static_cast<double>(a)); });
  table["cvt.rn.f32.f64"] = sets<float, double>([](double a) { return arithmetic(static_cast<float>(a)); });
  table["cvt.f32.f16"] = sets<float, uint16_t>([](uint16_t a) { return from_half(a); });
  table["cvt.rn.f16.f32"] = sets<uint16_t, float>([](float a) { return to_half(a); });
  table["cvt.rn.bf16.f32"] = sets<uint16_t, float>([](float a) { return to_brain(a); });
  table["cvt.rn.bf16x2.f32"] = sets<uint32_t, float, float>(
      [](float high, float low) { return static_cast<uint32_t>(to_brain(high)) << 16 | to_brain(low); });
  table["cvt.rn.f16x2.f32"] = sets<uint32_t, float, float>(
      [](float high, float low) { return static_cast<uint32_t>(to_half(high)) << 16 | to_half(low); });
  for (const char* name : {"cvta.to.global.u64", "cvta.global.u64", "cvta.local.u64", "cvta.param.u64"})
    table[name] = sets<uint64_t, uint64_t>([](uint64_t a) { return a; });
}

void add_choices(Table& table) {
  const auto compare = [&](auto zero, const std::string& type) {
    using T = decltype(zero);
    table["setp.eq" + type] = sets<bool, T, T>([](T a, T b) { return a == b; });
    table["setp.lt" + type] = sets<bool, T, T>([](T a, T b) { return a < b; });
    table["setp.le" + type] = sets<bool, T, T>([](T a, T b) { return a <= b; });
    table["setp.gt" + type] = sets<bool, T, T>([](T a, T b) { return a > b; });
    table["setp.ge" + type] = sets<bool, T, T>([](T a, T b) { return a >= b; });
    table["setp.ne" + type] = sets<bool, T, T>([](T a, T b) { return a < b || a > b; });
  };
  const auto move = [&](auto zero, const std::string& type) {
    using T = decltype(zero);
    table["mov" + type] = sets<T, T>([](T a) { return a; });
    table["selp" + type] = sets<T, T, T, bool>([](T a, T b, bool first) { return first ? a : b; });
  };
  each_integer([&](auto zero) {
    compare(zero, suffix<decltype(zero)>());
    move(zero, suffix<decltype(zero)>());
  });
  each<uint16_t, uint32_t, uint64_t>([&](auto zero) {
    compare(zero, suffix<decltype(zero)>('b'));
    move(zero, suffix<decltype(zero)>('b'));
  });
  compare(0.0f, ".f32"), compare(0.0, ".f64");
  // With the suffix u, a comparison with a NaN is true.
  using F = float;
  table["setp.equ.f32"] = sets<bool, F, F>([](F a, F b) { return !(a < b || a > b); });
  table["setp.neu.f32"] = sets<bool, F, F>([](F a, F b) { return !(a == b); });
  table["setp.ltu.f32"] = sets<bool, F, F>([](F a, F b) { return !(a >= b); });
  table["setp.leu.f32"] = sets<bool, F, F>([](F a, F b) { return !(a > b); });
  table["setp.gtu.f32"] = sets<bool, F, F>([](F a, F b) { return !(a <= b); });
  table["setp.geu.f32"] = sets<bool, F, F>([](F a, F b) { return !(a < b); });
  table["setp.num.f32"] = sets<bool, F, F>([](F a, F b) { return a == a && b == b; });
  table["setp.nan.f32"] = sets<bool, F, F>([](F a, F b) { return a != a || b != b; });
  move(uint32_t(), ".f32"), move(uint64_t(), ".f64");  // moves bits, so NaNs don't change
  table["mov.pred"] = sets<bool, bool>([](bool a) { return a; });

  // {low, high} and a whole register. translate.cc distinguishes the two.
  table["mov.b32 join"] =
      sets<uint32_t, uint16_t, uint16_t>([](uint32_t low, uint32_t high) { return high << 16 | low; });
  table["mov.b64 join"] =
      sets<uint64_t, uint32_t, uint32_t>([](uint64_t low, uint64_t high) { return high << 32 | low; });
  table["mov.b32 split"] = [](Thread& t, const Instruction& i) {
    const auto whole = t.get<uint32_t>(i.operands[2]);
    t.set(i.operands[0], static_cast<uint16_t>(whole)), t.set(i.operands[1], static_cast<uint16_t>(whole >> 16));
  };
  table["mov.b64 split"] = [](Thread& t, const Instruction& i) {
    const auto whole = t.get<uint64_t>(i.operands[2]);
    t.set(i.operands[0], static_cast<uint32_t>(whole)), t.set(i.operands[1], static_cast<uint32_t>(whole >> 32));
  };

  table["bra"] = table["bra.uni"] = [](Thread& t, const Instruction& i) { t.next = &t.kernel->code[i.target]; };
  table["ret"] = [](Thread& t, const Instruction&) { t.next = nullptr; };
}

enum Space { kGlobal, kShared };  // parameters and local memory have addresses like global memory's

// Returns the address in an instruction's operand `k` for `bytes` bytes, which must be aligned as a whole.
template <Space space>
char* address(const Thread& t, const Instruction& i, size_t k, size_t bytes) {
  const uint64_t at = t.get<uint64_t>(i.operands[k]) + static_cast<uint64_t>(i.offset);
  if (at % bytes != 0) t.fail(i, "the address isn't aligned");
  if (space == kGlobal) return reinterpret_cast<char*>(at);
  const auto offset = static_cast<uint32_t>(at);
  if (offset + bytes > t.kernel->shared_bytes) t.fail(i, "behind the end of shared memory");
  return t.shared + offset;
}

template <Space space, class T, int kCount>
void load(Thread& t, const Instruction& i) {
  T x[kCount];
  std::memcpy(x, address<space>(t, i, kCount, sizeof(x)), sizeof(x));
  for (int k = 0; k < kCount; ++k) t.set(i.operands[k], x[k]);
}
template <Space space, class T, int kCount>
void store(Thread& t, const Instruction& i) {
  T x[kCount];
  for (int k = 0; k < kCount; ++k) x[k] = t.get<T>(i.operands[1 + k]);
  std::memcpy(address<space>(t, i, 0, sizeof(x)), x, sizeof(x));
}

template <Space space>
void add_memory(Table& table, const std::string& where) {
  const auto add = [&](auto zero, const std::string& type) {
    using T = decltype(zero);
    table["ld." + where + type] = load<space, T, 1>;
    table["ld." + where + ".v2" + type] = load<space, T, 2>;
    table["ld." + where + ".v4" + type] = load<space, T, 4>;
    table["st." + where + type] = store<space, T, 1>;
    table["st." + where + ".v2" + type] = store<space, T, 2>;
    table["st." + where + ".v4" + type] = store<space, T, 4>;
  };
  each<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(
      [&](auto zero) { add(zero, suffix<decltype(zero)>()); });
  each<uint8_t, uint16_t, uint32_t, uint64_t>([&](auto zero) { add(zero, suffix<decltype(zero)>('b')); });
  add(uint32_t(), ".f32"), add(uint64_t(), ".f64");
}

template <Space space>
void add_atomics(Table& table, const std::string& name) {
  const auto add = [&](const std::string& what, auto f) {
    using F = decltype(f);
    table[name + what] = [](Thread& t, const Instruction& i) {
      auto* const p = reinterpret_cast<unsigned*>(address<space>(t, i, 1, 4));
      t.set<uint32_t>(i.operands[0], F()(p, t.get<uint32_t>(i.operands[2])));
    };
  };
  add(".add.u32", [](unsigned* p, unsigned x) { return atomicAdd(p, x); });
  add(".or.b32", [](unsigned* p, unsigned x) { return atomicOr(p, x); });
  add(".max.u32", [](unsigned* p, unsigned x) { return atomicMax(p, x); });
}

// A shuffle of whole warps: f(mask, value, lane or distance). PTX's operands are the result, whether it comes from a
// lane in range, value, lane or distance, clamp, and mask.
template <uint32_t clamp, class F>
Operation shuffles(F) {
  return [](Thread& t, const Instruction& i) {
    const auto o = [&](int k) { return t.get<uint32_t>(i.operands[k]); };
    if (o(4) != clamp) t.fail(i, "a shuffle of a part of a warp");
    t.set(i.operands[1], clamp != 0 || threadIdx.x % 32 >= o(3));
    t.set(i.operands[0], F()(o(5), o(2), o(3)));
  };
}

void add_threads(Table& table) {
  table["bar.sync"] = [](Thread& t, const Instruction& i) {
    if (t.get<uint32_t>(i.operands[0]) != 0) t.fail(i, "a barrier other than 0");
    __syncthreads();
  };
  table["bar.warp.sync"] = [](Thread& t, const Instruction& i) {
    if (t.get<uint32_t>(i.operands[0]) != ~uint32_t{0}) t.fail(i, "a barrier of a part of a warp");
    __syncwarp();
  };
  table["nanosleep.u32"] = [](Thread& t, const Instruction& i) { __nanosleep(t.get<uint32_t>(i.operands[0])); };
  // Kernels run one after another.
  for (const char* name : {"griddepcontrol.wait", "griddepcontrol.launch_dependents"})
    table[name] = [](Thread&, const Instruction&) {};
  using U = uint32_t;
  table["shfl.sync.bfly.b32"] = shuffles<31>([](U mask, U x, U lanes) { return __shfl_xor_sync(mask, x, lanes); });
  table["shfl.sync.idx.b32"] = shuffles<31>([](U mask, U x, U from) { return __shfl_sync(mask, x, from); });
  table["shfl.sync.up.b32"] = shuffles<0>([](U mask, U x, U lanes) { return __shfl_up_sync(mask, x, lanes); });
  table["vote.sync.ballot.b32"] = [](Thread& t, const Instruction& i) {
    t.set(i.operands[0], __ballot_sync(t.get<uint32_t>(i.operands[2]), t.get<bool>(i.operands[1])));
  };
}

Table instructions() {
  Table table;
  add_integers(table);
  add_bits(table);
  add_floats(table);
  add_conversions(table);
  add_choices(table);
  for (const char* where : {"global", "global.cs", "acquire.gpu", "param", "local"}) add_memory<kGlobal>(table, where);
  add_memory<kShared>(table, "shared");
  for (const char* name : {"atom", "atom.global", "atom.acq_rel.gpu"}) add_atomics<kGlobal>(table, name);
  add_atomics<kShared>(table, "atom.shared");
  add_threads(table);
  return table;
}

}  // namespace

Operation operation_of(const std::string& name) {
  static const Table table = instructions();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace jaxcgx::ptx
