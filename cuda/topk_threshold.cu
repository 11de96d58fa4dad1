// The first threshold of TopK's selection, from a sample of each piece.
#include <cmath>

#include "codec/rng.h"
#include "cuda/encode_quad.cuh"
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr int64_t kAhead = 8, kSampled = kAhead * kSelectThreads;  // elements of the sample that a block reads at once

// Returns the number of thread blocks for a sample. Several blocks need a launch for each digit, because each digit is
// chosen by the last block. A small sample has one block, which finds all digits in one launch.
CGX_HD int64_t blocks_of(int64_t sample) { return sample <= kFewSampled ? 1 : div_up(sample, kSampled); }

// Collects the sample (digit 0), and finds the first threshold by radix selection. The threshold is the sample's
// magnitude at a given rank. For exponential distributions it finds only the largest magnitude.
__global__ void __launch_bounds__(kSelectThreads, 4) sample_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const Sparse& sparse = s.m.codec.sparse;
  const Sample sample = SelectionWords::sample_of(sparse, s.n, s.k);
  const int64_t blocks = blocks_of(sample.count);
  if (p.tile >= blocks) return;
  const int64_t begin = p.tile * kSampled,
                end = blocks == 1 || begin + kSampled > sample.count ? sample.count : begin + kSampled;
  uint32_t* const magnitudes = s.memory + s.words.sample;
  int digit = s.m.stage;
  __shared__ uint32_t bins[kBins];
  begin_bins(bins);
  if (digit == 0) {
    int64_t first = 0;
    if (sparse.select != Select::kExact) {
      const uint64_t last = static_cast<uint64_t>(s.extra.start) + s.n - 1;
      int32_t word[4];
      const uint32_t* const key = s.m.keys + kKeyWords * p.row;
      draw(word, key, last / kBlock * kLanes + last % kLanes, s.extra.id);
      first = sample.first(noise_of<Scalar>(word, static_cast<int>(last % kBlock / kLanes), key[2]));
    }
    for (int64_t i = begin + threadIdx.x; i < end; i += kSampled) {
      float x[kAhead];
      s.load<false>(
          [&](uint32_t a) {
            const int64_t j = i + a * kSelectThreads;
            return j < end ? static_cast<uint32_t>(first + j * sample.stride) : s.n;
          },
          x);
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) {
        if (const int64_t j = i + a * kSelectThreads; j < end) magnitudes[j] = magnitude_of(s.divided(x[a]));
      }
    }
  }
  // Calls f(magnitude) for the magnitudes that this thread collected.
  const auto each = [&](auto f) {
#pragma unroll 8
    for (int64_t i = begin + threadIdx.x; i < end; i += kSelectThreads) f(magnitudes[i]);
  };
  if (sparse.select == Select::kExponential) {
    uint32_t largest = 0;
    each([&](uint32_t magnitude) { largest = magnitude > largest ? magnitude : largest; });
    if (largest > 0) atomicMax(&s.state->largest, largest < kLargest ? largest : kLargest);
    return;
  }
  Wanted wanted = {s.state->prefix, s.state->rank};
  if (digit == 0) {
    int64_t rank = sample.rank(s.n, s.k);
    // For exact selection, four standard deviations are added. So enough elements reach the threshold, except in one
    // message in thousands, whose selection only takes longer.
    if (sparse.select == Select::kExact) rank += static_cast<int64_t>(4.0f * sqrtf(static_cast<float>(rank))) + 4;
    wanted = {0, static_cast<uint32_t>(rank < sample.count ? rank : sample.count)};
  }
  for (;; ++digit) {
    each([&](uint32_t magnitude) { count_digit(bins, magnitude, digit, wanted.prefix); });
    if (blocks == 1) {
      __syncthreads();
      wanted = find_digit(bins, digit, wanted);
    } else {
      add_bins(s.state, bins);
      if (!is_last(s.state, blocks)) return;
      wanted = find_digit(s.state->bins, digit, wanted);
    }
    if (blocks > 1 || digit == kDigits - 1) break;
  }
  if (threadIdx.x != 0) return;
  s.state->prefix = wanted.prefix, s.state->rank = wanted.rank;
  if (digit == kDigits - 1) s.state->threshold = wanted.prefix < kLargest ? wanted.prefix : kLargest;
}

// Does one round of Exponential (codec/topk.h). extra.id has the bits of the round's factor.
__global__ void __launch_bounds__(kSelectThreads, 4) exponential_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const Sample sample = SelectionWords::sample_of(s.m.codec.sparse, s.n, s.k);
  const int64_t blocks = div_up(sample.count, kSampled), parts = div_up(sample.count, kBlock);
  if (p.tile >= blocks) return;
  const float scale = scale_of(float_of(s.state->largest)), last_t = s.state->t;
  float* sums = reinterpret_cast<float*>(s.memory + s.words.sums);
  const int64_t part = p.tile * (kSelectThreads / kLanes) + threadIdx.x / kLanes, left = sample.count - part * kBlock;
  const auto here = static_cast<int32_t>(left < 0 ? 0 : left < kBlock ? left : kBlock);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % kLanes), lanes = (here + kRows - 1) / kRows;
  float sum = 0.0f;
  uint32_t number = 0, all;
#pragma unroll
  for (int32_t r = 0; r < kRows; ++r) {
    const int32_t i = r * lanes + lane;
    if (lane >= lanes || i >= here) continue;
    const uint32_t magnitude = s.memory[s.words.sample + part * kBlock + i];
    const float x = Exponential::scaled(float_of(magnitude < kLargest ? magnitude : kLargest), scale);
    if (s.m.stage > 0 && !(x > last_t)) continue;
    sum += x - last_t;
    ++number;
  }
  // The sum has the same order as on the CPU. CUB promises no order.
#pragma unroll
  for (uint32_t lane_bit = kLanes / 2; lane_bit > 0; lane_bit /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lane_bit);
  if (lane == 0 && here > 0) sums[part] = sum;
  sum_before<kSelectThreads>(number, &all);
  if (threadIdx.x == 0) atomicAdd(&s.state->number, all);
  if (!is_last(s.state, blocks)) return;
  constexpr int64_t kParts = Sign::kSumGroup / kBlock;
  for (int64_t first = threadIdx.x * kParts; first < parts; first += kSelectThreads * kParts) {
    float group = 0.0f;
    for (int64_t i = first; i < first + kParts && i < parts; ++i) group += sums[i];
    sums[first] = group;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float excess = 0.0f;
  for (int64_t first = 0; first < parts; first += kParts) excess += sums[first];
  s.state->t = Exponential(1, float_of(s.extra.id)).next(0, last_t, excess, s.state->number);
  s.state->number = 0;
  s.state->threshold = Exponential::threshold(s.state->t, scale);
}

}  // namespace

void launch_threshold(SelectionLaunches& launches) {
  const Sparse& sparse = launches.sparse();
  const auto count_of = [&](int64_t n, int64_t k) {
    return k == 0 || k == n ? 0 : SelectionWords::sample_of(sparse, n, k).count;
  };
  const bool exponential = sparse.select == Select::kExponential;
  for (int32_t digit = 0; digit < (exponential ? 1 : kDigits); ++digit) {
    launches.launch(sample_kernel, "sample kernel", digit, [&](int64_t n, int64_t k, Item&) {
      const int64_t count = count_of(n, k), blocks = count == 0 ? 0 : blocks_of(count);
      return digit > 0 && blocks == 1 ? 0 : blocks;
    });
  }
  if (!exponential) return;
  bool any = true;  // whether any piece needs this round
  for (int32_t round = 0; any; ++round) {
    any = launches.launch(exponential_kernel, "exponential kernel", round, [&](int64_t n, int64_t k, Item& item) {
      const int64_t blocks = div_up(count_of(n, k), kSampled);
      if (blocks == 0) return blocks;
      const Exponential fit(n, k);
      item.extra.id = bits_of(fit.factor(round));
      return round < fit.rounds ? blocks : 0;
    });
  }
}

}  // namespace jaxcgx::cuda
