// Shared by the kernels that select TopK's elements: the state of a selection, access to a piece, radix digits, and
// launches.
#pragma once

#include "cuda/decode_sum.cuh"
#include "cuda/scan.cuh"
#include "cuda/topk.cuh"

namespace jaxcgx::cuda {

constexpr uint32_t kDigitBits = 10;          // bits of a digit of a magnitude; the first digit has one more
constexpr uint32_t kBins = 2 << kDigitBits;  // bins of the first digit's histogram
constexpr int kDigits = 3;

// The data that one pass over a piece leaves for the next pass. All fields are 0 before the first pass.
struct State {
  uint32_t bins[kBins];
  uint32_t
      steps[kMostRefinements + 1];  // number of elements that reach a threshold of the ladder, but not the last one
  uint32_t blocks;                  // number of thread blocks that have finished this pass
  uint32_t prefix;                  // the known digits of the wanted magnitude
  uint32_t rank;                    // its rank among the magnitudes with these digits; 1: the largest
  uint32_t threshold;               // candidates are the elements at or above this magnitude
  uint32_t reached, taken;          // number of elements that reach the threshold; number of elements that are sent
  uint32_t reread;  // whether the kept candidates are of an earlier threshold, so the piece is read again
  // For exponential distributions: the sample's largest magnitude, the number of elements in a round's sum, and t.
  uint32_t largest, number;
  float t;
};
constexpr int64_t kStateWords = align_words(sizeof(State) / 4);

// A piece, as the kernels see it.
struct Selection {
  const Message& m;
  const Entry& e;
  const Extra& extra;
  const float* old;
  uint32_t n, k;
  SelectionWords words;
  State* state;
  uint32_t* memory;  // the piece's memory (SelectionWords)

  CGX_D Selection(const Pieces& t, const Place& p)
      : m(t.message),
        e(t.entries[p.index]),
        extra(t.extras[p.index]),
        old(t.residuals[p.index].old),
        n(e.count),
        k(static_cast<uint32_t>(extra.last)),
        words(m.codec.sparse, n, k) {
    state = reinterpret_cast<State*>(m.workspace + e.meta * kStateWords);
    memory = reinterpret_cast<uint32_t*>(m.workspace) + extra.work;
  }
  CGX_D uint2* candidates(uint32_t segment) const {
    return reinterpret_cast<uint2*>(memory + words.candidates) + segment * words.room;
  }
  CGX_D uint2* picked() const { return reinterpret_cast<uint2*>(memory + words.picked); }
  CGX_D uint2* groups() const { return reinterpret_cast<uint2*>(memory + words.groups); }

  CGX_D float undivided(uint32_t i) const {
    const float x = load_element(e.leaf, static_cast<DType>(e.dtype), i);
    return old != nullptr ? x + old[i] : x;
  }
  CGX_D float divided(float undivided) const {
    float x[1] = {undivided};
    if (m.sums) divide(m, x);
    return x[0];
  }
  // Loads the numbers with the indices at(0), at(1), ... All loads are issued before one is used. kAll: whether all of
  // the elements exist. If one does not, its number is 0.
  template <bool kAll, uint32_t kAhead, class At>
  CGX_D void load(At at, float (&x)[kAhead]) const {
    const auto each = [&](const auto* leaf, auto convert) {
      std::remove_const_t<std::remove_pointer_t<decltype(leaf)>> raw[kAhead];
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) raw[a] = kAll || at(a) < n ? __ldcs(leaf + at(a)) : 0;
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) x[a] = convert(raw[a]);
    };
    const DType dtype = static_cast<DType>(e.dtype);
    if (dtype == DType::kF32)
      each(static_cast<const float*>(e.leaf), [](float number) { return number; });
    else
      each(static_cast<const uint16_t*>(e.leaf), [&](uint16_t half) { return widen(dtype, half); });
    if (old == nullptr) return;
    float y[kAhead];
#pragma unroll
    for (uint32_t a = 0; a < kAhead; ++a) y[a] = kAll || at(a) < n ? old[at(a)] : 0.0f;
#pragma unroll
    for (uint32_t a = 0; a < kAhead; ++a) x[a] += y[a];
  }
  // Calls f(whether the element exists, its undivided number, its index) for the elements of a segment, in order. All
  // lanes of a warp call f together, for kWarpSize consecutive elements.
  template <class Fn>
  CGX_D void each_element(uint32_t segment, Fn f) const {
    const uint32_t first = segment * kSegment;
    if (first + kSegment <= n)
      each_of_segment<true>(first, f);
    else
      each_of_segment<false>(first, f);
  }
  template <bool kAll, class Fn>
  CGX_D void each_of_segment(uint32_t first, Fn f) const {
    constexpr uint32_t kAhead = 8;  // loads in flight before one is used
#pragma unroll 1
    for (uint32_t i = first + threadIdx.x % kWarpSize; i < first + kSegment; i += kWarpSize * kAhead) {
      const auto at = [&](uint32_t a) { return i + kWarpSize * a; };
      float x[kAhead];
      load<kAll>(at, x);
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) f(kAll || at(a) < n, x[a], at(a));
    }
  }
  // Calls f(whether the candidate exists, x, its index) for the candidates of a segment in the same way.
  template <class Fn>
  CGX_D void each_candidate(uint32_t segment, Fn f) const {
    const uint32_t found = memory[words.found + segment];
    if (state->reread || found > words.room) {
      each_element(segment, [&](bool there, float undivided, uint32_t i) {
        const float x = divided(undivided);
        f(there && magnitude_of(x) >= state->threshold, x, i);
      });
      return;
    }
    each_kept(segment, 0, found, f);
  }
  // The same for the kept candidates of a segment, from candidate `from` on.
  template <class Fn>
  CGX_D void each_kept(uint32_t segment, uint32_t from, uint32_t found, Fn f) const {
    for (; from < found; from += kWarpSize) {
      const uint32_t i = from + threadIdx.x % kWarpSize;
      const uint2 candidate = i < found ? candidates(segment)[i] : uint2{0, 0};
      f(i < found, float_of(candidate.x), candidate.y);
    }
  }
  // Calls f(segment, each) for this warp's segments of a group. each(g) calls g as each_candidate does. If all
  // candidates were kept, the loads of the first candidates of all segments are in flight before one is used.
  template <class Fn>
  CGX_D void with_candidates(uint32_t group, Fn f) const {
    constexpr uint32_t kMine = kGroupSegments / kSelectWarps;
    const uint32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, first = group * kGroupSegments;
    const uint32_t of_lane = (first + lane) * kSegment < n ? memory[words.found + first + lane] : 0;
    if (state->reread || __ballot_sync(kWholeWarp, of_lane > words.room) != 0) {
      each_segment(group, [&](uint32_t segment) { f(segment, [&](auto g) { each_candidate(segment, g); }); });
      return;
    }
    uint32_t found[kMine];
    uint2 head[kMine];
#pragma unroll
    for (uint32_t a = 0; a < kMine; ++a) {
      found[a] = __shfl_sync(kWholeWarp, of_lane, a * kSelectWarps + warp);
      head[a] = lane < found[a] ? candidates(first + a * kSelectWarps + warp)[lane] : uint2{0, 0};
    }
#pragma unroll
    for (uint32_t a = 0; a < kMine; ++a) {
      const uint32_t segment = first + a * kSelectWarps + warp;
      if (segment * kSegment >= n) break;
      f(segment, [&](auto g) {
        if (found[a] > 0) g(lane < found[a], float_of(head[a].x), head[a].y);
        each_kept(segment, kWarpSize, found[a], g);
      });
    }
  }
  // Calls f(segment) for this warp's segments of a group.
  template <class Fn>
  CGX_D void each_segment(uint32_t group, Fn f) const {
    for (uint32_t i = threadIdx.x / kWarpSize; i < kGroupSegments; i += kSelectWarps) {
      if (const uint32_t segment = group * kGroupSegments + i; segment * kSegment < n) f(segment);
    }
  }
};

// Returns whether this thread block is the last of `blocks` thread blocks to call this. The last one sees all stores of
// the others, because the atomic operation releases and acquires. What it does for thread 0 it does for its whole
// block: the order is cumulative over the barriers. Every thread of the block must call this.
CGX_D bool is_last(State* s, int64_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_in_order(&s->blocks, 1) + 1 == blocks;
    if (last) s->blocks = 0;
  }
  __syncthreads();
  return last;
}

// begin_bins clears a thread block's histogram in shared memory. add_bins adds it to the piece's histogram. Histograms
// and radix selection are hand-written: see scan.cuh.
CGX_D void begin_bins(uint32_t (&bins)[kBins]) {
  for (uint32_t i = threadIdx.x; i < kBins; i += kSelectThreads) bins[i] = 0;
  __syncthreads();
}
CGX_D void add_bins(State* s, const uint32_t (&bins)[kBins]) {
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kBins; i += kSelectThreads) {
    if (bins[i] > 0) atomicAdd(&s->bins[i], bins[i]);
  }
}

CGX_D uint32_t shift_of(int digit) { return kDigitBits * (kDigits - 1) - kDigitBits * static_cast<uint32_t>(digit); }
// Counts a digit of a magnitude if its earlier digits are `prefix`.
CGX_D void count_digit(uint32_t (&bins)[kBins], uint32_t magnitude, int digit, uint32_t prefix) {
  const uint32_t code = magnitude >> shift_of(digit);
  if (digit == 0)
    atomicAdd(&bins[code], 1u);
  else if (code >> kDigitBits == prefix)
    atomicAdd(&bins[code & ((1u << kDigitBits) - 1)], 1u);
}
// The known digits of the wanted magnitude, and its rank among the magnitudes with these digits; 1: the largest.
struct Wanted {
  uint32_t prefix, rank;
};
// Finds the next digit, from its histogram, and clears the histogram. Rank 0 is above all magnitudes. Every thread of
// the thread block must call this, and gets the result.
CGX_D Wanted find_digit(uint32_t* bins, int digit, Wanted wanted) {
  constexpr uint32_t kEach = kBins / kSelectThreads;
  const uint32_t first = kBins - kEach * (threadIdx.x + 1), rank = wanted.rank;
  uint32_t counts[kEach], sum = 0, all;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) counts[i] = bins[first + i];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) sum += counts[i], bins[first + i] = 0;
  uint32_t above = sum_before<kSelectThreads>(sum, &all);
  __shared__ Wanted found;
#pragma unroll
  for (uint32_t i = kEach; i-- > 0;) {
    const uint32_t count = counts[i];
    if (above < rank && rank <= above + count) found = {wanted.prefix << kDigitBits | (first + i), rank - above};
    above += count;
  }
  if (rank == 0 && threadIdx.x == 0) found = {kMagnitude >> shift_of(digit), 0};
  __syncthreads();
  return found;
}

// Launches kernels on all pieces of a message, until one fails.
class SelectionLaunches {
 public:
  Status status;

  SelectionLaunches(const TopkWork& work, const Call& call) : work_(work), call_(call) {}

  const Sparse& sparse() const { return work_.to.codec.sparse; }

  // Launches blocks(n, k, item) thread blocks for each piece. This function may change the piece's item. Returns
  // whether any thread block was launched.
  template <class Blocks>
  bool launch(void (*kernel)(Pieces), const char* name, int32_t stage, Blocks blocks) {
    if (status.call != nullptr) return false;
    const Layout& l = work_.to;
    call_.message.stage = stage;
    Launches launches(call_, kernel, name, kSelectThreads);
    bool any = false;
    for (int64_t row = 0; row < call_.batch; ++row) {
      for (size_t i = 0; i < l.pieces.size(); ++i) {
        const Piece& p = l.pieces[i];
        const int64_t k = capacity(sparse(), p.coded);
        Item item(l, call_.leaves, row, p);
        if (call_.message.sums) {
          item.entry.leaf = call_.message.workspace + work_.sums.begin[i] + row * work_.sums.row;
          item.entry.dtype = static_cast<uint32_t>(DType::kF32);
        }
        item.entry.meta = static_cast<uint32_t>(row * static_cast<int64_t>(l.pieces.size()) + static_cast<int64_t>(i));
        item.entry.count = static_cast<uint32_t>(p.coded);
        item.extra.last = k;
        item.extra.work = static_cast<uint32_t>(work_.selection.begin[i] + row * work_.selection.row);
        const int64_t count = blocks(p.coded, k, item);
        if (count == 0) continue;
        launches.add(item, count);
        any = true;
      }
    }
    status = launches.finish();
    return any;
  }

 private:
  const TopkWork& work_;
  Call call_;
};

// Finds the first threshold of each piece, from a sample. topk_threshold.cu
void launch_threshold(SelectionLaunches& launches);
// Finds the elements that are sent, in order, and with feedback the residuals of all other elements. topk_select.cu
void launch_selection(SelectionLaunches& launches);

}  // namespace jaxcgx::cuda
