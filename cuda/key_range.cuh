// Finds a key of a given rank among many different keys, by histograms. A histogram narrows the range of keys that may
// be the wanted one. When few keys are left, a thread block finishes by itself.
#pragma once

#include "cuda/scan.cuh"
#include "cuda/topk.cuh"

namespace jaxcgx::cuda {

constexpr uint32_t kBinBits = 11, kBins = 1 << kBinBits;

// begin_bins clears a thread block's histogram in shared memory. add_bins adds it to a histogram in memory. Histograms
// and radix selection are hand-written: see scan.cuh.
CGX_D void begin_bins(uint32_t (&bins)[kBins]) {
  for (uint32_t i = threadIdx.x; i < kBins; i += kSelectThreads) bins[i] = 0;
  __syncthreads();
}
CGX_D void add_bins(uint32_t* to, const uint32_t (&bins)[kBins]) {
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kBins; i += kSelectThreads) {
    if (bins[i] > 0) atomicAdd(&to[i], bins[i]);
  }
}

// The bin of a histogram that has the key of a given rank; `rank`: its rank in the bin; `count`: the bin's keys.
struct Bin {
  uint32_t index, rank, count;
};
// Finds the bin of the key of a given rank; 1: the largest. Every thread of the thread block must call this, and gets
// the result.
CGX_D Bin find_bin(const uint32_t* bins, uint32_t rank) {
  constexpr uint32_t kEach = kBins / kSelectThreads;
  static_assert(kEach == 4, "");
  const uint32_t first = kBins - kEach * (threadIdx.x + 1);
  const uint4 four = *reinterpret_cast<const uint4*>(bins + first);
  const uint32_t counts[kEach] = {four.x, four.y, four.z, four.w};
  uint32_t all, above = sum_before<kSelectThreads>(four.x + four.y + four.z + four.w, &all);
  __shared__ Bin found;
#pragma unroll
  for (uint32_t i = kEach; i-- > 0;) {
    if (above < rank && rank <= above + counts[i]) found = {first + i, rank - above, counts[i]};
    above += counts[i];
  }
  __syncthreads();
  return found;
}

// The keys from `low` to `low` + 2^bits - 1, one of which is wanted. `rank`: its rank among the `count` keys that
// there are in the range; 1: the largest. A range without keys is empty: all keys from `low` on are above it.
struct Range {
  uint64_t low;
  uint32_t bits, rank, count;

  // Returns the first key above the range.
  CGX_D uint64_t end() const { return low + (count > 0 ? uint64_t{1} << bits : 0); }
  CGX_D uint32_t shift() const { return bits > kBinBits ? bits - kBinBits : 0; }
  CGX_D bool has(uint64_t key) const { return key >= low && key < end(); }
  // Counts a key if it is in the range.
  CGX_D void count_key(uint32_t (&bins)[kBins], uint64_t key) const {
    if (has(key)) atomicAdd(&bins[(key - low) >> shift()], 1u);
  }
  // Returns the part of the range that has the keys of a bin.
  CGX_D Range part(const Bin& bin) const {
    return {low + (uint64_t{bin.index} << shift()), shift(), bin.rank, bin.count};
  }
};

// Returns the wanted key of a range; key_of(j): key j of `number` keys, among them the wanted one and all larger ones
// of the range. If `exactly` is false, it may be a smaller number, but not one at or below the next smaller key. Every
// thread of the thread block must call this, and gets the result.
template <class KeyOf>
CGX_D uint64_t wanted_key(Range r, uint32_t number, bool exactly, uint32_t (&bins)[kBins], KeyOf key_of) {
  while (r.bits > 0 && (exactly || r.rank != r.count)) {
    begin_bins(bins);
#pragma unroll 8
    for (uint32_t j = threadIdx.x; j < number; j += kSelectThreads) r.count_key(bins, key_of(j));
    __syncthreads();
    r = r.part(find_bin(bins, r.rank));
  }
  return r.low;
}

// The bins of a first histogram, of keys of 31 bits: 128 for each power of two, and narrower ones of 2^9 below 2^17.
CGX_D uint32_t bits_of_bin(uint32_t key) { return key < 1u << 17 ? 9 : 24 - static_cast<uint32_t>(__clz(key)); }
CGX_D uint32_t bin_of(uint32_t key) {
  const uint32_t bits = bits_of_bin(key);
  return (bits - 9) * 128 + (key >> bits);
}
// Returns the keys of a bin.
CGX_D Range range_of(const Bin& bin) {
  const uint32_t more = bin.index < 256 ? 0 : bin.index / 128 - 1;
  return {uint64_t{bin.index - more * 128} << (9 + more), 9 + more, bin.rank, bin.count};
}

}  // namespace jaxcgx::cuda
