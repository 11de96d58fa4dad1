// Rotated buckets (codec/rotation.h). A thread block has one bucket, of up to 4096 elements.
//
// The registers have one of two layouts. In columns, thread t has the elements t, t + 128, t + 256 and so on. So global
// loads and stores are coalesced, and steps of the transform that are 128 or more elements apart stay within a thread.
// In quads, a thread has four lanes and all rows of a block of codec/pack.h, whose codes it makes or reads. The bucket
// goes through shared memory once, between the two layouts.
#include "codec/eden.h"
#include "cuda/decode_sum.cuh"
#include "cuda/encode_quad.cuh"
#include "cuda/launchers.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr int kColumn = static_cast<int>(kMostRotated / kThreads), kWarps = kThreads / kWarpSize;
static_assert(kThreads == kBlock, "");

// In quads, a warp accesses 16 bytes per thread, in eight blocks at a time. A gap after each block avoids bank
// conflicts between the blocks.
struct Shared {
  alignas(16) float x[kColumn * (kBlock + kLanes)];
  uint32_t signs[kColumn / 4 * kLanes];
  uint32_t largest[kWarps], seed;
  float lo[kWarps], hi[kWarps], sums[2][kWarps][kLanes], levels[kMostLevels], bounds[kMostLevels];
};
CGX_D int place_in(int block, int at) { return block * (kBlock + kLanes) + at; }

struct Bucket {
  int n, size, blocks, log_size;
  int64_t element;   // index in the entry of the first element
  int block, place;  // the block of this thread's quad; index of the quad in the block

  CGX_D Bucket(const Message& m, const Entry& e, const Extra& extra, uint32_t tile) {
    n = static_cast<int>(tile + 1 == e.count ? extra.last : m.codec.bucket_size);
    size = static_cast<int>(padded(n));
    blocks = size / kBlock;
    log_size = log_of(size);
    element = static_cast<int64_t>(tile) * m.codec.bucket_size;
    block = static_cast<int>(threadIdx.x) / 4;
    place = static_cast<int>(threadIdx.x) % 4;
  }
};

// Writes the sign bits of a seed to shared memory. They may be read after the next barrier.
CGX_D void draw_signs(uint32_t seed, Shared& s) {
  const uint32_t t = threadIdx.x;
  if (t >= 2 * kLanes) return;
  const uint32_t key[2] = {seed, 0};
  int32_t word[4];
  draw(word, key, t, 0);
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) s.signs[(t / kLanes * 4 + w) * kLanes + t % kLanes] = static_cast<uint32_t>(word[w]);
}
// Returns the sign bit of this thread's element in a block (columns).
CGX_D uint32_t sign_of(const Shared& s, int block) {
  const uint32_t t = threadIdx.x, row = static_cast<uint32_t>(block) % 4 * kRows + t / kLanes;
  return s.signs[static_cast<uint32_t>(block) / 4 * kLanes + t % kLanes] << row & 0x80000000u;
}

template <int n>
CGX_D void butterfly(float (&x)[n], int half) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    if (k & half) continue;
    const float a = x[k], b = x[(k + half) % n];
    x[k] = a + b, x[(k + half) % n] = a - b;
  }
}
// transform_columns does the steps of the transform with elements at least 128 apart, in columns. transform_quads does
// the other steps, in quads.
CGX_D void transform_columns(int blocks, float (&x)[kColumn]) {
#pragma unroll
  for (int half = kColumn / 2; half > 0; half /= 2) {
    if (half < blocks) butterfly(x, half);
  }
}
CGX_D void transform_quads(float (&x)[kRows][4], int place) {
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r & half) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = x[r][j], b = x[(r + half) % kRows][j];
        x[r][j] = a + b, x[(r + half) % kRows][j] = a - b;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int half = 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float other = __shfl_xor_sync(kWholeWarp, x[r][j], static_cast<unsigned>(half));
        x[r][j] = place & half ? other - x[r][j] : x[r][j] + other;
      }
    }
    butterfly(x[r], 2);
    butterfly(x[r], 1);
  }
}
// to_quads and to_columns change the layout of a bucket. Every thread of the thread block must call them.
CGX_D void to_quads(const Bucket& b, const float (&column)[kColumn], Shared& s, float (&quad)[kRows][4]) {
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    if (k < b.blocks) s.x[place_in(k, static_cast<int>(threadIdx.x))] = column[k];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float4 row = {0.0f, 0.0f, 0.0f, 0.0f};
    if (b.block < b.blocks) row = *reinterpret_cast<const float4*>(&s.x[place_in(b.block, r * kLanes + b.place * 4)]);
    set_row(quad[r], row);
  }
}
CGX_D void to_columns(const Bucket& b, const float (&quad)[kRows][4], Shared& s, float (&column)[kColumn]) {
  if (b.block < b.blocks) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      *reinterpret_cast<float4*>(&s.x[place_in(b.block, r * kLanes + b.place * 4)]) = {quad[r][0], quad[r][1],
                                                                                       quad[r][2], quad[r][3]};
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kColumn; ++k) column[k] = k < b.blocks ? s.x[place_in(k, static_cast<int>(threadIdx.x))] : 0.0f;
}

// Calls f with the width of a code as a type.
template <class Fn>
CGX_D void with_bits(int bits, Fn f) {
  switch (bits) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
    case 5:
      return f(std::integral_constant<int, 5>());
    case 6:
      return f(std::integral_constant<int, 6>());
    case 7:
      return f(std::integral_constant<int, 7>());
    default:
      return f(std::integral_constant<int, 8>());
  }
}

// Writes the levels of a codec with a table to shared memory. They may be read after the next barrier.
CGX_D void fill_levels(const Codec& c, Shared& s) {
  const auto t = static_cast<int>(threadIdx.x);
  if (traits_of(c.kind).table && t < 1 << (c.bits - 1)) s.levels[t] = normal_level(c.bits, t);
}

// Decodes a bucket from its metadata and codes, to columns. Every thread of the thread block must call this.
CGX_D void decode_bucket(const Message& m, const Bucket& b, const float (&meta)[2], const uint8_t* codes, Shared& s,
                         float (&x)[kColumn]) {
  const bool table = traits_of(m.codec.kind).table;
  const RotatedMeta back(meta[0], table ? 0.0f : meta[1], table ? seed_sent_as(meta[1]) : 0, b.log_size);
  float quad[kRows][4] = {};
  __syncthreads();  // wait until all threads have read the previous bucket from shared memory
  draw_signs(back.seed, s);
  fill_levels(m.codec, s);
  __syncthreads();
  if (b.block < b.blocks) {
    const Quad q(threadIdx.x, 12);
    with_bits(m.codec.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value, kHalf = 1 << (kBits - 1);
      Words<Scalar, kBits> lanes[4];
      load_codes<kBits>(codes + q.codes(kBits), q, lanes);
      const int32_t top = top_of(m.codec);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int32_t code = lanes[j].get(r), level = code - kHalf;
          if (table)
            quad[r][j] = level < 0 ? -s.levels[(-1 - level) % kMostLevels] : s.levels[level % kMostLevels];
          else
            quad[r][j] = static_cast<float>(code - top);
        }
      }
    });
  }
  transform_quads(quad, b.place);
  to_columns(b, quad, s, x);
  transform_columns(b.blocks, x);
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    if (k >= b.blocks) continue;
    const float v = k == 0 && threadIdx.x == 0 ? back.first(x[k]) : back.value(x[k]);
    x[k] = float_of(bits_of(v) ^ sign_of(s, k)) + 0.0f;
  }
}

// Decodes the bucket of a thread block: from one payload, or the sum of several payloads and the own rank's elements.
CGX_D void decode_place(const Message& m, const Entry& e, const Place& p, const Bucket& b, Shared& s,
                        float (&x)[kColumn]) {
  const uint8_t* payloads = payloads_of(m, p);
  const int64_t codes = static_cast<int64_t>(e.codes) + p.tile * packed_bytes(m.codec.bucket_size, code_bits(m.codec));
#pragma unroll
  for (int k = 0; k < kColumn; ++k) x[k] = p.rank == kNowhere ? float_of(kNaNBits) : 0.0f;
  if (p.rank == kNowhere) return;
  for (uint32_t rank = 0; rank < m.ranks; ++rank, payloads += m.chunk_bytes) {
    if (rank == p.rank) {
#pragma unroll
      for (int k = 0; k < kColumn; ++k) {
        const int at = k * kBlock + static_cast<int>(threadIdx.x);
        if (at < b.n) x[k] += load_element(e.leaf, static_cast<DType>(e.dtype), b.element + at);
      }
      continue;
    }
    const float* sent = reinterpret_cast<const float*>(payloads) + e.meta + static_cast<int64_t>(p.tile) * m.meta;
    const float meta[2] = {sent[0], m.meta == 2 ? sent[1] : 0.0f};
    float decoded[kColumn];
    decode_bucket(m, b, meta, payloads + codes, s, decoded);
#pragma unroll
    for (int k = 0; k < kColumn; ++k) x[k] += decoded[k];
  }
}

// Returns the sum over all quads of the bucket, in the order of codec/eden.h. CUB promises no order. lane: the sums of
// the thread's four lanes. `which`: the buffer in shared memory to use. No other thread may still be reading it.
CGX_D float sum_of_quads(const Bucket& b, float (&lane)[4], Shared& s, int which) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const float other = __shfl_xor_sync(kWholeWarp, lane[j], static_cast<unsigned>(4 * step));
      if (step < b.blocks) lane[j] += other;
    }
  }
  const uint32_t warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize < 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s.sums[which][warp][b.place * 4 + j] = lane[j];
  }
  __syncthreads();
  const auto& sums = s.sums[which];
  const uint32_t at = threadIdx.x % kLanes;
  float sum = sums[0][at];
  if (b.blocks > 8) sum += sums[1][at];
  if (b.blocks > 16) sum += sums[2][at] + sums[3][at];
#pragma unroll
  for (unsigned half = kLanes / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, half);
  return sum;
}

// Finds the code of each number, for a codec with a table. Returns the unit.
CGX_D float find_levels(const Message& m, const Bucket& b, const float (&x)[kRows][4], Shared& s,
                        int32_t (&code)[kRows][4]) {
  float lane[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float term = short_product<Scalar>(x[r][j], x[r][j]);
      lane[j] = r == 0 ? term : lane[j] + term;
    }
  }
  const float square = sum_of_quads(b, lane, s, 0), variance = square / static_cast<float>(b.size);
  const auto t = static_cast<int>(threadIdx.x);
  const int half = 1 << (m.codec.bits - 1);
  if (t > 0 && t < half) {
    const float bound = normal_bound(m.codec.bits, t);
    s.bounds[t] = bound * bound * variance;
  }
  fill_levels(m.codec, s);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = x[r][j], squared = v * v;
      int32_t index = 0;
      for (int step = half / 2; step > 0; step /= 2) index += s.bounds[index + step] < squared ? step : 0;
      const float term = short_product<Scalar>(fabsf(v), s.levels[index]);
      lane[j] = r == 0 ? term : lane[j] + term;
      code[r][j] = bits(v) < 0 ? half - 1 - index : half + index;
    }
  }
  const float sum = sum_of_quads(b, lane, s, 1);
  return square > 0.0f ? square / sum : 0.0f;
}

// Finds the code of each number, for MaxMin or AbsMax. Returns the grid.
CGX_D Grid find_codes(const Message& m, const Bucket& b, const Extra& extra, const uint32_t* key, Shared& s,
                      const float (&x)[kRows][4], int32_t (&code)[kRows][4]) {
  float lo = INFINITY, hi = -INFINITY;
  if (b.block < b.blocks) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) lo = fminf(lo, x[r][j]), hi = fmaxf(hi, x[r][j]);
    }
  }
  widen_stats(&lo, &hi, kWarpSize);
  if (threadIdx.x % kWarpSize == 0) s.lo[threadIdx.x / kWarpSize] = lo, s.hi[threadIdx.x / kWarpSize] = hi;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) lo = fminf(lo, s.lo[w]), hi = fmaxf(hi, s.hi[w]);
  const Grid g = Levels::grid({lo, hi}, 0.0f, b.size, m.codec);
  const int32_t top = top_of(m.codec);
  // Draws the random bits of the lane that has element `at` of the bucket, and returns the element's row. The padding
  // repeats the random bits of the bucket.
  const auto draw_lane = [&](int at, int32_t (&word)[4]) {
    const auto element = static_cast<uint64_t>(extra.start + b.element + at % b.n);
    draw(word, key, element / kBlock * kLanes + element % kLanes, extra.id);
    return static_cast<int>(element % kBlock / kLanes);
  };
  with_bits(m.codec.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int first = b.block * kBlock + b.place * 4 + j;
      int32_t word[4];
      if (m.codec.stochastic) draw_lane(first, word);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (m.codec.stochastic) {
          int row = r;
          if (first + r * kLanes >= b.n) row = draw_lane(first + r * kLanes, word);
          code[r][j] = code_of<Levels, kBits, true>(x[r][j], g, top, noise_of<Scalar>(word, row, key[2]));
        } else {
          code[r][j] = code_of<Levels, kBits, false>(x[r][j], g, top, 0);
        }
      }
    }
  });
  return g;
}

// Returns the bits of the bucket's largest magnitude. Every thread of the thread block must call this.
CGX_D uint32_t largest_of_columns(const Bucket& b, const float (&x)[kColumn], Shared& s) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    const uint32_t magnitude = bits_of(x[k]) & 0x7fffffffu;
    if (k * kBlock + static_cast<int>(threadIdx.x) < b.n && magnitude > largest) largest = magnitude;
  }
#pragma unroll
  for (unsigned apart = 1; apart < kWarpSize; apart *= 2) {
    const uint32_t other = __shfl_xor_sync(kWholeWarp, largest, apart);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % kWarpSize == 0) s.largest[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = s.largest[w] > largest ? s.largest[w] : largest;
  return largest;
}

__global__ void __launch_bounds__(kThreads) encode_rotated_kernel(const __grid_constant__ Table<true, true> t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile >= t.entries[p.index].count) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const Extra& extra = t.extras[p.index];
  const Residual& residual = t.residuals[p.index];
  const Bucket b(m, e, extra, p.tile);
  __shared__ Shared s;
  const bool table = traits_of(m.codec.kind).table;
  const auto at = [](int k) { return k * kBlock + static_cast<int>(threadIdx.x); };

  float x[kColumn], y[kColumn];
  if (m.payloads != nullptr) {
    decode_place(m, e, p, b, s, x);
  } else {
#pragma unroll
    for (int k = 0; k < kColumn; ++k)
      x[k] = at(k) < b.n ? load_element(e.leaf, static_cast<DType>(e.dtype), b.element + at(k)) : 0.0f;
  }
  if (residual.old != nullptr) {
#pragma unroll
    for (int k = 0; k < kColumn; ++k) {
      if (at(k) < b.n) x[k] += residual.old[b.element + at(k)];
    }
  }
#pragma unroll
  for (int k = 0; k < kColumn; ++k) y[k] = at(k) < b.n ? x[k] : 0.0f;
  divide(m, y);

  const uint32_t* key = m.keys == nullptr ? nullptr : m.keys + kKeyWords * p.row;
  if (threadIdx.x == 0) {
    s.seed = 0;
    if (table) {
      const auto first = static_cast<uint64_t>((extra.start + b.element) / kBlock * kLanes);
      int32_t word[4], next[4];
      draw(word, key, first, extra.id);
      draw(next, key, first + (b.n > 1), extra.id);
      s.seed = seed_of(static_cast<uint32_t>(noise_of<Scalar>(word, 0, key[2])),
                       static_cast<uint32_t>(noise_of<Scalar>(next, 0, key[2])));
    }
  }
  const uint32_t largest = largest_of_columns(b, y, s), seed = s.seed;
  const Rotation rotation(float_of(largest));
  draw_signs(seed, s);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    if (k >= b.blocks) continue;
    const float scaled = y[k] * rotation.scale * rotation.power;
    y[k] = float_of(bits_of(fabsf(scaled) < kDropped ? 0.0f : scaled) ^ sign_of(s, k));
  }
  transform_columns(b.blocks, y);
  float quad[kRows][4];
  to_quads(b, y, s, quad);
  transform_quads(quad, b.place);

  int32_t code[kRows][4];
  Grid g = {};
  if (table) {
    g.unit = find_levels(m, b, quad, s, code);
    g.base = sent_seed(seed);
  } else {
    g = find_codes(m, b, extra, key, s, quad, code);
    g.base = rotation.as_sent(g.base, b.log_size);
  }
  g.unit = rotation.as_sent(g.unit, b.log_size);
  g.finite = largest < 0x7f800000u && is_finite(g.unit) && is_finite(g.base);

  uint8_t* chunk = m.payload + (m.where != nullptr ? p.row : p.slot) * m.chunk_bytes;
  uint8_t* codes = chunk + e.codes + p.tile * packed_bytes(m.codec.bucket_size, code_bits(m.codec));
  if (b.block < b.blocks) {
    const Quad q(threadIdx.x, 12);
    with_bits(m.codec.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      Words<Scalar, kBits> lanes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        lanes[j].clear();
#pragma unroll
        for (int r = 0; r < kRows; ++r) lanes[j].put(r, g.finite ? code[r][j] : 0);
      }
      store_codes<kBits>(codes + q.codes(kBits), q, lanes);
    });
  }
  if (threadIdx.x == 0) store_meta(m, chunk, e.meta + static_cast<int64_t>(p.tile) * m.meta, g);
  if (residual.old == nullptr) return;
  // The thread block reads the codes that it wrote, and decodes them like every receiver. The barrier makes the other
  // threads' stores visible.
  __syncthreads();
  const float meta[2] = {unit_of(g), base_of(g)};
  decode_bucket(m, b, meta, codes, s, y);
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    if (at(k) >= b.n) continue;
    const int64_t i = b.element + at(k);
    const float lost = x[k] - m.divisor * y[k];
    residual.lost[i] = is_finite(lost) ? lost : residual.old[i];
  }
}

__global__ void __launch_bounds__(kThreads) decode_rotated_kernel(const __grid_constant__ Table<true, true> t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile >= t.entries[p.index].count) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const Bucket b(m, e, t.extras[p.index], p.tile);
  __shared__ Shared s;
  float x[kColumn];
  decode_place(m, e, p, b, s, x);
  divide(m, x);
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    const int at = k * kBlock + static_cast<int>(threadIdx.x);
    if (at >= b.n) continue;
    if (m.sums)
      t.residuals[p.index].lost[b.element + at] = x[k];
    else
      store_element(const_cast<void*>(e.leaf), static_cast<DType>(e.dtype), b.element + at, x[k]);
  }
}

Status launch(const Call& call, void (*kernel)(Table<true, true>), const char* name) {
  const Layout& l = call.layout;
  Launches launches(call, kernel, name, kThreads);
  for (int64_t row = 0; row < call.batch; ++row) {
    for (const Piece& p : l.pieces) {
      if (p.coded == 0) continue;
      const int64_t count = div_up(p.coded, p.bucket);
      if (count > UINT32_MAX) return {name, cudaErrorInvalidConfiguration};
      Item item(l, call.leaves, row, p);
      item.entry.count = static_cast<uint32_t>(count);
      item.extra.last = p.coded - (count - 1) * p.bucket;
      launches.add(item, count);
    }
  }
  return launches.finish();
}

}  // namespace

Status encode_rotated(const Call& call) {
  return launch(call, encode_rotated_kernel, "encode kernel of rotated buckets");
}
Status decode_rotated(const Call& call) {
  return launch(call, decode_rotated_kernel, "decode kernel of rotated buckets");
}

}  // namespace jaxcgx::cuda
