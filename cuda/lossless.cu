// Lossless (codec/lossless.h). A warp packs or unpacks a block of elements. Its threads have the elements in registers.
// The lists of elements with further digits are in shared memory.
//
// A warp writes the overflow of its block to the workspace. When the lengths of all blocks are known, another kernel
// moves the overflow to its position in the chunk.
#include "cuda/launchers.cuh"
#include "cuda/load_store.cuh"
#include "cuda/scan.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr int64_t kWarps = kThreads / kWarpSize, kLengths = kThreads;  // blocks, and lengths, of a thread block
constexpr uint32_t kStartThreads = 256;

struct BlocksRow {
  int64_t elements;
  uint8_t* overflow;        // of its blocks, in the workspace
  uint32_t* starts;         // per block: see Block::start
  uint32_t chunk_overflow;  // offset of the overflow from the beginning of the chunk, in units of 4 bytes
};
using Pieces = Table<BlocksRow>;

// The memory of a block of elements.
struct Block {
  DType dtype;
  int64_t n;
  uint8_t *elements, *head, *planes;
  uint8_t* overflow;  // in the workspace
  uint32_t* start;    // first the length of its overflow, later the offset in the chunk's overflow, in units of 2 bytes
  uint8_t* chunk_overflow;

  CGX_D Block(const Pieces& t, const Place& p, int64_t block) {
    const Message& m = t.message;
    const Entry& e = t.entries[p.index];
    const BlocksRow& row = t.rows[p.index];
    const int64_t left = row.elements - block * kLosslessBlock;
    dtype = static_cast<DType>(e.dtype);
    n = left < 0 ? 0 : left < kLosslessBlock ? left : kLosslessBlock;
    elements = static_cast<uint8_t*>(const_cast<void*>(e.leaf)) + block * kLosslessBlock * size_of(dtype);
    uint8_t* const chunk = chunk_of(m, p);
    head = chunk + e.codes + 2 * block;
    planes = chunk + e.codes + lossless_head_bytes(row.elements) + block * lossless_plane_bytes(dtype, kLosslessBlock);
    overflow = row.overflow + block * lossless_most_bytes(dtype, kLosslessBlock);
    start = row.starts + block;
    chunk_overflow = chunk + int64_t{4} * row.chunk_overflow;
  }
  // Returns the length of the overflow from the head. The head may be untrusted, so it is at most the most bytes.
  CGX_D int64_t length() const {
    const int64_t most = lossless_most_bytes(dtype, n), bytes = 2 * head[1];
    return bytes < most ? bytes : most;
  }
};

// The elements of a thread: two neighbouring lanes of a block of codec/pack.h, in all rows. So a thread makes whole
// words of codes, and accesses two neighbouring elements at a time. kWhole: the warp has kLosslessBlock elements, and
// pairs of them are aligned.
template <bool kWhole>
struct Pair {
  int quarter, lane;  // quarter: index of the block of codec/pack.h; lane: the first lane
  int lanes, count;   // of that block

  CGX_D explicit Pair(int64_t n) {
    const auto thread = static_cast<int>(threadIdx.x % kWarpSize);
    quarter = thread / 8;
    lane = thread % 8 * 2;
    const int left = static_cast<int>(n) - quarter * kBlock;
    count = kWhole || left > kBlock ? kBlock : left < 0 ? 0 : left;
    lanes = kWhole ? kLanes : lanes_of(count);
  }
  // Returns the index in the warp's elements of an element of row r. which: 0 or 1.
  CGX_D int at(int r, int which) const { return quarter * kBlock + r * lanes + lane + which; }
  CGX_D bool has(int r, int which) const {
    return kWhole || (lane + which < lanes && r * lanes + lane + which < count);
  }

  // load_codes and store_codes access the words of codes that are packed at `packed`.
  template <int kBits>
  CGX_D void load_codes(const uint8_t* packed, Words<Scalar, kBits> (&w)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      w[i].clear();
      if (!kWhole && lane + i >= lanes) continue;
      each_word<kBits>(w[i], lane + i, lanes, [&](auto size, int32_t& word, int32_t at) {
        word = load_word<decltype(size)>(packed + quarter * kLanes * kBits + at);
      });
    }
  }
  template <int kBits>
  CGX_D void store_codes(uint8_t* packed, Words<Scalar, kBits> (&w)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!kWhole && lane + i >= lanes) continue;
      each_word<kBits>(w[i], lane + i, lanes, [&](auto size, int32_t word, int32_t at) {
        store_word<decltype(size)>(packed + quarter * kLanes * kBits + at, word);
      });
    }
  }
};

// An array with a number of type U for each element.
template <class U>
struct Array {
  using Two = std::conditional_t<sizeof(U) == 4, uint2, std::conditional_t<sizeof(U) == 2, uint32_t, uint16_t>>;
  U* first;

  CGX_D explicit Array(void* at) : first(static_cast<U*>(at)) {}

  // Loads two neighbours: 0 where there is no element.
  template <bool kWhole>
  CGX_D void load(const Pair<kWhole>& p, int r, int32_t (&x)[2]) const {
    const U* at = first + p.at(r, 0);
    if constexpr (kWhole) {
      const Two two = __ldcs(reinterpret_cast<const Two*>(at));
      if constexpr (sizeof(U) == 4)
        x[0] = static_cast<int32_t>(two.x), x[1] = static_cast<int32_t>(two.y);
      else
        x[0] = static_cast<U>(two), x[1] = static_cast<int32_t>(two >> 8 * sizeof(U));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) x[i] = p.has(r, i) ? static_cast<int32_t>(at[i]) : 0;
    }
  }
  template <bool kWhole>
  CGX_D void store(const Pair<kWhole>& p, int r, const int32_t (&x)[2]) const {
    U* at = first + p.at(r, 0);
    if constexpr (kWhole && sizeof(U) == 4) {
      *reinterpret_cast<Two*>(at) = {static_cast<uint32_t>(x[0]), static_cast<uint32_t>(x[1])};
    } else if constexpr (kWhole) {
      const uint32_t two = static_cast<U>(x[0]) | static_cast<uint32_t>(x[1]) << 8 * sizeof(U);
      *reinterpret_cast<Two*>(at) = static_cast<Two>(two);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (p.has(r, i)) at[i] = static_cast<U>(x[i]);
      }
    }
  }
};

// Returns x with a byte for each of its four fields of two bits.
CGX_D uint32_t as_bytes(uint32_t x) {
  x = (x | x << 12) & 0x000f000fu;
  return (x | x << 6) & 0x03030303u;
}

// Calls f(row, which, number of digits 3 of the warp before it, in the order of elements) for each digit 3 of a thread.
// Returns the number of digits 3 of the warp. Every thread of the warp must call this, because it has shuffles.
template <class Fn>
CGX_D uint32_t each_further(const Words<Scalar, 2> (&digits)[2], Fn f) {
  const uint32_t word = static_cast<uint32_t>(digits[0].c) | static_cast<uint32_t>(digits[1].c) << 16,
                 in = word & word >> 1 & 0x55555555u;
  const uint32_t of_rows = (in & 0xffff) + (in >> 16), thread = threadIdx.x % kWarpSize;
  const uint32_t own[2] = {as_bytes(of_rows & 0xff), as_bytes(of_rows >> 8)};  // a byte for each row
  // The sums over the threads of the quarter before this one, and over the rows before each, are below 128.
  uint32_t upto[2], before[2], all = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    upto[i] = own[i];
#pragma unroll
    for (uint32_t d = 1; d < 8; d *= 2) {
      const uint32_t other = __shfl_up_sync(kWholeWarp, upto[i], d);
      if (thread % 8 >= d) upto[i] += other;
    }
    const uint32_t row = __shfl_sync(kWholeWarp, upto[i], thread | 7), sums = row * 0x01010101u + all * 0x01010101u;
    before[i] = sums - row + upto[i] - own[i];
    all = sums >> 24;
  }
  uint32_t so_far = all;  // of this quarter and those before it
#pragma unroll
  for (uint32_t d = 8; d < kWarpSize; d *= 2) {
    const uint32_t other = __shfl_up_sync(kWholeWarp, so_far, d);
    if (thread >= d) so_far += other;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    uint32_t place = so_far - all + (before[r / 4] >> 8 * (r % 4) & 255);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (in >> (16 * i + 2 * r) & 1) f(r, i, place++);
    }
  }
  return __shfl_sync(kWholeWarp, so_far, kWarpSize - 1);
}

// A warp's list of elements with further digits.
struct List {
  int16_t of[kLosslessBlock];

  // Replaces the entries of a list of `count` by the results of next(i, entry), in order. Drops negative results, which
  // mean that there is no further digit. Returns the number of entries that are kept.
  template <class Fn>
  CGX_D uint32_t keep(uint32_t count, Fn next) {
    uint32_t kept = 0;
    for (uint32_t first = 0; first < count; first += kWarpSize) {
      const uint32_t i = first + threadIdx.x % kWarpSize;
      const int32_t entry = i < count ? next(i, int32_t{of[i]}) : -1;
      const uint32_t further = __ballot_sync(kWholeWarp, entry >= 0);
      __syncwarp();
      if (entry >= 0) of[kept + before_lane(further)] = static_cast<int16_t>(entry);
      kept += static_cast<uint32_t>(__popc(further));
    }
    __syncwarp();
    return kept;
  }
};

template <DType kType>
using Bits = std::conditional_t<kType == DType::kF32, uint32_t, uint16_t>;

// The planes of the unchanged bits of a block: the low 16 bits and the next 8 (fp32), the low 8 (bf16), or the low 8
// and 3 packed (fp16).
template <DType kType>
struct Rest {
  Array<std::conditional_t<kType == DType::kF32, uint16_t, uint8_t>> low;
  uint8_t* high;
  Words<Scalar, 3> packed[2] = {};

  CGX_D explicit Rest(const Block& b)
      : low(b.planes + packed_bytes(b.n, 2)),
        high(b.planes + packed_bytes(b.n, 2) + (kType == DType::kF32 ? 2 : 1) * b.n) {}
  template <bool kWhole>
  CGX_D void load(const Pair<kWhole>& p) {
    if constexpr (kType == DType::kF16) p.load_codes(high, packed);
  }
  template <bool kWhole>
  CGX_D void get(const Pair<kWhole>& p, int r, int32_t (&rest)[2]) const {
    low.load(p, r, rest);
    int32_t above[2] = {};
    if constexpr (kType == DType::kF32) Array<uint8_t>(high).load(p, r, above);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kType == DType::kF32) rest[i] |= above[i] << 16;
      if constexpr (kType == DType::kF16) rest[i] |= packed[i].get(r) << 8;
    }
  }
  template <bool kWhole>
  CGX_D void put(const Pair<kWhole>& p, int r, const int32_t (&rest)[2]) {
    low.store(p, r, rest);
    if constexpr (kType == DType::kF32) Array<uint8_t>(high).store(p, r, {shr(rest[0], 16), shr(rest[1], 16)});
    if constexpr (kType == DType::kF16) packed[0].put(r, shr(rest[0], 8)), packed[1].put(r, shr(rest[1], 8));
  }
  template <bool kWhole>
  CGX_D void store(const Pair<kWhole>& p) {
    if constexpr (kType == DType::kF16) p.store_codes(high, packed);
  }
};

template <DType kType, bool kWhole>
CGX_D void pack(const Block& b, List& list) {
  using L = Lossless<kType>;
  constexpr uint32_t kNumber = 1u << 20;  // the number of nonzero exponents is counted above their sum
  const Pair<kWhole> p(b.n);
  const Array<Bits<kType>> elements(b.elements);
  Rest<kType> rest(b);
  int32_t code[kRows][2];  // first the exponents
  uint32_t sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int32_t x[2];
    elements.load(p, r, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      code[r][i] = L::template exponent<Scalar>(x[i]);
      sum += static_cast<uint32_t>(code[r][i]) + (code[r][i] > 0 ? kNumber : 0);
      x[i] = L::template rest<Scalar>(x[i]);
    }
    rest.put(p, r, x);
  }
  rest.store(p);
#pragma unroll
  for (uint32_t m = 1; m < kWarpSize; m *= 2) sum += __shfl_xor_sync(kWholeWarp, sum, m);
  const int32_t center = L::center(static_cast<int32_t>(sum % kNumber), static_cast<int32_t>(sum / kNumber));
  Words<Scalar, 2> digits[2] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      code[r][i] = p.has(r, i) ? L::template code<Scalar>(code[r][i], center) : 0;
      digits[i].put(r, jaxcgx::min(code[r][i], 3));
    }
  }
  uint32_t left = each_further(
      digits, [&](int r, int i, uint32_t place) { list.of[place] = static_cast<int16_t>(code[r][i] - 4); });
  __syncwarp();
  const int64_t most = lossless_most_bytes(kType, b.n);
  int64_t bytes = 0;
  while (left > 0 && bytes + packed_bytes(left, 2) < most) {
    for (uint32_t j = threadIdx.x % kWarpSize; j * kRows < left; j += kWarpSize) {
      const uint32_t first = j / kLanes * kBlock;
      const auto lanes = static_cast<uint32_t>(lanes_of(left - first));
      Words<Scalar, 2> word = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t i = first + static_cast<uint32_t>(r) * lanes + j % kLanes;
        word.put(r, i < left ? jaxcgx::min(int32_t{list.of[i]}, 3) : 0);
      }
      store_word<uint16_t>(b.overflow + bytes + 2 * j, word.c);
    }
    bytes += packed_bytes(left, 2);
    __syncwarp();
    left = list.keep(left, [](uint32_t, int32_t further) { return further - 4; });
  }
  if (left > 0) {
    Words<Scalar, 2> lower[2] = {};
    Words<Scalar, L::kExponent - 2> upper[2] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t exponent = p.has(r, i) ? L::template exponent_of<Scalar>(code[r][i], center) : 0;
        lower[i].put(r, exponent & 3), upper[i].put(r, exponent >> 2);
      }
    }
    p.store_codes(b.planes, lower);
    p.store_codes(b.overflow, upper);
    bytes = most;
    if (threadIdx.x % kWarpSize == 0 && packed_bytes(b.n, L::kExponent - 2) < most) b.overflow[most - 1] = 0;
  } else {
    p.store_codes(b.planes, digits);
  }
  if (threadIdx.x % kWarpSize == 0) {
    b.head[0] = static_cast<uint8_t>(center), b.head[1] = static_cast<uint8_t>(bytes / 2);
    *b.start = static_cast<uint32_t>(bytes / 2);
  }
}

template <DType kType, bool kWhole>
CGX_D void unpack(const Block& b, List& list, uint8_t (&exponents)[kLosslessBlock]) {
  using L = Lossless<kType>;
  const Pair<kWhole> p(b.n);
  const int64_t bytes = b.length();
  const bool raw = bytes == lossless_most_bytes(kType, b.n);
  const int32_t center = b.head[0];
  const uint8_t* const overflow = b.chunk_overflow + 2 * int64_t{*b.start};
  Words<Scalar, 2> digits[2];
  p.load_codes(b.planes, digits);
  if constexpr (!kWhole) {  // untrusted bytes may have digits past the end
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Words<Scalar, 2> known = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) known.put(r, p.has(r, i) ? digits[i].get(r) : 0);
      digits[i] = known;
    }
  }
  Words<Scalar, L::kExponent - 2> upper[2] = {};
  if (raw) {
    p.load_codes(overflow, upper);
  } else {
    uint32_t left =
        each_further(digits, [&](int r, int i, uint32_t place) { list.of[place] = static_cast<int16_t>(p.at(r, i)); });
    __syncwarp();
    const auto end = static_cast<uint32_t>(bytes);
    uint32_t at = 0;
    for (int32_t level = 1; left > 0; ++level) {
      const int32_t below = L::template exponent_of<Scalar>(4 * level, center),
                    above = L::template exponent_of<Scalar>(4 * level + 2, center);
      const uint32_t count = left;
      left = list.keep(count, [&](uint32_t i, int32_t element) {
        const uint32_t block = i / kBlock, in = i % kBlock;
        const auto lanes = static_cast<uint32_t>(lanes_of(count - block * kBlock));
        const uint32_t row = in / lanes, byte = at + block * 2 * kLanes + 2 * (in - row * lanes) + row / 4;
        const int32_t digit = byte < end ? overflow[byte] >> 2 * (row % 4) & 3 : 0;
        if (digit == 3) return element;
        exponents[element] = static_cast<uint8_t>(digit == 2 ? above : (below - digit) & L::kLargest);
        return -1;
      });
      at += (count + kRows - 1) / kRows * 2;
    }
  }
  const Array<Bits<kType>> elements(b.elements);
  Rest<kType> rest(b);
  rest.load(p);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int32_t x[2];
    rest.get(p, r, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t digit = digits[i].get(r);
      const int32_t exponent = raw         ? digit | upper[i].get(r) << 2
                               : digit < 3 ? L::template exponent_of<Scalar>(digit, center)
                                           : exponents[p.at(r, i)];
      x[i] = L::template bits<Scalar>(exponent, x[i]);
    }
    elements.store(p, r, x);
  }
}

// Calls f(the warp's block, a constant with its dtype, a constant kWhole for Pair).
template <class Fn>
CGX_D void with_block(const Pieces& t, Fn f) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Block b(t, p, p.tile * kWarps + threadIdx.x / kWarpSize);
  if (b.n == 0) return;
  const auto of = [&](auto dtype) {
    const bool whole = b.n == kLosslessBlock && aligned(b.elements, 2 * sizeof(Bits<decltype(dtype)::value>));
    return whole ? f(b, dtype, std::true_type()) : f(b, dtype, std::false_type());
  };
  if (b.dtype == DType::kF32) return of(std::integral_constant<DType, DType::kF32>());
  if (b.dtype == DType::kBF16) return of(std::integral_constant<DType, DType::kBF16>());
  return of(std::integral_constant<DType, DType::kF16>());
}

__global__ void __launch_bounds__(kThreads, 6) lossless_pack_kernel(const __grid_constant__ Pieces t) {
  __shared__ List lists[kWarps];
  List& list = lists[threadIdx.x / kWarpSize];
  with_block(t, [&](const Block& b, auto dtype, auto whole) {
    pack<decltype(dtype)::value, decltype(whole)::value>(b, list);
  });
}

__global__ void __launch_bounds__(kThreads, 8) lossless_unpack_kernel(const __grid_constant__ Pieces t) {
  __shared__ List lists[kWarps];
  __shared__ uint8_t of_warps[kWarps][kLosslessBlock];
  List& list = lists[threadIdx.x / kWarpSize];
  auto& exponents = of_warps[threadIdx.x / kWarpSize];
  with_block(t, [&](const Block& b, auto dtype, auto whole) {
    unpack<decltype(dtype)::value, decltype(whole)::value>(b, list, exponents);
  });
}

__global__ void __launch_bounds__(kThreads) lossless_lengths_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Block b(t, p, p.tile * kLengths + threadIdx.x);
  if (b.n > 0) *b.start = static_cast<uint32_t>(b.length() / 2);
}

__global__ void __launch_bounds__(kThreads) lossless_move_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Block b(t, p, p.tile * kWarps + threadIdx.x / kWarpSize);
  if (b.n == 0) return;
  const auto* from = reinterpret_cast<const uint16_t*>(b.overflow);
  auto* to = reinterpret_cast<uint16_t*>(b.chunk_overflow) + *b.start;
  const int64_t count = b.length() / 2;
  for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) to[i] = from[i];
}

// Replaces each length by the sum of the lengths before it in its line of `count` lengths. A line of fewer blocks ends
// with garbage, which does not affect the lengths before it. A line has one thread block, so a thread has many lengths.
__global__ void __launch_bounds__(kStartThreads) lossless_starts_kernel(uint32_t* lengths, int64_t count) {
  constexpr int kEach = 16;
  uint32_t* const line = lengths + blockIdx.x * count;
  uint32_t before = 0;
  for (int64_t begin = 0; begin < count; begin += kStartThreads * kEach) {
    const int64_t first = begin + threadIdx.x * kEach;
    uint32_t length[kEach], sum = 0, all;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      length[i] = first + i < count ? line[first + i] : 0;
      sum += length[i];
    }
    uint32_t start = before + sum_before<kStartThreads>(sum, &all);
#pragma unroll
    for (int i = 0; i < kEach; start += length[i], ++i) {
      if (first + i < count) line[first + i] = start;
    }
    before += all;
  }
}

__global__ void __launch_bounds__(kThreads) lossless_clear_kernel(uint4* to, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kLosslessBlock;
  for (int64_t i = first + threadIdx.x; i < count && i < first + kLosslessBlock; i += kThreads)
    to[i] = uint4{0, 0, 0, 0};
}

template <class... Parameters>
Status launch(void (*kernel)(Parameters...), const char* name, int64_t blocks, uint32_t threads, cudaStream_t stream,
              Parameters... given) {
  if (blocks == 0) return {};
  if (blocks > INT32_MAX) return {name, cudaErrorInvalidConfiguration};
  return cuda::launch(config_of(blocks, threads, stream), kernel, name, given...);
}

// The workspace of an operation. A line is a chunk that is packed or unpacked. The workspace has the chunks of Raw of
// all lines (only sums and feedback use them), the overflow of the packed lines, and the lengths of all blocks.
struct Work {
  Layout raw;
  int64_t unpacked, packed;               // numbers of lines
  int64_t blocks = 0, most_overflow = 0;  // the most blocks, and bytes of overflow, of a line

  Work(const Layout& l, int64_t batch, int64_t payloads, bool encodes)
      : raw(Codec{}, l.leaves, l.chunks(), l.shares),
        unpacked(batch * payloads * (encodes ? 1 : l.chunks())),
        packed(!encodes        ? 0
               : payloads == 0 ? batch * l.chunks()
                               : batch) {
    for (size_t c = 0; c + 1 < l.first.size(); ++c) {
      int64_t found = 0;
      for (const Piece& p : l.pieces_of(static_cast<int64_t>(c))) found += div_up(p.coded, kLosslessBlock);
      blocks = std::max(blocks, found);
      most_overflow = std::max(most_overflow, l.end[c] - l.overflow[c]);
    }
  }
  int64_t packed_at() const { return unpacked * raw.chunk_bytes; }
  int64_t overflow_at() const { return packed_at() + packed * raw.chunk_bytes; }
  int64_t starts_at() const { return overflow_at() + packed * most_overflow; }
  int64_t bytes() const { return starts_at() + 4 * std::max(unpacked, packed) * blocks; }
};

// Launches kernels over the pieces of all lines. Elements are in the leaves of `call` or, if it has none, in chunks of
// Raw.
struct Lines {
  const Layout& l;
  const Work& work;
  uint8_t *raw, *workspace;
  Call call;
  int64_t rows;

  Status run(void (*kernel)(Pieces), const char* name, int64_t elements) const {
    Launches launches(call, kernel, name, kThreads);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < l.chunks(); ++c) {
        const int64_t line = call.message.where != nullptr ? row : row * l.chunks() + c;
        int64_t block = line * work.blocks;
        for (int64_t k = l.first[static_cast<size_t>(c)]; k < l.first[static_cast<size_t>(c) + 1]; ++k) {
          const Piece &p = l.pieces[static_cast<size_t>(k)], &q = work.raw.pieces[static_cast<size_t>(k)];
          const int64_t overflow = l.overflow[static_cast<size_t>(c)];
          Item<BlocksRow> item(l, call.leaves, row, p);
          if (call.leaves.leaves == nullptr) item.entry.leaf = raw + line * work.raw.chunk_bytes + q.codes;
          item.row = {p.coded, workspace + work.overflow_at() + line * work.most_overflow + (p.overflow - overflow),
                      reinterpret_cast<uint32_t*>(workspace + work.starts_at()) + block,
                      static_cast<uint32_t>(overflow / 4)};
          launches.add(item, div_up(p.coded, elements));
          block += div_up(p.coded, kLosslessBlock);
        }
      }
    }
    return launches.finish();
  }
  Status starts(int64_t lines) const {
    return launch(lossless_starts_kernel, "starts kernel of Lossless", work.blocks > 0 ? lines : 0, kStartThreads,
                  call.stream, reinterpret_cast<uint32_t*>(workspace + work.starts_at()), work.blocks);
  }
};

Lines lines_of(const Layout& l, const Work& work, uint8_t* raw, void* workspace, const uint8_t* payload, int64_t rows,
               cudaStream_t stream) {
  Lines lines{l, work, raw, static_cast<uint8_t*>(workspace), Call{l, rows, {}, message_of(l), stream}, rows};
  lines.call.message.payload = const_cast<uint8_t*>(payload);
  return lines;
}

Status pack_all(const Lines& lines) {
  Status s = launch(lossless_clear_kernel, "clear kernel of Lossless",
                    div_up(lines.work.packed * lines.l.chunk_bytes / 16, kLosslessBlock), kThreads, lines.call.stream,
                    reinterpret_cast<uint4*>(lines.call.message.payload), lines.work.packed * lines.l.chunk_bytes / 16);
  if (s.call == nullptr) s = lines.run(lossless_pack_kernel, "pack kernel of Lossless", kWarps * kLosslessBlock);
  if (s.call == nullptr) s = lines.starts(lines.work.packed);
  if (s.call == nullptr) s = lines.run(lossless_move_kernel, "move kernel of Lossless", kWarps * kLosslessBlock);
  return s;
}

Status unpack_all(const Lines& lines) {
  Status s = lines.run(lossless_lengths_kernel, "lengths kernel of Lossless", kLengths * kLosslessBlock);
  if (s.call == nullptr) s = lines.starts(lines.work.unpacked);
  if (s.call == nullptr) s = lines.run(lossless_unpack_kernel, "unpack kernel of Lossless", kWarps * kLosslessBlock);
  return s;
}

}  // namespace

int64_t lossless_workspace_bytes(const Layout& l, int64_t batch, int64_t payloads, bool encodes) {
  return Work(l, batch, payloads, encodes).bytes();
}

Status encode_lossless(const Encode& a, cudaStream_t stream) {
  const Work work(a.layout, a.batch, 0, true);
  auto* const raw = static_cast<uint8_t*>(a.workspace);
  Lines lines = lines_of(a.layout, work, raw, a.workspace, a.payload, a.batch, stream);
  if (a.residuals == nullptr) {
    lines.call.leaves.leaves = a.leaves;
    return pack_all(lines);
  }
  const Status s = encode({work.raw, a.batch, a.leaves, a.leaf_ids, a.keys, a.residuals, a.new_residuals, raw}, stream);
  return s.call != nullptr ? s : pack_all(lines);
}

Status decode_lossless(const Decode& a, cudaStream_t stream) {
  const Work work(a.layout, a.batch, 1, false);
  Lines lines = lines_of(a.layout, work, nullptr, a.workspace, a.payload, a.batch, stream);
  lines.call.leaves.leaves = const_cast<const void* const*>(a.leaves);
  return unpack_all(lines);
}

Status reduce_lossless(const Reduce& a, cudaStream_t stream) {
  const Work work(a.layout, a.batch, a.ranks, a.payload != nullptr);
  auto* const raw = static_cast<uint8_t*>(a.workspace);
  Lines received = lines_of(a.layout, work, raw, a.workspace, a.payloads, a.batch * a.ranks, stream);
  if (const Status s = check_size(a.layout, a.batch * a.ranks); s.call != nullptr) return s;
  received.call.message.where = a.where;
  received.call.message.lists = static_cast<uint32_t>(a.ranks);
  if (const Status s = unpack_all(received); s.call != nullptr) return s;
  Reduce of_raw{work.raw, a.batch, a.ranks, raw, a.where, a.own, a.divisor, a.leaves};
  of_raw.payload = a.payload != nullptr ? raw + work.packed_at() : nullptr;
  of_raw.residuals = a.residuals;
  of_raw.leaf_ids = a.leaf_ids;
  of_raw.keys = a.keys;
  const Status s = reduce(of_raw, stream);
  if (s.call != nullptr || a.payload == nullptr) return s;
  Lines sum = lines_of(a.layout, work, raw + work.packed_at(), a.workspace, a.payload, a.batch, stream);
  sum.call.message.where = a.where;
  return pack_all(sum);
}

}  // namespace jaxcgx::cuda
