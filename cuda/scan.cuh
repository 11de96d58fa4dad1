// Exclusive scans over a thread block: each thread gets the sum, or another fold, over the threads before it.
//
// They are hand-written because CUB, whose BlockScan does the same, needs the CUDA toolkit. The tests run these kernels
// without the toolkit, on an emulator (tests/cpp/cuda_emulator). This is also the reason for the other hand-written
// scans, reductions and histograms in this folder, unless a comment there gives another reason.
#pragma once

#include "cuda/load_store.cuh"

namespace jaxcgx::cuda {

struct Add {
  CGX_D uint32_t operator()(uint32_t a, uint32_t b) const { return a + b; }
};

// Returns the number of lanes before this one whose bit is set.
CGX_D uint32_t before_lane(uint32_t ballot) {
  return static_cast<uint32_t>(__popc(ballot & ((1u << (threadIdx.x % kWarpSize)) - 1)));
}

// Returns the fold of x over the lanes of the warp up to and including this one: an inclusive scan.
template <class Op>
CGX_D uint32_t fold_lanes(uint32_t x, Op op) {
  const uint32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (uint32_t d = 1; d < kWarpSize; d *= 2) {
    const uint32_t before = __shfl_up_sync(kWholeWarp, x, d);
    if (lane >= d) x = op(x, before);
  }
  return x;
}

// Extends a scan over the lanes of each warp to the thread block. x: the fold over the lanes before this one. with_own:
// the same fold, including this lane. Returns the fold over the threads before this one, and in *all the fold over the
// whole block. `op` is commutative, and 0 is its neutral element. Every thread of the block must call this, and the
// functions below, because they have barriers.
template <uint32_t kBlockThreads, class Op>
CGX_D uint32_t fold_warps(uint32_t x, uint32_t with_own, uint32_t* all, Op op) {
  __shared__ uint32_t of_warp[kBlockThreads / kWarpSize];
  const uint32_t warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize == kWarpSize - 1) of_warp[warp] = with_own;
  __syncthreads();
  *all = 0;
  for (uint32_t w = 0; w < kBlockThreads / kWarpSize; ++w) {
    if (w == warp) x = op(x, *all);
    *all = op(*all, of_warp[w]);
  }
  __syncthreads();
  return x;
}

// Returns the fold of x over the threads before this one, and in *all the fold over the whole block. sum_before is the
// same for sums.
template <uint32_t kBlockThreads, class Op>
CGX_D uint32_t fold_before(uint32_t x, uint32_t* all, Op op) {
  const uint32_t with_own = fold_lanes(x, op);
  x = __shfl_up_sync(kWholeWarp, with_own, 1);
  if (threadIdx.x % kWarpSize == 0) x = 0;
  return fold_warps<kBlockThreads>(x, with_own, all, op);
}
template <uint32_t kBlockThreads>
CGX_D uint32_t sum_before(uint32_t x, uint32_t* all) {
  const uint32_t with_own = fold_lanes(x, Add());
  return fold_warps<kBlockThreads>(with_own - x, with_own, all, Add());
}

// Returns the number of threads before this one for which `in` is true, and in *all their number in the whole block.
template <uint32_t kBlockThreads>
CGX_D uint32_t count_before(bool in, uint32_t* all) {
  const uint32_t ballot = __ballot_sync(kWholeWarp, in);
  return fold_warps<kBlockThreads>(before_lane(ballot), static_cast<uint32_t>(__popc(ballot)), all, Add());
}

}  // namespace jaxcgx::cuda
