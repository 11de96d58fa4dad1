// The first threshold of TopK's selection, fitted to a sample of each piece.
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr int64_t kSampled = 8 * kSelectThreads;  // elements of the sample of a thread block

// Collects the sample, and finds its largest magnitude.
__global__ void __launch_bounds__(kSelectThreads, 2) sample_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const Sample sample = SelectionWords::sample_of(s.m.codec.sparse, s.n, s.k);
  const int64_t begin = p.tile * kSampled, end = begin + kSampled < sample.count ? begin + kSampled : sample.count;
  if (begin >= end) return;
  s.collect(sample, p, begin, end);
  uint32_t largest = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kSelectThreads) {
    const uint32_t magnitude = s.memory[s.words.sample + i];
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest > 0) atomicMax(&s.state->largest, largest < kLargest ? largest : kLargest);
}

// Does one round of Exponential (codec/topk.h).
__global__ void __launch_bounds__(kSelectThreads, 2) exponential_kernel(const __grid_constant__ Pieces t) {
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
    if (s.row.round > 0 && !(x > last_t)) continue;
    sum += x - last_t;
    ++number;
  }
  // The sum has the same order as on the CPU. CUB promises no order.
#pragma unroll
  for (uint32_t lane_bit = kLanes / 2; lane_bit > 0; lane_bit /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lane_bit);
  if (lane == 0 && here > 0) sums[part] = sum;
  sum_before<kSelectThreads>(number, &all);
  if (threadIdx.x == 0) atomicAdd(&s.state->number, all);
  if (!is_last(s.state, 1, blocks)) return;
  constexpr int64_t kParts = kSumGroup / kBlock;
  for (int64_t first = threadIdx.x * kParts; first < parts; first += kSelectThreads * kParts) {
    float group = 0.0f;
    for (int64_t i = first; i < first + kParts && i < parts; ++i) group += sums[i];
    sums[first] = group;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float excess = 0.0f;
  for (int64_t first = 0; first < parts; first += kParts) excess += sums[first];
  s.state->t = Exponential(1, s.row.factor).next(0, last_t, excess, s.state->number);
  s.state->number = 0;
  s.state->threshold = Exponential::threshold(s.state->t, scale);
}

}  // namespace

void launch_threshold(SelectionLaunches& launches) {
  const Sparse& sparse = launches.sparse();
  const auto blocks_of = [&](int64_t n, int64_t k) {
    return k == 0 || k == n ? 0 : div_up(SelectionWords::sample_of(sparse, n, k).count, kSampled);
  };
  launches.launch(sample_kernel, "sample kernel", [&](int64_t n, int64_t k, SelectionRow&) { return blocks_of(n, k); });
  bool any = true;  // whether any piece needs this round
  for (int32_t round = 0; any; ++round) {
    any = launches.launch(exponential_kernel, "exponential kernel", [&](int64_t n, int64_t k, SelectionRow& row) {
      const int64_t blocks = blocks_of(n, k);
      if (blocks == 0) return blocks;
      const Exponential fit(n, k);
      row.round = static_cast<uint32_t>(round), row.factor = fit.factor(round);
      return round < fit.rounds ? blocks : 0;
    });
  }
}

}  // namespace jaxcgx::cuda
