// Elements without buckets: Cast, Raw and raw tails. The encode kernel also clears the padding of a chunk, except the
// padding that other kernels write after their codes.
#include "cuda/decode_sum.cuh"
#include "cuda/encode_quad.cuh"
#include "cuda/launchers.cuh"

namespace jaxcgx::cuda {
namespace {

enum Task : uint32_t { kCoded, kRaw, kGap };
struct TaskRow : Early {
  int64_t count;  // elements, or for a gap (padding) bytes
  Task task;
};
struct EncodeTaskRow : TaskRow, Draws, Residual {};
struct DecodeTaskRow : TaskRow, Sum {};

// The 32 elements of a thread: a quad in a block of 128 elements. The last block may be short.
struct Elements {
  Quad q;
  int64_t count;

  CGX_D Elements(const TaskRow& row, uint32_t tile) : q(tile * kThreads + threadIdx.x, 7), count(row.count) {}
  CGX_D bool whole() const { return (q.block + 1) * kBlock <= count; }
  CGX_D int64_t at(int r, int j) const { return q.element() + r * kLanes + j; }

  // Calls f(row, four elements).
  template <class Fn>
  CGX_D void load(const void* from, DType dtype, Fn f) const {
    if (whole()) {
      load_quad(from, dtype, q.element(), kLanes, f);
    } else {
      const auto element = [&](int r, int j) { return at(r, j) < count ? load_element(from, dtype, at(r, j)) : 0.0f; };
#pragma unroll
      for (int r = 0; r < kRows; ++r) f(r, float4{element(r, 0), element(r, 1), element(r, 2), element(r, 3)});
    }
  }
  CGX_D void store(void* to, DType dtype, const float (&x)[kRows][4]) const {
    if (whole()) {
      store_quad(to, dtype, q.element(), kLanes, x);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (at(r, j) < count) store_element(to, dtype, at(r, j), x[r][j]);
        }
      }
    }
  }
};

// Returns the dtype of an entry's elements on the wire.
CGX_D DType wire_of(const Message& m, const Entry& e, const TaskRow& row) {
  return static_cast<DType>(row.task == kRaw ? static_cast<int32_t>(e.dtype) : m.codec.bits);
}

// Copies a tile bitwise, including NaNs.
CGX_D void copy_tile(const void* from, void* to, DType dtype, int64_t tile, int64_t count) {
  const int64_t size = dtype == DType::kF32 ? 4 : 2, first = tile * kTile * size;
  const int64_t left = count * size - first;
  if (left <= 0) return;
  const auto bytes = static_cast<uint32_t>(left < kTile * size ? left : kTile * size);
  const uint8_t* source = static_cast<const uint8_t*>(from) + first;
  uint8_t* target = static_cast<uint8_t*>(to) + first;
  uint32_t done = 0;
  if (aligned(source, 16) && aligned(target, 16)) {
    done = bytes & ~15u;
    for (uint32_t i = threadIdx.x * 16; i < done; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(target + i) = __ldcs(reinterpret_cast<const uint4*>(source + i));
    }
  }
  for (uint32_t i = done + threadIdx.x * 2; i < bytes; i += kThreads * 2) {
    *reinterpret_cast<uint16_t*>(target + i) = *reinterpret_cast<const uint16_t*>(source + i);
  }
}

// Sums payloads in rank order. The caller divides.
CGX_D void sum_unbucketed(const Message& m, const Entry& e, const Place& p, const Elements& elements, DType wire,
                          float (&x)[kRows][4]) {
  const uint8_t* payload = payloads_of(m, p) + e.codes;
  for (uint32_t rank = 0; rank < m.ranks; ++rank, payload += m.chunk_bytes) {
    const bool own = rank == p.rank;
    elements.load(own ? e.leaf : payload, own ? static_cast<DType>(e.dtype) : wire, [&](int r, const float4& y) {
      const float row[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[r][j] = rank == 0 ? row[j] : x[r][j] + row[j];
    });
  }
  if (p.rank == kNowhere) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r][0] = x[r][1] = x[r][2] = x[r][3] = float_of(kNaNBits);
  }
}

// kSum: encodes the sum of payloads. kFeedback: with residuals. The plain variant needs the fewest registers.
template <bool kSum, bool kFeedback>
__global__ void __launch_bounds__(kThreads, kSum ? 1 : 8 / (1 + kFeedback))
    encode_unbucketed_kernel(const __grid_constant__ Table<EncodeTaskRow> t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const EncodeTaskRow& row = t.rows[p.index];
  uint8_t* chunk = chunk_of(m, p);
  uint8_t* to = chunk + e.codes;
  if (row.task == kGap) {
    const int64_t first = p.tile * kTile;
    for (int64_t i = first + threadIdx.x; i < row.count && i < first + kTile; i += kThreads) to[i] = 0;
    return;
  }
  const DType wire = wire_of(m, e, row);
  if (threadIdx.x == 0 && (p.tile + 1) * kTile >= row.count)
    pad(chunk, static_cast<int64_t>(e.codes) + row.count * size_of(wire));
  if (!kSum && !kFeedback && row.task == kRaw) return copy_tile(e.leaf, to, wire, p.tile, row.count);

  const Elements elements(row, p.tile);
  if (elements.q.block * kBlock >= row.count) return;
  float x[kRows][4];
  if constexpr (kSum) {
    sum_unbucketed(m, e, p, elements, wire, x);
  } else {
    elements.load(e.leaf, static_cast<DType>(e.dtype), [&](int r, const float4& four) { set_row(x[r], four); });
  }
  if constexpr (kFeedback) {
    elements.load(row.old, DType::kF32, [&](int r, const float4& four) { add_row(x[r], four); });
  }
  float undivided[kRows][4];
  if constexpr (kFeedback) copy_quad(x, undivided);
  if constexpr (kSum) divide(m, x);
  // From here on, x gets the decoded numbers, and `undivided` the encoding error.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int32_t word[4];
    const bool stochastic = m.codec.stochastic && row.task == kCoded;
    const uint64_t block = static_cast<uint64_t>(row.start / kBlock + elements.q.block);
    const uint32_t* const key = stochastic ? m.keys + kKeyWords * p.row : nullptr;
    if (stochastic) draw(word, key, block * kLanes + elements.q.place * 4 + j, row.id);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint32_t half = 0;
      if (stochastic) {
        const int32_t noise = noise_of<Scalar>(word, r, key[2]);
        half = static_cast<uint32_t>(wire == DType::kBF16 ? Cast<DType::kBF16>::to_bits<Scalar, true>(x[r][j], noise)
                                                          : Cast<DType::kF16>::to_bits<Scalar, true>(x[r][j], noise));
      } else if (wire != DType::kF32) {
        half = narrow(wire, x[r][j]);
      }
      if (wire != DType::kF32) x[r][j] = widen(wire, half);
      if constexpr (kFeedback) undivided[r][j] -= m.divisor * x[r][j];
    }
  }
  elements.store(to, wire, x);
  if constexpr (kFeedback) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& lost = undivided[r][j];
        if (elements.at(r, j) < row.count) lost = new_residual(lost, row.old + elements.at(r, j));
      }
    }
    elements.store(row.lost, DType::kF32, undivided);
  }
}

template <bool kSum>
__global__ void __launch_bounds__(kThreads, kSum ? 1 : 8)
    decode_unbucketed_kernel(const __grid_constant__ Table<DecodeTaskRow> t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const DecodeTaskRow& row = t.rows[p.index];
  const DType wire = wire_of(m, e, row);
  void* leaf = const_cast<void*>(e.leaf);
  if (!kSum && row.task == kRaw) return copy_tile(payloads_of(m, p) + e.codes, leaf, wire, p.tile, row.count);
  const Elements elements(row, p.tile);
  if (elements.q.block * kBlock >= row.count) return;
  float x[kRows][4];
  if constexpr (kSum) {
    sum_unbucketed(m, e, p, elements, wire, x);
    divide(m, x);
    elements.store(row.sum, DType::kF32, x);
  } else {
    elements.load(payloads_of(m, p) + e.codes, wire, [&](int r, const float4& four) { set_row(x[r], four); });
    elements.store(leaf, static_cast<DType>(e.dtype), x);
  }
}

template <class Row>
Status launch_unbucketed(const Call& call, void (*kernel)(Table<Row>), const char* name, bool clears_gaps) {
  const Layout& l = call.layout;
  const Codec& c = l.codec;
  Launches launches(call, kernel, name, kThreads);
  const auto add = [&](Item<Row> item, Task task, int64_t at, int64_t count) {
    if (count == 0) return;
    item.entry.codes = static_cast<uint64_t>(at);
    item.row.count = count;
    item.row.task = task;
    launches.add(item, div_up(count, kTile));
  };
  for (int64_t row = 0; row < call.batch; ++row) {
    for (int64_t chunk = 0; chunk < l.chunks(); ++chunk) {
      // The offset at which bytes begin that no element writes.
      int64_t at = l.meta_end[static_cast<size_t>(chunk)];
      Item<Row> gap;
      gap.entry.slot = slot_of(l, row, chunk);
      const auto clear_to = [&](int64_t end) {
        if (clears_gaps) add(gap, kGap, at, end - at);
      };
      for (const Piece& p : l.pieces_of(chunk)) {
        const DType dtype = l.leaves[static_cast<size_t>(p.leaf)].dtype;
        if (!has_buckets(c.kind))
          add(Item<Row>(l, call.leaves, row, p), is_raw(c.kind) ? kRaw : kCoded, p.codes, p.coded);
        clear_to(p.codes);
        at = p.codes + code_bytes(c, dtype, p);
        // Only kernels of quads don't clear the padding after their codes. They have padding only if buckets are very
        // small, or blocks have scales.
        if (elements_of_quads(c, p) < p.coded) at = align16(at);
        add(Item<Row>(l, call.leaves, row, p, p.coded), kRaw, p.tail, p.raw);
        clear_to(p.tail);
        at = align16(p.tail + p.raw * size_of(dtype));
      }
      clear_to(l.chunk_bytes);
    }
  }
  return launches.finish();
}

}  // namespace

Status encode_unbucketed(const Call& call) {
  const bool sums = call.message.payloads != nullptr, feedback = call.leaves.residuals != nullptr;
  return launch_unbucketed(call,
                           sums
                               ? feedback ? encode_unbucketed_kernel<true, true> : encode_unbucketed_kernel<true, false>
                           : feedback ? encode_unbucketed_kernel<false, true>
                                      : encode_unbucketed_kernel<false, false>,
                           "encode kernel of unbucketed elements", call.clears_gaps);
}
Status decode_unbucketed(const Call& call) {
  return launch_unbucketed(call, call.message.sums ? decode_unbucketed_kernel<true> : decode_unbucketed_kernel<false>,
                           "decode kernel of unbucketed elements", false);
}

}  // namespace jaxcgx::cuda
