// Buckets of any size. A thread has one lane of a block of codec/pack.h, with its eight elements in registers. A bucket
// takes a thread for each lane. Buckets of more than kMostStaged elements are cut into parts of that size. Parts are
// read once for the statistics (and once for sums, if the codec needs sums). After the statistics of all parts are
// known, parts are read again for the codes. If kernels of quads read the whole blocks of large buckets, the kernels
// here have only the rests after them (has_large_blocks).
#pragma once

#include "cuda/decode_sum.cuh"
#include "cuda/encode_quad.cuh"

namespace jaxcgx::cuda {

constexpr uint32_t kMostThreads = kMostStaged / kRows;

// The stage of a launch. kWhole does everything, for whole buckets. The other stages are for the parts of large
// buckets.
enum Stage : int32_t { kWhole, kStats, kSums, kCodes };

static_assert(sizeof(Grid) <= kGridFloats * sizeof(float), "");
static_assert(sizeof(float2) == kRangeFloats * sizeof(float), "");

// What a launch does with all pieces.
struct Launch {
  Stage stage;
  uint32_t threads, groups;  // threads of a bucket; buckets of a thread block
};

struct BucketRow : Early {
  int64_t last;  // elements of the last bucket
};

// The lane of this thread, and its bucket or part of a bucket.
struct Lane {
  int64_t bucket;   // index of the bucket in the entry
  int64_t element;  // index in the entry of the first element of the bucket or part
  int64_t size;     // elements of the whole bucket
  int64_t part;
  int32_t count;                  // elements of the bucket or part
  uint32_t first_thread, thread;  // the bucket's first thread; index of this thread among the bucket's threads
  int32_t lane, lanes, block;
  int32_t rows;  // number of rows in which this lane has an element
  bool coded;    // whether this lane has words

  CGX_D Lane(const Message& m, const Launch& launch, const Entry& e, int64_t last, uint32_t tile) {
    thread = threadIdx.x % launch.threads;
    first_thread = threadIdx.x - thread;
    part = 0;
    if (launch.stage == kWhole) {
      bucket = static_cast<int64_t>(tile) * launch.groups + threadIdx.x / launch.threads;
    } else {
      const auto parts = static_cast<uint32_t>(parts_of(m, e, last));
      bucket = tile / parts;
      part = tile % parts;
    }
    size = bucket >= e.count ? 0 : bucket + 1 == e.count ? last : m.codec.bucket_size;
    const int64_t left = size - part * kMostStaged;
    count = static_cast<int32_t>(left < 0 ? 0 : left < kMostStaged ? left : kMostStaged);
    element = bucket * m.codec.bucket_size + part * kMostStaged;
    block = static_cast<int32_t>(thread) / kLanes;
    lane = static_cast<int32_t>(thread) % kLanes;
    const int32_t here = count - block * kBlock;
    lanes = m.scales ? kLanes : lanes_of(here);
    coded = m.scales ? here > 0 : lane < lanes;
    rows = here >= kBlock ? kRows : lane < lanes ? (here - lane + lanes - 1) / lanes : 0;
    rows = rows > kRows ? kRows : rows < 0 ? 0 : rows;
  }
  CGX_D static int64_t parts_of(const Message& m, const Entry& e, int64_t last) {
    return div_up(e.count > 1 ? m.codec.bucket_size : last, kMostStaged);
  }

  // Returns whether any thread of the thread block has a bucket. It is the same for all threads of the block.
  CGX_D bool there(const Launch& launch, const Entry& e) const {
    return bucket - threadIdx.x / launch.threads < e.count;
  }
  CGX_D int64_t at(int row) const { return element + block * kBlock + row * lanes + lane; }

  // Returns the byte offset of the block's words in the codes of the entry.
  CGX_D int64_t codes(const Message& m) const {
    return bucket * bucket_bytes(m.codec, m.codec.bucket_size) +
           bucket_bytes(m.codec, part * kMostStaged + block * kBlock);
  }
};

// Returns the scale of a row, from the bytes of its block; 1 for codecs without scales.
template <class C, int kBits>
CGX_D float scale_of_row(const uint8_t* block, int row) {
  if constexpr (traits_of(C::kKind).scales)
    return C::template scale<Scalar>(block[kLanes * kBits + row / C::kScaleRows]);
  else
    return 1.0f;
}

// Loads the numbers of a lane from a leaf.
CGX_D void load_lane(const void* leaf, DType dtype, const Lane& l, float (&x)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = r < l.rows ? load_element(leaf, dtype, l.at(r)) : 0.0f;
}
// Decodes the numbers of a lane from payloads and sums them. The caller divides.
template <class C, int kBits>
CGX_D void sum_lane(const Message& m, const Entry& e, const Place& p, const Lane& l, float (&x)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = 0.0f;
  if (l.rows == 0) return;
  const uint8_t* payloads = payloads_of(m, p);
  const Metadata meta(m, payloads, e.meta + l.bucket * m.meta);
  const int32_t top = Levels::top(m.codec);
  const float base = meta.base(m, p.rank);
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = base;
  const uint8_t* codes = payloads + e.codes + l.codes(m);
#pragma unroll 2
  for (uint32_t rank = 0; rank < m.ranks; ++rank, codes += m.chunk_bytes) {
    if (rank == p.rank) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < l.rows) x[r] += load_element(e.leaf, static_cast<DType>(e.dtype), l.at(r));
      }
    } else {
      Words<Scalar, kBits> w;
      each_word<kBits>(w, l.lane, l.lanes,
                       [&](auto size, int32_t& word, int32_t at) { word = load_word<decltype(size)>(codes + at); });
      const float unit = meta.unit(rank);
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r] = plus<C, kBits>(x[r], unit, w, r, top, scale_of_row<C, kBits>(codes, r));
    }
  }
}

// Extends a range to all threads of a bucket. Every thread of the thread block must call this, because it has a
// barrier.
CGX_D void widen_bucket(const Lane& l, uint32_t threads, float* lo, float* hi) {
  widen_stats(lo, hi, threads);
  if (threads <= kWarpSize) return;
  __shared__ float of_warp[2][kMostThreads / kWarpSize];
  of_warp[0][threadIdx.x / kWarpSize] = *lo, of_warp[1][threadIdx.x / kWarpSize] = *hi;
  __syncthreads();
  const uint32_t warp = threadIdx.x % kWarpSize, first = l.first_thread / kWarpSize;
  *lo = warp < threads / kWarpSize ? of_warp[0][first + warp] : INFINITY;
  *hi = warp < threads / kWarpSize ? of_warp[1][first + warp] : -INFINITY;
  widen_stats(lo, hi, kWarpSize);
}

// Returns the sum of the magnitudes of a block, in every thread that has a lane of the block. The sum has the order of
// codec/grid.h. CUB's reductions promise no order.
CGX_D float sum_of_block(const Lane& l, uint32_t threads, const float (&x)[kRows], float scale) {
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum += r < l.rows ? fabsf(x[r] * scale) : 0.0f;
#pragma unroll
  for (uint32_t m = kLanes / 2; m > 0; m /= 2) {
    const float other = __shfl_xor_sync(kWholeWarp, sum, m);
    if (m < threads) sum += other;
  }
  return sum;
}

struct NoNoise {};
struct Noise {
  uint16_t of[kMostStaged + 2 * kBlock];
};

}  // namespace jaxcgx::cuda
