#include "cuda/any_bucket.cuh"

#include "cuda/launchers.cuh"

namespace jaxcgx::cuda {
namespace {

// Finds the codes of a lane of a block with scales, and the scales of its rows. The first lane stores the codes of the
// scales to `stored`. random(row) returns noise. Every thread of the warp must call this, because it has shuffles.
template <class C, int kBits, bool kStochastic, class Random>
CGX_D void encode_scaled(const Lane& l, const float (&x)[kRows], const Grid& g, Random random, Words<Scalar, kBits>& w,
                         float (&scales)[kRows], uint8_t* stored) {
#pragma unroll
  for (int first = 0; first < kRows; first += C::kScaleRows) {
    float largest = 0.0f;
#pragma unroll
    for (int r = first; r < first + C::kScaleRows; ++r) {
      const float y = fabsf(x[r] * g.scale * g.inv);
      if (r < l.rows) largest = fmaxf(largest, y == y ? y : INFINITY);
    }
#pragma unroll
    for (uint32_t m = kLanes / 2; m > 0; m /= 2) largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, m));
    const int32_t code = g.finite ? C::template scale_code<Scalar, kStochastic>(largest) : 0;
    const float inverse = C::template inverse<Scalar>(code);
#pragma unroll
    for (int r = first; r < first + C::kScaleRows; ++r) {
      scales[r] = C::template scale<Scalar>(code);
      if (r >= l.rows || !g.finite || !C::template is_number<Scalar>(code)) continue;
      const float y = x[r] * g.scale * g.inv * inverse;
      if constexpr (kStochastic)
        w.put(r, C::template quantize<Scalar>(y, random(r)));
      else
        w.put(r, C::template quantize<Scalar>(y));
    }
    if (l.coded && l.lane == 0) stored[first / C::kScaleRows] = static_cast<uint8_t>(code);
  }
}

struct EncodeBucketsRow : BucketRow, Draws, Residual, LargeBuckets {};

template <class C, int kBits, bool kStochastic>
__global__ void __launch_bounds__(kMostThreads)
    encode_any_bucket_kernel(const __grid_constant__ Table<EncodeBucketsRow> t, const __grid_constant__ Launch launch) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const EncodeBucketsRow& row = t.rows[p.index];
  const Lane l(m, launch, e, row.last, p.tile);
  if (!l.there(launch, e)) return;
  const Stage stage = launch.stage;
  float* work = stage == kWhole ? nullptr : memory_of(m, row, l.bucket, Lane::parts_of(m, e, row.last));

  float x[kRows];
  if (m.payloads != nullptr)
    sum_lane<C, kBits>(m, e, p, l, x);
  else
    load_lane(e.leaf, static_cast<DType>(e.dtype), l, x);
  if (row.old != nullptr) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < l.rows) x[r] += row.old[l.at(r)];
    }
  }
  float undivided[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) undivided[r] = x[r];
  divide(m, x);

  float lo = INFINITY, hi = -INFINITY;
  if (stage <= kStats) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < l.rows) lo = min_or_nan(lo, x[r]), hi = max_or_nan(hi, x[r]);
    }
    widen_bucket(l, launch.threads, &lo, &hi);
    if (stage == kStats) {
      if (l.thread == 0) *reinterpret_cast<float2*>(work + kGridFloats + kRangeFloats * l.part) = {lo, hi};
      return;
    }
  }
  float sum = 0.0f;
  if constexpr (traits_of(C::kKind).sums) {
    if (stage <= kSums) {
      const float scale = stage == kSums ? reinterpret_cast<const Grid*>(work)->scale : scale_of(largest_of({lo, hi}));
      sum = sum_of_block(l, launch.threads, x, scale);
      if (stage == kSums) {
        if (l.lane == 0)
          work[kGridFloats + kRangeFloats * Lane::parts_of(m, e, row.last) + l.part * kSumFloats + l.block] = sum;
        return;
      }
      if (launch.threads > kLanes) {
        __shared__ float of_block[kMostThreads / kLanes];
        of_block[threadIdx.x / kLanes] = sum;
        __syncthreads();
        sum = 0.0f;
        for (int32_t b = 0; b * kBlock < l.count; ++b)
          sum += of_block[l.first_thread / kLanes + static_cast<uint32_t>(b)];
      }
    }
  }
  const Grid g = stage == kCodes ? *reinterpret_cast<const Grid*>(work) : C::grid({lo, hi}, sum, l.size, m.codec);

  // Noise is drawn for the blocks of the leaf. The blocks of the bucket may begin elsewhere.
  int64_t first_noise = 0;
  __shared__ std::conditional_t<kStochastic, Noise, NoNoise> noise;
  if constexpr (kStochastic) {
    // The noise is for all elements that the thread block encodes.
    const int64_t first =
        row.start + (stage == kWhole ? static_cast<int64_t>(p.tile) * launch.groups * m.codec.bucket_size : l.element);
    const int64_t count = stage == kWhole ? launch.groups * (e.count == 1 ? row.last : m.codec.bucket_size) : l.count;
    first_noise = first / kBlock * kBlock;
    const uint32_t* const key = m.keys + kKeyWords * p.row;
    const auto draws = static_cast<uint32_t>(div_up(first + count - first_noise, kBlock)) * kLanes;
    for (uint32_t i = threadIdx.x; i < draws; i += blockDim.x) {
      int32_t word[4];
      draw(word, key, static_cast<uint64_t>(first_noise / kBlock) * kLanes + i, row.id);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        noise.of[i / kLanes * kBlock + r * kLanes + i % kLanes] =
            static_cast<uint16_t>(noise_of<Scalar>(word, r, key[2]));
    }
    __syncthreads();
  }
  const int32_t top = Levels::top(m.codec);
  Words<Scalar, kBits> w;
  w.clear();
  uint8_t* chunk = chunk_of(m, p);
  uint8_t* codes = chunk + e.codes + l.codes(m);
  float scales[kRows];
  const auto random = [&](int r) -> int32_t {
    if constexpr (kStochastic)
      return noise.of[row.start + l.at(r) - first_noise];
    else
      return 0;
  };
  if constexpr (traits_of(C::kKind).scales) {
    encode_scaled<C, kBits, kStochastic>(l, x, g, random, w, scales, codes + kLanes * kBits);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      scales[r] = 1.0f;
      if (r < l.rows && g.finite) w.put(r, code_of<C, kBits, kStochastic>(x[r], g, top, random(r)));
    }
  }
  if (!l.coded) return;
  each_word<kBits>(w, l.lane, l.lanes,
                   [&](auto size, int32_t word, int32_t at) { store_word<decltype(size)>(codes + at, word); });
  if (l.thread == 0 && l.part == 0) store_meta(m, chunk, e.meta + l.bucket * m.meta, g);
  if (l.thread == 0 && l.bucket + 1 == e.count && l.part * kMostStaged + l.count == l.size)
    pad(chunk, static_cast<int64_t>(e.codes) + l.codes(m) + bucket_bytes(m.codec, l.count));
  if (row.old == nullptr) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= l.rows) continue;
    const float lost = undivided[r] - m.divisor * plus<C, kBits>(base_of(g), unit_of(g), w, r, top, scales[r]);
    row.lost[l.at(r)] = new_residual(lost, row.old + l.at(r));
  }
}

struct DecodeBucketsRow : BucketRow, Sum {};

template <class C, int kBits>
__global__ void __launch_bounds__(kMostThreads)
    decode_any_bucket_kernel(const __grid_constant__ Table<DecodeBucketsRow> t, const __grid_constant__ Launch launch) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const Lane l(m, launch, e, t.rows[p.index].last, p.tile);
  if (!l.there(launch, e)) return;
  float x[kRows];
  sum_lane<C, kBits>(m, e, p, l, x);
  divide(m, x);
  float* out = t.rows[p.index].sum;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= l.rows) continue;
    if (m.sums)
      out[l.at(r)] = x[r];
    else
      store_element(const_cast<void*>(e.leaf), static_cast<DType>(e.dtype), l.at(r), x[r]);
  }
}

struct RangeRow : BucketRow, Residual, LargeBuckets {};

constexpr uint32_t kRangeThreads = kMostStaged / (kRows * 4);

// Finds the range of each part of large buckets of leaves, like encode_any_bucket_kernel with kStats. But a thread
// reads four neighbouring elements at a time.
template <bool kFeedback>
__global__ void __launch_bounds__(kRangeThreads, kFeedback ? 3 : 4)
    range_kernel(const __grid_constant__ Table<RangeRow> t, const __grid_constant__ Launch) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const RangeRow& row = t.rows[p.index];
  const auto parts = static_cast<uint32_t>(Lane::parts_of(m, e, row.last));
  const int64_t bucket = p.tile / parts, part = p.tile % parts;
  if (bucket >= e.count) return;
  const int64_t size = bucket + 1 == e.count ? row.last : m.codec.bucket_size;
  if (part * kMostStaged >= size) return;  // the last bucket may have fewer parts
  // A range may have an element twice. So the last part begins earlier if it would be short, and in a bucket of less
  // than one part, the last element is repeated.
  const int64_t end = (part + 1) * kMostStaged < size ? (part + 1) * kMostStaged : size;
  const int64_t first = bucket * m.codec.bucket_size + (end < kMostStaged ? 0 : end - kMostStaged);
  const auto load = [&](const void* from, DType dtype, auto f) {
    constexpr uint32_t kStep = kRangeThreads * 4;
    if (end >= kMostStaged) return load_quad(from, dtype, first + threadIdx.x * 4, kStep, f);
    const auto each = [&](DType d) {
      const auto last = static_cast<uint32_t>(end) - 1;
      const auto element = [&](uint32_t i) { return load_element(from, d, first + (i < last ? i : last)); };
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t i = r * kStep + threadIdx.x;
        f(r, float4{element(i), element(i + kRangeThreads), element(i + 2 * kRangeThreads),
                    element(i + 3 * kRangeThreads)});
      }
    };
    if (dtype == DType::kF32)
      each(DType::kF32);
    else if (dtype == DType::kBF16)
      each(DType::kBF16);
    else
      each(DType::kF16);
  };
  float x[kRows][4];
  load(e.leaf, static_cast<DType>(e.dtype), [&](int r, const float4& four) { set_row(x[r], four); });
  if constexpr (kFeedback) {
    load(row.old, DType::kF32, [&](int r, const float4& four) { add_row(x[r], four); });
  }
  float lo = x[0][0], hi = lo;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) lo = min_or_nan(lo, x[r][j]), hi = max_or_nan(hi, x[r][j]);
  }
  widen_stats(&lo, &hi, kWarpSize);
  __shared__ float of_warp[2][kRangeThreads / kWarpSize];
  if (threadIdx.x % kWarpSize == 0) of_warp[0][threadIdx.x / kWarpSize] = lo, of_warp[1][threadIdx.x / kWarpSize] = hi;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (uint32_t i = 1; i < kRangeThreads / kWarpSize; ++i)
    lo = min_or_nan(lo, of_warp[0][i]), hi = max_or_nan(hi, of_warp[1][i]);
  float* work = memory_of(m, row, bucket, parts);
  *reinterpret_cast<float2*>(work + kGridFloats + kRangeFloats * part) = {lo, hi};
}

struct GridRow : BucketRow, LargeBuckets {};

// Computes the grid of each large bucket from its parts, with one thread block per bucket. For a codec that needs sums
// it runs twice: first it computes the scale, then, from the sums, the grid.
__global__ void __launch_bounds__(kMostThreads)
    grid_kernel(const __grid_constant__ Table<GridRow> t, const __grid_constant__ Launch launch) {
  const Place p = place_of(t);
  if (p.index < 0 || p.tile >= t.entries[p.index].count) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const GridRow& row = t.rows[p.index];
  const int64_t parts = Lane::parts_of(m, e, row.last), n = p.tile + 1 == e.count ? row.last : m.codec.bucket_size;
  float* work = memory_of(m, row, p.tile, parts);
  const float2* range = reinterpret_cast<const float2*>(work + kGridFloats);
  float lo = INFINITY, hi = -INFINITY;
  for (int64_t i = threadIdx.x; i * kMostStaged < n; i += blockDim.x)
    lo = min_or_nan(lo, range[i].x), hi = max_or_nan(hi, range[i].y);
  widen_stats(&lo, &hi, kWarpSize);
  __shared__ float of_warp[2][kMostThreads / kWarpSize];
  if (threadIdx.x % kWarpSize == 0) of_warp[0][threadIdx.x / kWarpSize] = lo, of_warp[1][threadIdx.x / kWarpSize] = hi;
  float* sums = work + kGridFloats + kRangeFloats * parts;
  const bool needs_sums = traits_of(m.codec.kind).sums;
  constexpr int64_t kGroup = kSumGroup / kBlock;
  const int64_t blocks = div_up(n, kBlock);
  if (needs_sums && launch.stage == kSums) {
    for (int64_t first = threadIdx.x * kGroup; first < blocks; first += blockDim.x * kGroup) {
      float sum = 0.0f;
      for (int64_t b = first; b < first + kGroup && b < blocks; ++b) sum += sums[b];
      sums[first] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (uint32_t i = 0; i < blockDim.x / kWarpSize; ++i)
    lo = min_or_nan(lo, of_warp[0][i]), hi = max_or_nan(hi, of_warp[1][i]);
  float sum = 0.0f;
  if (needs_sums) {
    if (launch.stage != kSums) {
      reinterpret_cast<Grid*>(work)->scale = scale_of(largest_of({lo, hi}));
      return;
    }
    for (int64_t first = 0; first < blocks; first += kGroup) sum += sums[first];
  }
  *reinterpret_cast<Grid*>(work) =
      with_grid_codec(m.codec, [&](auto type) { return decltype(type)::Codec::grid({lo, hi}, sum, n, m.codec); });
}

// Returns the number of threads for a bucket of n elements: at least one per lane, and a power of two or whole warps.
uint32_t threads_for(const Codec& c, int64_t n) {
  const int64_t lanes = traits_of(c.kind).scales ? div_up(n, kBlock) * kLanes : div_up(n, kRows);
  if (lanes > kWarpSize) return static_cast<uint32_t>(div_up(lanes, kWarpSize)) * kWarpSize;
  uint32_t threads = 1;
  while (threads < lanes) threads *= 2;
  return threads;
}

constexpr uint32_t kSmallThreads = 256;  // threads of a thread block that has several small buckets

// Which elements of large buckets a launch takes.
enum class Large { kNone, kAll, kRests };  // kRests: those after the whole blocks

// Launches `kernel` on the buckets that kernels of quads don't take. With kWhole, it launches on buckets that fit in a
// thread block, and may add the rests of large buckets as if they were buckets. With the other stages, it launches on
// large buckets.
template <class Row>
Status launch_any_bucket(const Call& call, Stage stage, Large large, void (*kernel)(Table<Row>, Launch),
                         const char* name, uint32_t threads = kMostThreads) {
  const Layout& l = call.layout;
  const Codec& c = l.codec;
  const auto takes = [&](const Piece& p) { return is_large(p) ? large != Large::kNone : stage == kWhole; };
  const auto first = [&](const Piece& p) { return is_large(p) && large == Large::kAll ? 0 : elements_of_quads(c, p); };
  int64_t largest = 0;
  for (const Piece& p : l.pieces) {
    if (takes(p)) largest = std::max(largest, std::min(p.bucket, p.coded - first(p)));
  }
  Launch launch{stage, large == Large::kAll ? threads : threads_for(c, largest), 1};
  if (stage == kWhole)  // The fast kernels leave only the last bucket of each piece.
    launch.groups = std::max(1u, (is_fast(c) ? kWarpSize : kSmallThreads) / launch.threads);
  else
    launch.threads = std::max(launch.threads, kWarpSize);
  Launches launches(call, kernel, name, std::max(kWarpSize, launch.groups * launch.threads), launch);
  int64_t work = 0;
  for (int64_t row = 0; row < call.batch; ++row) {
    for (const Piece& p : l.pieces) {
      const int64_t first_work = work;
      work += workspace_floats(c, p);
      if (!takes(p)) continue;
      const int64_t at = first(p), rest = p.coded - at;
      if (rest == 0) continue;
      const int64_t before = at / p.bucket, count = div_up(rest, p.bucket);
      if (count > UINT32_MAX) return {name, cudaErrorInvalidConfiguration};
      Item<Row> item(l, call.leaves, row, p, at, bucket_bytes(c, at), before * meta_floats(c));
      item.entry.count = static_cast<uint32_t>(count);
      item.row.last = rest - (count - 1) * p.bucket;
      if constexpr (std::is_base_of_v<LargeBuckets, Row>)
        item.row.work = static_cast<uint32_t>(first_work + before * bucket_floats(c, p));
      const int64_t parts = div_up(count > 1 ? p.bucket : rest, kMostStaged);
      const bool grids = std::is_same_v<Row, GridRow>;  // a tile for each bucket
      launches.add(item, grids ? count : stage == kWhole ? div_up(count, launch.groups) : count * parts);
    }
  }
  return launches.finish();
}

}  // namespace

Status encode_buckets(const Call& call) {
  const Codec& codec = call.layout.codec;
  if (is_rotated(codec)) return encode_rotated(call);
  return with_encode_variant(codec, [&](auto variant) {
    using V = decltype(variant);
    const auto kernel = encode_any_bucket_kernel<typename V::Codec, V::bits, V::stochastic>;
    const auto launch = [&](Stage stage, Large large = Large::kAll) {
      return launch_any_bucket(call, stage, large, kernel, "encode kernel of any bucket");
    };
    int64_t parts = 1;  // of the largest bucket
    for (const Piece& p : call.layout.pieces) parts = std::max(parts, div_up(p.bucket, kMostStaged));
    const auto grids = [&](Stage stage) {  // with a thread for each part, if there are not too many
      const auto warps = static_cast<uint32_t>(std::min<int64_t>(div_up(parts, kWarpSize), kMostThreads / kWarpSize));
      return launch_any_bucket(call, stage, Large::kAll, grid_kernel, "grid kernel", warps * kWarpSize);
    };
    const bool sums = call.message.payloads != nullptr, feedback = call.leaves.residuals != nullptr;
    const auto ranges = [&] {
      return launch_any_bucket(call, kStats, Large::kAll, feedback ? range_kernel<true> : range_kernel<false>,
                               "range kernel", kRangeThreads);
    };
    Status s = launch(kWhole, Large::kNone);
    if (s.call == nullptr) s = sums ? launch(kStats) : ranges();
    if (s.call == nullptr) s = grids(kStats);
    if (traits_of(codec.kind).sums) {
      if (s.call == nullptr) s = launch(kSums);
      if (s.call == nullptr) s = grids(kSums);
    }
    if (sums || !has_large_blocks(codec)) return s.call == nullptr ? launch(kCodes) : s;
    if (s.call == nullptr) s = encode_large_blocks(call);
    return s.call == nullptr ? launch(kCodes, Large::kRests) : s;
  });
}

Status decode_buckets(const Call& call) {
  if (is_rotated(call.layout.codec)) return decode_rotated(call);
  return with_decode_variant(call.layout.codec, [&](auto variant) {
    using V = decltype(variant);
    const auto kernel = decode_any_bucket_kernel<typename V::Codec, V::bits>;
    const auto launch = [&](Stage stage, Large large) {
      return launch_any_bucket(call, stage, large, kernel, "decode kernel of any bucket");
    };
    if (has_large_blocks(call.layout.codec)) return launch(kWhole, Large::kRests);
    const Status s = launch(kWhole, Large::kNone);
    return s.call == nullptr ? launch(kCodes, Large::kAll) : s;
  });
}

}  // namespace jaxcgx::cuda
