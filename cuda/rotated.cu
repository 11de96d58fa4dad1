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
  float lo[kWarps], hi[kWarps], sums[2][kWarps][kLanes], levels[2 * kMostLevels], bounds[kMostLevels];
};
CGX_D int place_in(int block, int at) { return block * (kBlock + kLanes) + at; }

struct RotatedRow {
  int64_t last;  // elements of the last bucket
};
struct EncodeRotatedRow : RotatedRow, Draws, Residual {};
struct DecodeRotatedRow : RotatedRow, Sum {};

struct Bucket {
  int n, size, blocks, log_size;
  int64_t element;   // index in the entry of the first element
  int block, place;  // the block of this thread's quad; index of the quad in the block

  CGX_D Bucket(const Message& m, const Entry& e, int64_t last, uint32_t tile) {
    n = static_cast<int>(tile + 1 == e.count ? last : m.codec.bucket_size);
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
      const float sign = place & half ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[r][j] = __fmaf_rn(x[r][j], sign, __shfl_xor_sync(kWholeWarp, x[r][j], static_cast<unsigned>(half)));
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

// An attribute of lambdas. Without it, large lambdas are not inlined, and the variables that they use are in memory.
#define CGX_INLINE __attribute__((always_inline))

// What codes are: levels of a grid, levels of a table (codec/eden.h), or numbers in blocks with scales (codec/micro.h).
enum class Form { kGrid, kTable, kScaled };
template <Form kForm>
using CodecOf = std::conditional_t<kForm == Form::kScaled, Micro<kNvfp4>, Levels>;

// Calls f with the width of a code as a type. kTable: for codecs with a table, which have fewer widths.
template <bool kTable, class Fn>
CGX_D void with_width(int bits, Fn f) {
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
      if constexpr (!kTable) return f(std::integral_constant<int, 7>());
      return;
    case 8:
      if constexpr (!kTable) return f(std::integral_constant<int, 8>());
      return;
  }
}

template <Form kForm, class Fn>
CGX_D void with_bits(int bits, Fn f) {
  if constexpr (kForm == Form::kScaled)
    f(std::integral_constant<int, 4>());
  else
    with_width<kForm == Form::kTable>(bits, f);
}

// Writes the level of each code of a codec with a table to shared memory. They may be read after the next barrier. The
// levels are constants of the code, because a GPU would copy a table that it indexes to each thread's memory.
CGX_D void fill_levels(const Codec& c, Shared& s) {
  with_width<true>(c.bits, [&](auto bits) CGX_INLINE {
    constexpr int kBits = decltype(bits)::value, kHalf = 1 << (kBits - 1);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float level = normal_level(kBits, i);
      if (static_cast<int>(threadIdx.x) == i) s.levels[kHalf + i] = level, s.levels[kHalf - 1 - i] = -level;
    }
  });
}

// Returns the value of a code of a quad with scales.
CGX_D float value_of(const QuadCodes<Micro<kNvfp4>, 4>& codes, int r, int j) {
  const float value = __fmul_rn(number_of<Micro<kNvfp4>::Element, 4>(codes.lane[j], r), codes.scale(r));
  return fmaxf(fminf(value, kMostValue), -kMostValue);
}

// Decodes a bucket from its metadata and codes, to columns. Every thread of the thread block must call this. With a
// table, fill_levels was called.
template <Form kForm>
CGX_D void decode_bucket(const Message& m, const Bucket& b, const float (&meta)[2], const uint8_t* codes, Shared& s,
                         float (&x)[kColumn]) {
  constexpr bool kSeeded = kForm != Form::kGrid;
  const RotatedMeta back(meta[0], kSeeded ? 0.0f : meta[1], kSeeded ? seed_sent_as(meta[1]) : 0, b.log_size);
  float quad[kRows][4] = {};
  __syncthreads();  // wait until all threads have read the previous bucket from shared memory
  draw_signs(back.seed, s);
  __syncthreads();
  if (b.block < b.blocks) {
    const Quad q(threadIdx.x, 12);
    with_bits<kForm>(m.codec.bits, [&](auto bits) CGX_INLINE {
      constexpr int kBits = decltype(bits)::value;
      QuadCodes<CodecOf<kForm>, kBits> sent;
      sent.load(codes + sent.at(q), q);
      const int32_t top = Levels::top(m.codec);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kForm == Form::kScaled)
            quad[r][j] = value_of(sent, r, j);
          else if constexpr (kForm == Form::kTable)
            quad[r][j] = s.levels[sent.lane[j].get(r)];
          else
            quad[r][j] = static_cast<float>(sent.lane[j].get(r) - top);
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
template <Form kForm>
CGX_D void decode_place(const Message& m, const Entry& e, const Place& p, const Bucket& b, Shared& s,
                        float (&x)[kColumn]) {
  const uint8_t* payloads = payloads_of(m, p);
  const int64_t codes = static_cast<int64_t>(e.codes) + p.tile * bucket_bytes(m.codec, m.codec.bucket_size);
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
    decode_bucket<kForm>(m, b, meta, payloads + codes, s, decoded);
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

// Finds the codes of a quad for a codec with a table. Returns the unit. fill_levels was called before a barrier.
template <int kBits>
CGX_D float find_levels(const Bucket& b, const float (&x)[kRows][4], Shared& s, QuadCodes<Levels, kBits>& codes) {
  constexpr int kHalf = 1 << (kBits - 1);
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
#pragma unroll
  for (int i = 1; i < kHalf; ++i) {
    const float bound = normal_bound(kBits, i);
    if (static_cast<int>(threadIdx.x) == i) s.bounds[i] = bound * bound * variance;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = x[r][j], squared = v * v;
      int32_t index = 0;
#pragma unroll
      for (int step = kHalf / 2; step > 0; step /= 2) index += s.bounds[index + step] < squared ? step : 0;
      const float term = short_product<Scalar>(fabsf(v), s.levels[kHalf + index]);
      lane[j] = r == 0 ? term : lane[j] + term;
      codes.lane[j].put(r, bits(v) < 0 ? kHalf - 1 - index : kHalf + index);
    }
  }
  const float sum = sum_of_quads(b, lane, s, 1);
  return square > 0.0f ? square / sum : 0.0f;
}

// The noise of each thread's quad, 16 bits for an element. It is in shared memory, because loops that are not unrolled
// write it. A thread reads only its own.
using QuadNoise = uint16_t[kRows * 4][kThreads];

// Draws the noise of a quad. The padding of a bucket repeats the noise of the bucket.
CGX_D void draw_noise(const Bucket& b, const Draws& draws, const uint32_t* key, QuadNoise& noise) {
  if (b.block >= b.blocks) return;
  const uint32_t t = threadIdx.x;
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    const int first = b.block * kBlock + b.place * 4 + j;
    int32_t word[4];
    // Draws for the lane of element `at` of the bucket, and returns the element's row.
    const auto draw_lane = [&](int at) {
      const auto element = static_cast<uint64_t>(draws.start + b.element + at % b.n);
      draw(word, key, element / kBlock * kLanes + element % kLanes, draws.id);
      return static_cast<int>(element % kBlock / kLanes);
    };
    if (first + (kRows - 1) * kLanes < b.n) {
      draw_lane(first);
#pragma unroll
      for (int r = 0; r < kRows; ++r) noise[r * 4 + j][t] = static_cast<uint16_t>(noise_of<Scalar>(word, r, key[2]));
      continue;
    }
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const int row = draw_lane(first + r * kLanes);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i == row) noise[r * 4 + j][t] = static_cast<uint16_t>(noise_of<Scalar>(word, i, key[2]));
      }
    }
  }
}

// Returns the grid of a bucket.
template <class C>
CGX_D Grid grid_of_rotated(const Message& m, const Bucket& b, const float (&x)[kRows][4], Shared& s) {
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
  return C::grid({lo, hi}, 0.0f, b.size, m.codec);
}

// Finds the codes of a quad for NVFP4, and those of its block's scales. Returns the unit.
CGX_D float find_numbers(const Message& m, const Bucket& b, const float (&x)[kRows][4], Shared& s,
                         QuadCodes<Micro<kNvfp4>, 4>& codes) {
  const Grid g = grid_of_rotated<Micro<kNvfp4>>(m, b, x, s);
  scaled_codes_of_quad<false>(Quad(threadIdx.x, 12), g, x, [](int, int) { return 0; }, codes);
  float squares[4], products[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = x[r][j];
      const float square = short_product<Scalar>(v, v), product = short_product<Scalar>(v, value_of(codes, r, j));
      squares[j] = r == 0 ? square : squares[j] + square;
      products[j] = r == 0 ? product : products[j] + product;
    }
  }
  const float square = sum_of_quads(b, squares, s, 0), product = sum_of_quads(b, products, s, 1);
  return square > 0.0f ? square / product : 0.0f;
}

// Finds the codes of a quad for MaxMin or AbsMax. Returns the grid.
template <int kBits>
CGX_D Grid find_codes(const Message& m, const Bucket& b, const float (&x)[kRows][4], const QuadNoise& noise, Shared& s,
                      QuadCodes<Levels, kBits>& codes) {
  const Grid g = grid_of_rotated<Levels>(m, b, x, s);
  const int32_t top = Levels::top(m.codec);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int32_t code = m.codec.stochastic
                               ? code_of<Levels, kBits, true>(x[r][j], g, top, noise[r * 4 + j][threadIdx.x])
                               : code_of<Levels, kBits, false>(x[r][j], g, top, 0);
      codes.lane[j].put(r, code);
    }
  }
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

template <Form kForm, bool kFeedback>
__global__ void __launch_bounds__(kThreads) encode_rotated_kernel(const __grid_constant__ Table<EncodeRotatedRow> t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile >= t.entries[p.index].count) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const EncodeRotatedRow& row = t.rows[p.index];
  const Bucket b(m, e, row.last, p.tile);
  __shared__ Shared s;
  if constexpr (kForm == Form::kTable) fill_levels(m.codec, s);
  const auto at = [](int k) { return k * kBlock + static_cast<int>(threadIdx.x); };

  float x[kColumn], y[kColumn];
  if (m.payloads != nullptr) {
    decode_place<kForm>(m, e, p, b, s, x);
  } else {
#pragma unroll
    for (int k = 0; k < kColumn; ++k)
      x[k] = at(k) < b.n ? load_element(e.leaf, static_cast<DType>(e.dtype), b.element + at(k)) : 0.0f;
  }
  if constexpr (kFeedback) {
#pragma unroll
    for (int k = 0; k < kColumn; ++k) {
      if (at(k) < b.n) x[k] += row.old[b.element + at(k)];
    }
  }
#pragma unroll
  for (int k = 0; k < kColumn; ++k) y[k] = at(k) < b.n ? x[k] : 0.0f;
  divide(m, y);

  const uint32_t* key = m.keys == nullptr ? nullptr : m.keys + kKeyWords * p.row;
  if (threadIdx.x == 0) {
    s.seed = 0;
    if (kForm != Form::kGrid) {
      const auto first = static_cast<uint64_t>((row.start + b.element) / kBlock * kLanes);
      int32_t word[4], next[4];
      draw(word, key, first, row.id);
      draw(next, key, first + (b.n > 1), row.id);
      s.seed = seed_of(static_cast<uint32_t>(noise_of<Scalar>(word, 0, key[2])),
                       static_cast<uint32_t>(noise_of<Scalar>(next, 0, key[2])));
    }
  }
  const uint32_t largest = largest_of_columns(b, y, s), seed = s.seed;
  const bool finite = largest < 0x7f800000u;
  const Rotation rotation(float_of(largest));
  draw_signs(seed, s);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    if (k >= b.blocks) continue;
    const float scaled = y[k] * rotation.scale * rotation.power;
    y[k] = float_of(bits_of(finite && fabsf(scaled) >= kDropped ? scaled : 0.0f) ^ sign_of(s, k));
  }
  transform_columns(b.blocks, y);
  float quad[kRows][4];
  to_quads(b, y, s, quad);
  transform_quads(quad, b.place);

  uint8_t* chunk = chunk_of(m, p);
  uint8_t* codes = chunk + e.codes + p.tile * bucket_bytes(m.codec, m.codec.bucket_size);
  Grid g = {};
  __shared__ std::conditional_t<kForm == Form::kGrid, QuadNoise, char> noise;  // else seeds are all the noise
  if constexpr (kForm == Form::kGrid) {
    if (m.codec.stochastic) draw_noise(b, row, key, noise);
  }
  with_bits<kForm>(m.codec.bits, [&](auto bits) CGX_INLINE {
    QuadCodes<CodecOf<kForm>, decltype(bits)::value> sent;
#pragma unroll
    for (auto& lane : sent.lane) lane.clear();
    if constexpr (kForm == Form::kTable) {
      g.unit = find_levels(b, quad, s, sent);
      g.base = sent_seed(seed);
    } else if constexpr (kForm == Form::kScaled) {
      g.unit = find_numbers(m, b, quad, s, sent);
      g.base = sent_seed(seed);
    } else {
      g = find_codes(m, b, quad, noise, s, sent);
      g.base = rotation.as_sent(g.base, b.log_size);
    }
    g.unit = rotation.as_sent(g.unit, b.log_size);
    g.finite = finite && is_finite(g.unit) && is_finite(g.base);
#pragma unroll
    for (auto& lane : sent.lane) {
      if (!g.finite) lane.clear();
    }
    if (!g.finite) {
#pragma unroll
      for (uint32_t& word : sent.scales) word = 0;
    }
    const Quad q(threadIdx.x, 12);
    if (b.block < b.blocks) sent.store(codes + sent.at(q), q);
  });
  if (threadIdx.x == 0) store_meta(m, chunk, e.meta + static_cast<int64_t>(p.tile) * m.meta, g);
  if (kForm == Form::kScaled && threadIdx.x == 0 && p.tile + 1 == e.count)  // other blocks have multiples of 16 bytes
    pad(chunk, codes - chunk + bucket_bytes(m.codec, b.size));
  if constexpr (!kFeedback) return;
  // Each thread reads the codes that it wrote, and the thread block decodes them like every receiver.
  const float meta[2] = {unit_of(g), base_of(g)};
  decode_bucket<kForm>(m, b, meta, codes, s, y);
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    if (at(k) >= b.n) continue;
    const int64_t i = b.element + at(k);
    const float lost = x[k] - m.divisor * y[k];
    row.lost[i] = new_residual(lost, row.old + i);
  }
}

template <Form kForm>
__global__ void __launch_bounds__(kThreads, 4)
    decode_rotated_kernel(const __grid_constant__ Table<DecodeRotatedRow> t) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile >= t.entries[p.index].count) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const Bucket b(m, e, t.rows[p.index].last, p.tile);
  __shared__ Shared s;
  if constexpr (kForm == Form::kTable) fill_levels(m.codec, s);
  float x[kColumn];
  decode_place<kForm>(m, e, p, b, s, x);
  divide(m, x);
#pragma unroll
  for (int k = 0; k < kColumn; ++k) {
    const int at = k * kBlock + static_cast<int>(threadIdx.x);
    if (at >= b.n) continue;
    if (m.sums)
      t.rows[p.index].sum[b.element + at] = x[k];
    else
      store_element(const_cast<void*>(e.leaf), static_cast<DType>(e.dtype), b.element + at, x[k]);
  }
}

// Calls f with the form of a codec's codes as a type.
template <class Fn>
Status with_form(const Codec& c, Fn f) {
  const Traits traits = traits_of(c.kind);
  if (traits.table) return f(std::integral_constant<Form, Form::kTable>());
  if (traits.scales) return f(std::integral_constant<Form, Form::kScaled>());
  return f(std::integral_constant<Form, Form::kGrid>());
}

template <class Row>
Status launch(const Call& call, void (*kernel)(Table<Row>), const char* name) {
  const Layout& l = call.layout;
  Launches launches(call, kernel, name, kThreads);
  for (int64_t row = 0; row < call.batch; ++row) {
    for (const Piece& p : l.pieces) {
      if (p.coded == 0) continue;
      const int64_t count = div_up(p.coded, p.bucket);
      if (count > UINT32_MAX) return {name, cudaErrorInvalidConfiguration};
      Item<Row> item(l, call.leaves, row, p);
      item.entry.count = static_cast<uint32_t>(count);
      item.row.last = p.coded - (count - 1) * p.bucket;
      launches.add(item, count);
    }
  }
  return launches.finish();
}

}  // namespace

Status encode_rotated(const Call& call) {
  return with_form(call.layout.codec, [&](auto form) {
    constexpr Form kForm = decltype(form)::value;
    const auto kernel =
        call.leaves.residuals != nullptr ? encode_rotated_kernel<kForm, true> : encode_rotated_kernel<kForm, false>;
    return launch(call, kernel, "encode kernel of rotated buckets");
  });
}
Status decode_rotated(const Call& call) {
  return with_form(call.layout.codec, [&](auto form) {
    return launch(call, decode_rotated_kernel<decltype(form)::value>, "decode kernel of rotated buckets");
  });
}

}  // namespace jaxcgx::cuda
