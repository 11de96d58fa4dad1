// The first threshold of TopK's selection, from a sample of each piece.
#include <cmath>

#include "codec/rng.h"
#include "cuda/encode_quad.cuh"
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr int64_t kSampled = 8 * kSelectThreads;  // elements of the sample per thread block

// Collects the sample (digit 0), and finds the first threshold by radix selection, one digit per launch. The threshold
// is the sample's magnitude at a given rank. For exponential distributions it finds only the largest magnitude.
__global__ void __launch_bounds__(kSelectThreads, 4) sample_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const Sparse& sparse = s.m.codec.sparse;
  const Sample sample = SelectionWords::sample_of(sparse, s.n, s.k);
  const int64_t blocks = div_up(sample.count, kSampled);
  if (p.tile >= blocks) return;
  const int digit = s.m.stage;
  int64_t first = 0;
  if (digit == 0 && sparse.select != Select::kExact) {
    const uint64_t last = static_cast<uint64_t>(s.extra.start) + s.n - 1;
    int32_t word[4];
    const uint32_t* const key = s.m.keys + kKeyWords * p.row;
    draw(word, key, last / kBlock * kLanes + last % kLanes, s.extra.id);
    first = sample.first(noise_of<Scalar>(word, static_cast<int>(last % kBlock / kLanes), key[2]));
  }
  __shared__ uint32_t bins[kBins];
  begin_bins(bins);
  const uint32_t prefix = digit == 0 ? 0 : s.state->prefix;
  uint32_t largest = 0;
  for (int64_t i = p.tile * kSampled + threadIdx.x; i < sample.count && i < (p.tile + 1) * kSampled;
       i += kSelectThreads) {
    uint32_t& magnitude = s.memory[s.words.sample + i];
    if (digit == 0) magnitude = magnitude_of(s.divided(s.undivided(static_cast<uint32_t>(first + i * sample.stride))));
    if (sparse.select == Select::kExponential)
      largest = magnitude > largest ? magnitude : largest;
    else
      count_digit(bins, magnitude, digit, prefix);
  }
  if (sparse.select == Select::kExponential) {
    if (largest > 0) atomicMax(&s.state->largest, largest < kLargest ? largest : kLargest);
    return;
  }
  add_bins(s.state, bins);
  if (!is_last(s.state, blocks)) return;
  uint32_t rank = s.state->rank;
  if (digit == 0) {
    int64_t wanted = sample.rank(s.n, s.k);
    // For exact selection, four standard deviations are added. So enough elements reach the threshold, except in one
    // message in thousands, whose selection only takes longer.
    if (sparse.select == Select::kExact) wanted += static_cast<int64_t>(4.0f * sqrtf(static_cast<float>(wanted))) + 4;
    rank = static_cast<uint32_t>(wanted < sample.count ? wanted : sample.count);
  }
  __syncthreads();
  find_digit(s.state, digit, prefix, rank);
  if (threadIdx.x == 0 && digit == kDigits - 1)
    s.state->threshold = s.state->prefix < kLargest ? s.state->prefix : kLargest;
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
  const auto of_sample = [&](int64_t n, int64_t k, Item&) {
    return k == 0 || k == n ? 0 : div_up(SelectionWords::sample_of(sparse, n, k).count, kSampled);
  };
  const bool exponential = sparse.select == Select::kExponential;
  for (int32_t digit = 0; digit < (exponential ? 1 : kDigits); ++digit)
    launches.launch(sample_kernel, "sample kernel", digit, of_sample);
  if (!exponential) return;
  bool any = true;  // whether any piece needs this round
  for (int32_t round = 0; any; ++round) {
    any = launches.launch(exponential_kernel, "exponential kernel", round, [&](int64_t n, int64_t k, Item& item) {
      const int64_t blocks = of_sample(n, k, item);
      if (blocks == 0) return blocks;
      const Exponential fit(n, k);
      item.extra.id = bits_of(fit.factor(round));
      return round < fit.rounds ? blocks : 0;
    });
  }
}

}  // namespace jaxcgx::cuda
