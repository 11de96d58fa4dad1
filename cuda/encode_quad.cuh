// Encoding in the fast kernels, for buckets of 32 to 4096 elements whose size is a power of two. A bucket stays in
// registers between loading the numbers and storing the codes.
#pragma once

#include "codec/rng.h"
#include "cuda/load_store.cuh"
#include "cuda/piece_table.cuh"

namespace jaxcgx::cuda {

// Returns whether the fast kernels take a codec's buckets. They don't take codecs with rotations. With stochastic
// rounding, the blocks of a bucket must also be blocks of noise, and blocks with scales are always whole. So a bucket
// then has at least kBlock elements.
inline bool is_fast(const Codec& c) {
  const bool in_blocks = c.stochastic || traits_of(c.kind).scales;
  return has_buckets(c.kind) && !is_rotated(c) && (c.bucket_size & (c.bucket_size - 1)) == 0 &&
         c.bucket_size >= (in_blocks ? kBlock : 32) && c.bucket_size <= kTile;
}

// Returns whether kernels of quads take the whole blocks of a codec's large buckets. Each of these buckets begins at a
// block of noise. Its last block may be short.
inline bool has_large_blocks(const Codec& c) {
  return has_buckets(c.kind) && !is_rotated(c) && c.bucket_size % kBlock == 0 &&
         (c.bucket_size == 0 || c.bucket_size > kMostStaged);
}

// Returns how many elements of a piece kernels of quads take: those of the whole buckets or, if the bucket is large, of
// the whole blocks.
inline int64_t elements_of_quads(const Codec& c, const Piece& p) {
  const int64_t whole = is_fast(c) ? c.bucket_size : has_large_blocks(c) && is_large(p) ? kBlock : 0;
  return whole == 0 ? 0 : p.coded / whole * whole;
}

template <bool kStochastic, bool kFeedback>
struct EncodeRow : If<kStochastic, Draws>, If<kFeedback, Residual> {};

// Launches a kernel of quads on all pieces.
template <class Row>
Status launch_quads(const Call& call, void (*kernel)(Table<Row>), const char* name) {
  Launches launches(call, kernel, name, kThreads);
  const Layout& l = call.layout;
  const Codec& c = l.codec;
  int64_t work = 0;
  for (int64_t row = 0; row < call.batch; ++row) {
    for (const Piece& p : l.pieces) {
      const int64_t end = elements_of_quads(c, p), first_work = work;
      work += workspace_floats(c, p);
      // Kernels find the bucket of a quad by a shift. So an item has one bucket, unless their size is a power of two.
      int64_t most = int64_t{1} << kMostLogBucket;
      if ((p.bucket & (p.bucket - 1)) != 0) most = std::min(most, p.bucket);
      for (int64_t at = 0; at < end; at += most) {
        const int64_t units = std::min(most, end - at) / (kRows * 4), bucket = at / p.bucket;
        Item<Row> item(l, call.leaves, row, p, at, bucket_bytes(c, at), bucket * meta_floats(c));
        item.entry.count = static_cast<uint32_t>(units);
        if constexpr (std::is_base_of_v<LargeBuckets, Row>)
          item.row.work = static_cast<uint32_t>(first_work + bucket * bucket_floats(c, p));
        launches.add(item, div_up(units, kThreads));
      }
    }
  }
  return launches.finish();
}

// Extends a range to `threads` neighbouring threads, a power of two. Beyond a warp, it is the range of the warp. This
// is hand-written instead of CUB's: see scan.cuh.
CGX_D void widen_stats(float* lo, float* hi, uint32_t threads) {
#pragma unroll
  for (uint32_t m = 1; m < kWarpSize; m *= 2) {
    if (m >= threads) break;
    *lo = min_or_nan(*lo, __shfl_xor_sync(kWholeWarp, *lo, m));
    *hi = max_or_nan(*hi, __shfl_xor_sync(kWholeWarp, *hi, m));
  }
}

// Returns the grid of this thread's bucket. Every thread of the thread block must call this, because it has barriers.
template <class C>
CGX_D Grid grid_of_quads(const float (&x)[kRows][4], int log_bucket, const Codec& codec) {
  if constexpr (!has_unit<C>()) return C::grid({0.0f, 0.0f}, 0.0f, 0, codec);  // the same for all buckets
  const uint32_t threads = 1u << (log_bucket - 5), warp = threadIdx.x / kWarpSize,
                 first_warp = warp & ~(threads / kWarpSize - 1);
  float lo = x[0][0], hi = lo;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) lo = min_or_nan(lo, x[r][j]), hi = max_or_nan(hi, x[r][j]);
  }
  widen_stats(&lo, &hi, threads);
  if (threads > kWarpSize) {
    __shared__ float of_warp[2][kThreads / kWarpSize];
    of_warp[0][warp] = lo, of_warp[1][warp] = hi;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = first_warp; i < first_warp + threads / kWarpSize; ++i)
      lo = min_or_nan(lo, of_warp[0][i]), hi = max_or_nan(hi, of_warp[1][i]);
  }
  float sum = 0.0f;
  if constexpr (traits_of(C::kKind).sums) {  // in the order of codec/grid.h; CUB promises no order
    const float scale = scale_of(largest_of({lo, hi}));
    float lane[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      lane[j] = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) lane[j] += fabsf(x[r][j] * scale);
      if (threads >= 4) lane[j] += __shfl_xor_sync(kWholeWarp, lane[j], 2);
      if (threads >= 2) lane[j] += __shfl_xor_sync(kWholeWarp, lane[j], 1);
    }
    const float block = (lane[0] + lane[2]) + (lane[1] + lane[3]);
    if (threads <= 4) {
      sum = block;
    } else if (threads <= kWarpSize) {
#pragma unroll 1
      for (uint32_t i = 0; i < threads; i += 4)
        sum += __shfl_sync(kWholeWarp, block, (threadIdx.x & (kWarpSize - threads)) + i);
    } else {
      __shared__ float of_block[kThreads / 4];
      of_block[threadIdx.x / 4] = block;
      __syncthreads();
#pragma unroll 1
      for (uint32_t i = 0; i < threads / 4; ++i) sum += of_block[first_warp * 8 + i];
    }
  }
  return C::grid({lo, hi}, sum, int64_t{1} << log_bucket, codec);
}

CGX_D void store_meta(const Message& m, uint8_t* chunk, int64_t at, const Grid& g) {
  float* meta = reinterpret_cast<float*>(chunk) + at;
  if (m.meta == 2)
    *reinterpret_cast<float2*>(meta) = {unit_of(g), base_of(g)};
  else if (m.meta == 1)
    *meta = unit_of(g);
}

CGX_D void draw(int32_t (&word)[4], const uint32_t* key, uint64_t counter, uint32_t id) {
  word[0] = static_cast<int32_t>(counter), word[1] = static_cast<int32_t>(counter >> 32),
  word[2] = static_cast<int32_t>(id), word[3] = 0;
  philox<Scalar>(word, key[0], key[1]);
}

// Finds the codes of x, a quad, in a grid, and those of the scales of its block. random(row, j) returns noise, which
// makes the rounding stochastic. Every thread of the warp must call this, because it has shuffles.
template <bool kStochastic, class C, int kBits, class Random>
CGX_D void scaled_codes_of_quad(const Quad& q, const Grid& g, const float (&x)[kRows][4], Random random,
                                QuadCodes<C, kBits>& codes) {
  constexpr int kOwn = C::kScales / 4;  // the scales that each of the block's four threads computes
  const auto place = static_cast<int>(q.place);
  float largest[kOwn] = {};
#pragma unroll
  for (int s = 0; s < C::kScales; ++s) {
    float of_rows = 0.0f;
#pragma unroll
    for (int r = s * C::kScaleRows; r < (s + 1) * C::kScaleRows; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) of_rows = max_or_nan(of_rows, fabsf(x[r][j]));
    }
    of_rows = max_or_nan(of_rows, __shfl_xor_sync(kWholeWarp, of_rows, 1));
    of_rows = max_or_nan(of_rows, __shfl_xor_sync(kWholeWarp, of_rows, 2));
    if (s / kOwn == place) largest[s % kOwn] = of_rows;
  }
  float own[kOwn];  // the factors of the own scales
#pragma unroll
  for (uint32_t& word : codes.scales) word = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int32_t code = g.finite ? C::template scale_code<Scalar, kStochastic>(largest[i] * g.scale * g.inv) : 0;
    own[i] = C::template inverse<Scalar>(code);
#pragma unroll
    for (int s = i; s < C::kScales; s += kOwn) {
      if (s / kOwn == place) codes.scales[s / 4] |= static_cast<uint32_t>(code) << 8 * (s % 4);
    }
  }
#pragma unroll
  for (uint32_t& word : codes.scales) {
    word |= __shfl_xor_sync(kWholeWarp, word, 1);
    word |= __shfl_xor_sync(kWholeWarp, word, 2);
  }
#pragma unroll
  for (auto& lane : codes.lane) lane.clear();
#pragma unroll
  for (int s = 0; s < C::kScales; ++s) {
    const float factor = __shfl_sync(kWholeWarp, own[s % kOwn], (threadIdx.x & (kWarpSize - 4)) + s / kOwn);
    if (!g.finite || !C::template is_number<Scalar>(codes.scale_code(s * C::kScaleRows))) continue;
#pragma unroll
    for (int r = s * C::kScaleRows; r < (s + 1) * C::kScaleRows; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float y = x[r][j] * g.scale * g.inv * factor;
        if constexpr (kStochastic)
          codes.lane[j].put(r, C::template quantize<Scalar>(y, random(r, j)));
        else
          codes.lane[j].put(r, C::template quantize<Scalar>(y));
      }
    }
  }
}

// Draws the random bits of lane j of a quad. Returns the offset of the key.
template <class T>
CGX_D uint32_t draw_lane(const T& t, const Place& p, const Quad& q, int j, int32_t (&word)[4]) {
  const uint32_t* const key = t.message.keys + kKeyWords * p.row;
  const Draws& draws = t.rows[p.index];
  const uint64_t block = static_cast<uint64_t>(draws.start / kBlock + q.block);
  draw(word, key, block * kLanes + q.place * 4 + j, draws.id);
  return key[2];
}

// Finds the codes of x, a quad of the piece, in a grid. For codecs with scales, every thread of the warp must call
// this.
template <class C, int kBits, bool kStochastic, class T>
CGX_D void codes_of_quad(const T& t, const Place& p, const Quad& q, const Grid& g, const float (&x)[kRows][4],
                         QuadCodes<C, kBits>& codes) {
  if constexpr (scales_of<C>() > 0) {
    int32_t words[4][4];
    uint32_t offset = 0;
    if constexpr (kStochastic) {
#pragma unroll
      for (int j = 0; j < 4; ++j) offset = draw_lane(t, p, q, j, words[j]);
    }
    const auto random = [&](int r, int j) { return noise_of<Scalar>(words[j], r, offset); };
    scaled_codes_of_quad<kStochastic>(q, g, x, random, codes);
  } else {
    const Message& m = t.message;
    auto& lanes = codes.lane;
    const int32_t top = Levels::top(m.codec);
    constexpr bool kSums = std::is_same_v<C, Levels> && !kStochastic && kOneField<kBits>;
    const uint32_t excess = kMagic - static_cast<uint32_t>(top);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      lanes[j].clear();
      if (!g.finite) continue;
      if constexpr (kSums) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) add_field(lanes[j], r, -excess);
      }
      int32_t word[4];
      uint32_t offset = 0;
      if constexpr (kStochastic) offset = draw_lane(t, p, q, j, word);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        int32_t noise = 0;
        if constexpr (kStochastic) noise = noise_of<Scalar>(word, r, offset);
        const int32_t code = code_of<C, kBits, kStochastic>(x[r][j], g, top, noise);
        if constexpr (kSums)
          add_field(lanes[j], r, static_cast<uint32_t>(code) + excess);
        else
          lanes[j].put(r, code);
      }
    }
  }
}

// Encodes x, a quad of the piece. Writes its codes to `codes` and to the payload, and returns the grid of its bucket.
// `there`: whether the quad exists. Every thread of the thread block must call this.
template <class C, int kBits, bool kStochastic, class T>
CGX_D Grid encode_quad(const T& t, const Place& p, uint32_t unit, bool there, const float (&x)[kRows][4],
                       QuadCodes<C, kBits>& codes) {
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const Quad q(unit, m.log_bucket);
  const Grid g = grid_of_quads<C>(x, m.log_bucket, m.codec);
  codes_of_quad<C, kBits, kStochastic>(t, p, q, g, x, codes);
  if (there) {
    uint8_t* chunk = chunk_of(m, p);
    codes.store(chunk + e.codes + codes.at(q), q);
    if ((unit << 5 & ((1u << m.log_bucket) - 1)) == 0) {
      store_meta(m, chunk, e.meta + (unit >> (m.log_bucket - 5)) * static_cast<int64_t>(m.meta), g);
    }
  }
  return g;
}

// Stores the residuals: the error of encoding x, where x / divisor was encoded.
template <class C, int kBits>
CGX_D void store_lost(const Message& m, const Residual& residual, const Quad& q, const Grid& g,
                      const QuadCodes<C, kBits>& codes, float divisor, float (&x)[kRows][4]) {
  const float* old = residual.old + q.element();
  const int32_t top = Levels::top(m.codec);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float scale = codes.scale(r);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float lost = x[r][j] - divisor * plus<C, kBits>(base_of(g), unit_of(g), codes.lane[j], r, top, scale);
      x[r][j] = new_residual(lost, old + r * q.lanes + j);
    }
  }
  store_quad(residual.lost, DType::kF32, q.element(), q.lanes, x);
}

// Call f like the functions of codec/dispatch.h, but with the types for which the kernels are instantiated. For a codec
// without buckets they call nothing.
template <class Fn>
Status with_encode_variant(const Codec& c, Fn f) {
  if (!has_buckets(c.kind)) return {};
  return jaxcgx::with_encoder(c, [&](auto variant) {
    using V = decltype(variant);
    return f(Variant<EncodesAs<typename V::Codec>, V::bits, V::stochastic>());
  });
}
template <class Fn>
Status with_decode_variant(const Codec& c, Fn f) {
  if (!has_buckets(c.kind)) return {};
  return jaxcgx::with_decoder(c, [&](auto variant) {
    using V = decltype(variant);
    return f(Variant<DecodesAs<typename V::Codec>, V::bits, false>());
  });
}

}  // namespace jaxcgx::cuda
