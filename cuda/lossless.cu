// Lossless (codec/lossless.h). Encoding first encodes the message with Raw to the workspace, then packs the chunks of
// Raw. Decoding unpacks to the chunks of Raw, then decodes them.
//
// A thread block packs a block of elements, and writes its overflow to the workspace. When the lengths of all blocks
// are known, another kernel moves the overflow to its position in the chunk.
#include "cuda/launchers.cuh"
#include "cuda/load_store.cuh"
#include "cuda/scan.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr int64_t kLengths = kThreads;  // lengths that a thread block reads
using Pieces = Table<true, true>;

// The position of the fields of element i of n packed codes (codec/pack.h).
struct Field {
  int64_t base;
  int lanes, lane, row;

  CGX_D Field(int64_t n, int64_t i, int bits) : base(i / kBlock * kLanes * bits) {
    const int64_t left = n - i / kBlock * kBlock;
    lanes = left >= kBlock ? kLanes : static_cast<int>(div_up(left, kRows));
    row = static_cast<int>(i % kBlock) / lanes;
    lane = static_cast<int>(i % kBlock) % lanes;
  }
};

// Returns code i of n. Bytes from offset `limit` on count as 0.
template <int kBits>
CGX_D int32_t get_packed(const uint8_t* from, int64_t n, int64_t i, int64_t limit = INT64_MAX) {
  Field f(n, i, kBits);
  const auto byte = [&](int64_t at) -> int32_t { return at < limit ? from[at] : 0; };
  int32_t code = 0;
  if constexpr (kBits & 4) {
    code = byte(f.base + 4 * f.lane + f.row / 2) >> 4 * (f.row % 2) & 15;
    f.base += 4 * f.lanes;
  }
  if constexpr (kBits & 2) {
    code |= (byte(f.base + 2 * f.lane + f.row / 4) >> 2 * (f.row % 4) & 3) << (kBits & 4);
    f.base += 2 * f.lanes;
  }
  if constexpr (kBits & 1) code |= (byte(f.base + f.lane) >> f.row & 1) << (kBits - 1);
  return code;
}

// Packs code(0) .. code(n - 1). All threads of the thread block share the work.
template <int kBits, class Code>
CGX_D void put_packed(uint8_t* to, int64_t n, Code code) {
  for (int64_t j = threadIdx.x; j < div_up(n, kRows); j += kThreads) {
    const int64_t block = j / kLanes, lane = j % kLanes, left = n - block * kBlock;
    const int64_t lanes = left >= kBlock ? kLanes : div_up(left, kRows);
    Words<Scalar, kBits> words;
    words.clear();
    for (int row = 0; row < kRows; ++row) {
      const int64_t i = row * lanes + lane;
      words.put(row, i < left ? code(block * kBlock + i) : 0);
    }
    uint8_t* at = to + block * kLanes * kBits;
    const auto put = [&](int32_t word, int64_t bytes) {
      for (int64_t k = 0; k < bytes; ++k)
        at[lane * bytes + k] = static_cast<uint8_t>(shr(word, static_cast<int>(8 * k)));
      at += lanes * bytes;
    };
    if constexpr (kBits & 4) put(words.a, 4);
    if constexpr (kBits & 2) put(words.c, 2);
    if constexpr (kBits & 1) put(words.d, 1);
  }
}

// The memory of a block of elements.
struct Block {
  DType dtype;
  int64_t n;
  const uint8_t* elements;
  uint8_t *head, *planes;
  uint8_t* overflow;  // in the workspace
  uint32_t* start;    // first the length of its overflow, later the offset in the chunk's overflow, in units of 2 bytes
  uint8_t* chunk_overflow;

  CGX_D Block(const Pieces& t, const Place& p, uint8_t* payload, uint32_t tile) {
    const Message& m = t.message;
    const Entry& e = t.entries[p.index];
    const Extra& extra = t.extras[p.index];
    const int64_t left = extra.last - tile * kLosslessBlock;
    dtype = static_cast<DType>(e.dtype);
    n = left < kLosslessBlock ? left : kLosslessBlock;
    elements = static_cast<const uint8_t*>(e.leaf) + tile * kLosslessBlock * size_of(dtype);
    uint8_t* const chunk = payload + (m.where != nullptr ? p.row : p.slot) * m.chunk_bytes;
    head = chunk + e.codes + 2 * tile;
    planes = chunk + e.codes + lossless_head_bytes(extra.last) + tile * lossless_plane_bytes(dtype, kLosslessBlock);
    overflow =
        reinterpret_cast<uint8_t*>(t.residuals[p.index].lost) + tile * lossless_most_bytes(dtype, kLosslessBlock);
    start = const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(t.residuals[p.index].old)) + tile;
    chunk_overflow = chunk + int64_t{4} * e.meta;
  }
  // Returns the length of the overflow from the head. The head may be untrusted, so it is at most the most bytes.
  CGX_D int64_t length() const {
    const int64_t most = lossless_most_bytes(dtype, n), bytes = 2 * head[1];
    return bytes < most ? bytes : most;
  }
};

template <DType kType>
CGX_D void pack(const Block& b) {
  using L = Lossless<kType>;
  __shared__ uint32_t sum, number;
  __shared__ int16_t exponent[kLosslessBlock], list[2][kLosslessBlock];
  if (threadIdx.x == 0) sum = number = 0;
  __syncthreads();
  const auto bits_at = [&](int64_t i) {
    return kType == DType::kF32 ? static_cast<int32_t>(reinterpret_cast<const uint32_t*>(b.elements)[i])
                                : static_cast<int32_t>(reinterpret_cast<const uint16_t*>(b.elements)[i]);
  };
  uint8_t* const low = b.planes + packed_bytes(b.n, 2);
  uint32_t my_sum = 0, my_number = 0;
  for (int64_t i = threadIdx.x; i < b.n; i += kThreads) {
    const int32_t e = L::template exponent<Scalar>(bits_at(i)), rest = L::template rest<Scalar>(bits_at(i));
    exponent[i] = static_cast<int16_t>(e);
    my_sum += static_cast<uint32_t>(e), my_number += e > 0;
    if constexpr (kType == DType::kF32) {
      low[2 * i] = static_cast<uint8_t>(rest), low[2 * i + 1] = static_cast<uint8_t>(shr(rest, 8));
      low[2 * b.n + i] = static_cast<uint8_t>(shr(rest, 16));
    } else {
      low[i] = static_cast<uint8_t>(rest);
    }
  }
  atomicAdd(&sum, my_sum);
  atomicAdd(&number, my_number);
  __syncthreads();
  if constexpr (kType == DType::kF16)
    put_packed<3>(low + b.n, b.n, [&](int64_t i) { return shr(L::template rest<Scalar>(bits_at(i)), 8); });
  const int32_t center = L::center(static_cast<int32_t>(sum), static_cast<int32_t>(number));

  // Writes the codes that continue in the next level to `to`, in order, and returns their number.
  const auto next = [&](int64_t count, auto code, int16_t* to) {
    uint32_t found = 0;
    for (int64_t first = 0; first < count; first += kThreads) {
      const int64_t i = first + threadIdx.x;
      const int32_t c = i < count ? code(i) : 0;
      uint32_t all;
      const uint32_t place = count_before<kThreads>(c > 3, &all);
      if (c > 3) to[found + place] = static_cast<int16_t>(c - 4);
      found += all;
    }
    __syncthreads();
    return static_cast<int64_t>(found);
  };
  const auto digit = [](int32_t code) { return code < 3 ? code : 3; };
  const auto first_code = [&](int64_t i) { return L::template code<Scalar>(exponent[i], center); };
  const int64_t most = lossless_most_bytes(kType, b.n);
  int64_t bytes = 0, left = next(b.n, first_code, list[0]);
  int current = 0;
  while (left > 0 && bytes + packed_bytes(left, 2) < most) {
    const int16_t* const codes = list[current];
    put_packed<2>(b.overflow + bytes, left, [&](int64_t i) { return digit(codes[i]); });
    bytes += packed_bytes(left, 2);
    current = 1 - current;
    left = next(left, [&](int64_t i) { return int32_t{codes[i]}; }, list[current]);
  }
  if (left > 0) {
    put_packed<2>(b.planes, b.n, [&](int64_t i) { return exponent[i] & 3; });
    __syncthreads();  // other threads may still be writing digits to the overflow
    if (threadIdx.x == 0) b.overflow[most - 1] = 0;
    __syncthreads();
    put_packed<L::kExponent - 2>(b.overflow, b.n, [&](int64_t i) { return exponent[i] >> 2; });
    bytes = most;
  } else {
    put_packed<2>(b.planes, b.n, [&](int64_t i) { return digit(first_code(i)); });
  }
  if (threadIdx.x == 0) {
    b.head[0] = static_cast<uint8_t>(center), b.head[1] = static_cast<uint8_t>(bytes / 2);
    *b.start = static_cast<uint32_t>(bytes / 2);
  }
}

template <DType kType>
CGX_D void unpack(const Block& b) {
  using L = Lossless<kType>;
  __shared__ int16_t code[kLosslessBlock], list[2][kLosslessBlock];
  const int64_t bytes = b.length();
  const bool raw = bytes == lossless_most_bytes(kType, b.n);
  const uint8_t* const overflow = b.chunk_overflow + 2 * int64_t{*b.start};
  // Adds a level's digits to the codes: element at(i) of the block has digit of(i). Elements with digit 3 have another
  // digit in the next level. Writes these elements to `to`, in order, and returns their number.
  const auto next = [&](int32_t count, auto at, auto of, int16_t* to) {
    uint32_t found = 0;
    for (int32_t first = 0; first < count; first += kThreads) {
      const auto i = first + static_cast<int32_t>(threadIdx.x);
      const int32_t digit = i < count ? of(i) : 0;
      if (i < count) code[at(i)] = static_cast<int16_t>(code[at(i)] + (digit == 3 ? 4 : digit));
      uint32_t all;
      const uint32_t place = count_before<kThreads>(digit == 3, &all);
      if (digit == 3) to[found + place] = static_cast<int16_t>(at(i));
      found += all;
    }
    __syncthreads();
    return static_cast<int32_t>(found);
  };
  if (!raw) {
    for (int64_t i = threadIdx.x; i < b.n; i += kThreads) code[i] = 0;
    __syncthreads();
    int32_t left = next(
        static_cast<int32_t>(b.n), [](int32_t i) { return i; },
        [&](int32_t i) { return get_packed<2>(b.planes, b.n, i); }, list[0]);
    int current = 0;
    for (int64_t at = 0; left > 0;) {
      const int16_t* const elements = list[current];
      const int32_t count = left;
      current = 1 - current;
      left = next(
          count, [&](int32_t i) { return int32_t{elements[i]}; },
          [&](int32_t i) { return get_packed<2>(overflow + at, count, i, bytes - at); }, list[current]);
      at += packed_bytes(count, 2);
    }
  }
  const uint8_t* const low = b.planes + packed_bytes(b.n, 2);
  for (int64_t i = threadIdx.x; i < b.n; i += kThreads) {
    int32_t rest = low[i];
    if constexpr (kType == DType::kF32) rest = low[2 * i] | low[2 * i + 1] << 8 | low[2 * b.n + i] << 16;
    if constexpr (kType == DType::kF16) rest |= get_packed<3>(low + b.n, b.n, i) << 8;
    const int32_t e = raw ? get_packed<2>(b.planes, b.n, i) | get_packed<L::kExponent - 2>(overflow, b.n, i) << 2
                          : L::template exponent_of<Scalar>(code[i], b.head[0]);
    const int32_t bits = L::template bits<Scalar>(e, rest);
    auto* const to = const_cast<uint8_t*>(b.elements);
    if constexpr (kType == DType::kF32)
      reinterpret_cast<int32_t*>(to)[i] = bits;
    else
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(bits);
  }
}

__global__ void __launch_bounds__(kThreads) lossless_pack_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile * kLosslessBlock >= t.extras[p.index].last) return;
  const Block b(t, p, t.message.payload, p.tile);
  if (b.dtype == DType::kF32) pack<DType::kF32>(b);
  if (b.dtype == DType::kBF16) pack<DType::kBF16>(b);
  if (b.dtype == DType::kF16) pack<DType::kF16>(b);
}

__global__ void __launch_bounds__(kThreads) lossless_unpack_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile * kLosslessBlock >= t.extras[p.index].last) return;
  const Block b(t, p, t.message.payload, p.tile);
  if (b.dtype == DType::kF32) unpack<DType::kF32>(b);
  if (b.dtype == DType::kBF16) unpack<DType::kBF16>(b);
  if (b.dtype == DType::kF16) unpack<DType::kF16>(b);
}

__global__ void __launch_bounds__(kThreads) lossless_lengths_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const int64_t block = p.tile * kLengths + threadIdx.x;
  if (block * kLosslessBlock >= t.extras[p.index].last) return;
  const Block b(t, p, t.message.payload, static_cast<uint32_t>(block));
  *b.start = static_cast<uint32_t>(b.length() / 2);
}

__global__ void __launch_bounds__(kThreads) lossless_move_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile * kLosslessBlock >= t.extras[p.index].last) return;
  const Block b(t, p, t.message.payload, p.tile);
  uint8_t* const to = b.chunk_overflow + 2 * int64_t{*b.start};
  for (int64_t i = threadIdx.x; i < b.length(); i += kThreads) to[i] = b.overflow[i];
}

// Replaces each length by the sum of the lengths before it in its line of `count` lengths. A line of fewer blocks ends
// with garbage, which does not affect the lengths before it.
__global__ void __launch_bounds__(kThreads) lossless_starts_kernel(uint32_t* lengths, int64_t count) {
  uint32_t* const line = lengths + blockIdx.x * count;
  uint32_t before = 0;
  for (int64_t first = 0; first < count; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    uint32_t all;
    const uint32_t sum = sum_before<kThreads>(i < count ? line[i] : 0, &all);
    if (i < count) line[i] = before + sum;
    before += all;
  }
}

__global__ void __launch_bounds__(kThreads) lossless_clear_kernel(uint4* to, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kLosslessBlock;
  for (int64_t i = first + threadIdx.x; i < count && i < first + kLosslessBlock; i += kThreads)
    to[i] = uint4{0, 0, 0, 0};
}

template <class... Parameters>
Status launch(void (*kernel)(Parameters...), const char* name, int64_t blocks, cudaStream_t stream,
              Parameters... given) {
  if (blocks == 0) return {};
  if (blocks > INT32_MAX) return {name, cudaErrorInvalidConfiguration};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cuda::launch(config, kernel, name, given...);
}

// The workspace of an operation. A line is a chunk that is packed or unpacked. The workspace has the chunks of Raw of
// all lines, the overflow of the packed lines, and the lengths of all blocks.
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
      for (int64_t k = l.first[c]; k < l.first[c + 1]; ++k)
        found += div_up(l.pieces[static_cast<size_t>(k)].coded, kLosslessBlock);
      blocks = std::max(blocks, found);
      most_overflow = std::max(most_overflow, l.end[c] - l.overflow[c]);
    }
  }
  int64_t packed_at() const { return unpacked * raw.chunk_bytes; }
  int64_t overflow_at() const { return packed_at() + packed * raw.chunk_bytes; }
  int64_t starts_at() const { return overflow_at() + packed * most_overflow; }
  int64_t bytes() const { return starts_at() + 4 * std::max(unpacked, packed) * blocks; }
};

// Launches kernels over the pieces of all lines.
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
          Item item;
          item.entry.leaf = raw + line * work.raw.chunk_bytes + q.codes;
          item.entry.codes = static_cast<uint64_t>(p.codes);
          item.entry.meta = static_cast<uint32_t>(overflow / 4);
          item.entry.slot = slot_of(l, row, c);
          item.entry.dtype = static_cast<uint32_t>(l.leaves[static_cast<size_t>(p.leaf)].dtype) & 3u;
          item.extra.last = p.coded;
          item.residual.old = reinterpret_cast<const float*>(workspace + work.starts_at()) + block;
          item.residual.lost = reinterpret_cast<float*>(workspace + work.overflow_at() + line * work.most_overflow +
                                                        (p.overflow - overflow));
          launches.add(item, div_up(p.coded, elements));
          block += div_up(p.coded, kLosslessBlock);
        }
      }
    }
    return launches.finish();
  }
  Status starts(int64_t lines) const {
    return launch(lossless_starts_kernel, "starts kernel of Lossless", work.blocks > 0 ? lines : 0, call.stream,
                  reinterpret_cast<uint32_t*>(workspace + work.starts_at()), work.blocks);
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
                    div_up(lines.work.packed * lines.l.chunk_bytes / 16, kLosslessBlock), lines.call.stream,
                    reinterpret_cast<uint4*>(lines.call.message.payload), lines.work.packed * lines.l.chunk_bytes / 16);
  if (s.call == nullptr) s = lines.run(lossless_pack_kernel, "pack kernel of Lossless", kLosslessBlock);
  if (s.call == nullptr) s = lines.starts(lines.work.packed);
  if (s.call == nullptr) s = lines.run(lossless_move_kernel, "move kernel of Lossless", kLosslessBlock);
  return s;
}

Status unpack_all(const Lines& lines) {
  Status s = lines.run(lossless_lengths_kernel, "lengths kernel of Lossless", kLengths * kLosslessBlock);
  if (s.call == nullptr) s = lines.starts(lines.work.unpacked);
  if (s.call == nullptr) s = lines.run(lossless_unpack_kernel, "unpack kernel of Lossless", kLosslessBlock);
  return s;
}

}  // namespace

int64_t lossless_workspace_bytes(const Layout& l, int64_t batch, int64_t payloads, bool encodes) {
  return Work(l, batch, payloads, encodes).bytes();
}

Status encode_lossless(const Encode& a, cudaStream_t stream) {
  const Work work(a.layout, a.batch, 0, true);
  auto* const raw = static_cast<uint8_t*>(a.workspace);
  const Status s = encode({work.raw, a.batch, a.leaves, a.leaf_ids, a.keys, a.residuals, a.new_residuals, raw}, stream);
  if (s.call != nullptr) return s;
  return pack_all(lines_of(a.layout, work, raw, a.workspace, a.payload, a.batch, stream));
}

Status decode_lossless(const Decode& a, cudaStream_t stream) {
  const Work work(a.layout, a.batch, 1, false);
  auto* const raw = static_cast<uint8_t*>(a.workspace);
  const Status s = unpack_all(lines_of(a.layout, work, raw, a.workspace, a.payload, a.batch, stream));
  return s.call != nullptr ? s : decode({work.raw, a.batch, raw, a.leaves}, stream);
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
