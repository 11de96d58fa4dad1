// TopK's selection. Two passes over a piece find its largest elements, unless the sample misleads. The first pass keeps
// candidates: elements at or above the threshold that the sample gave. A radix selection among the candidates, by three
// digits of their magnitudes, finds the smallest magnitude that is sent. The second pass writes the elements, and with
// feedback the residuals. The result is deterministic: an element's position in the list depends only on counts and
// their sums, not on the order in which thread blocks run.
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

// Counts the candidates of each segment, and keeps them while there is room.
__global__ void __launch_bounds__(kSelectThreads, 4) find_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const uint32_t segment = p.tile * kSelectWarps + threadIdx.x / kWarpSize, threshold = s.state->threshold;
  const int64_t blocks = div_up(s.n, kSegment * kSelectWarps);
  if (p.tile >= blocks) return;
  uint32_t found = 0, all;
  if (segment * kSegment < s.n) {
    uint2* const candidates = s.candidates(segment);
    const auto room = static_cast<uint32_t>(s.words.room);
    s.each_element(segment, [&](bool there, float undivided, uint32_t i) {
      const float x = s.divided(undivided);
      const bool reaches = there && magnitude_of(x) >= threshold;
      const uint32_t ballot = __ballot_sync(kWholeWarp, reaches);
      if (ballot == 0) return;
      const uint32_t at = found + before_lane(ballot);
      if (reaches && at < room) candidates[at] = {bits_of(x), i};
      found += static_cast<uint32_t>(__popc(ballot));
    });
    if (threadIdx.x % kWarpSize == 0) s.memory[s.words.found + segment] = found;
  }
  sum_before<kSelectThreads>(threadIdx.x % kWarpSize == 0 ? found : 0, &all);
  if (threadIdx.x == 0) atomicAdd(&s.state->reached, all);
  if (!is_last(s.state, blocks) || threadIdx.x != 0) return;
  const Sparse& sparse = s.m.codec.sparse;
  const uint32_t reached = s.state->reached;
  s.state->reread = reached < (sparse.select == Select::kExact ? s.k : enough(sparse, s.k));
  s.state->taken = reached < s.k ? reached : s.k;
}

// If too few elements reach the threshold, counts the elements that reach each of the next thresholds, in one pass, and
// chooses a threshold. For exact selection, the only next threshold is 0.
__global__ void __launch_bounds__(kSelectThreads, 4) refine_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks || !s.state->reread) return;
  const Sparse& sparse = s.m.codec.sparse;
  const bool exact = sparse.select == Select::kExact;
  const int32_t last = exact ? 1 : sparse.refinements;
  __shared__ uint32_t bins[kBins], tried[kMostRefinements + 1];
  begin_bins(bins);
  if (threadIdx.x == 0) {
    float next = float_of(s.state->threshold);
    for (int32_t i = 0; i <= last; ++i, next = exact ? 0.0f : next_threshold(sparse, next)) tried[i] = bits_of(next);
  }
  __syncthreads();
  s.each_segment(p.tile, [&](uint32_t segment) {
    s.each_element(segment, [&](bool there, float undivided, uint32_t) {
      const uint32_t magnitude = magnitude_of(s.divided(undivided));
      int32_t i = 0;
      while (i <= last && magnitude < tried[i]) ++i;
      if (there && i <= last) atomicAdd(&bins[i], 1u);
    });
  });
  add_bins(s.state, bins);
  if (!is_last(s.state, blocks) || threadIdx.x != 0) return;
  uint32_t reached = 0;
  const int64_t wanted = exact ? s.k : enough(sparse, s.k);
  int32_t chosen = 0;
  for (; chosen <= last; ++chosen) {
    reached += s.state->bins[chosen];
    if (reached >= wanted || chosen == last) break;
  }
  for (int32_t i = 0; i <= last; ++i) s.state->bins[i] = 0;
  s.state->threshold = tried[chosen];
  s.state->taken = reached < s.k ? reached : s.k;
}

// Finds a digit of the smallest magnitude that is sent. It runs three times, once for each digit.
__global__ void __launch_bounds__(kSelectThreads, 4) digit_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks) return;
  const int digit = s.m.stage;
  const uint32_t prefix = digit == 0 ? 0 : s.state->prefix;
  __shared__ uint32_t bins[kBins];
  begin_bins(bins);
  s.with_candidates(p.tile, [&](uint32_t, auto each) {
    each([&](bool there, float x, uint32_t) {
      if (there) count_digit(bins, magnitude_of(x), digit, prefix);
    });
  });
  add_bins(s.state, bins);
  if (!is_last(s.state, blocks)) return;
  const uint32_t rank = digit == 0 ? s.state->taken : s.state->rank;
  __syncthreads();
  find_digit(s.state, digit, prefix, rank);
}

// Counts the elements above the smallest magnitude that is sent, and the elements equal to it: in each segment, and in
// all groups before each group.
__global__ void __launch_bounds__(kSelectThreads, 4) count_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks) return;
  const uint32_t smallest = s.state->prefix;
  uint2 mine = {0, 0}, all;
  s.with_candidates(p.tile, [&](uint32_t segment, auto each) {
    uint2 count = {0, 0};
    each([&](bool there, float x, uint32_t) {
      const uint32_t magnitude = magnitude_of(x);
      count.x += static_cast<uint32_t>(__popc(__ballot_sync(kWholeWarp, there && magnitude > smallest)));
      count.y += static_cast<uint32_t>(__popc(__ballot_sync(kWholeWarp, there && magnitude == smallest)));
    });
    if (threadIdx.x % kWarpSize == 0) s.picked()[segment] = count;
    mine.x += count.x, mine.y += count.y;
  });
  if (threadIdx.x % kWarpSize != 0) mine = {0, 0};
  sum_before<kSelectThreads>(mine.x, &all.x);
  sum_before<kSelectThreads>(mine.y, &all.y);
  if (threadIdx.x == 0) s.groups()[p.tile] = all;
  if (!is_last(s.state, blocks)) return;
  const int64_t each = div_up(blocks, kSelectThreads), first = threadIdx.x * each;
  mine = {0, 0};
  for (int64_t i = first; i < first + each && i < blocks; ++i) mine.x += s.groups()[i].x, mine.y += s.groups()[i].y;
  uint2 before = {sum_before<kSelectThreads>(mine.x, &all.x), sum_before<kSelectThreads>(mine.y, &all.y)};
  for (int64_t i = first; i < first + each && i < blocks; ++i) {
    const uint2 count = s.groups()[i];
    s.groups()[i] = before;
    before.x += count.x, before.y += count.y;
  }
}

// Writes the sent elements, in order. With feedback, writes all other elements to the residuals.
__global__ void __launch_bounds__(kSelectThreads, 4) pick_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  if (p.tile >= div_up(s.n, kGroup)) return;
  const uint32_t smallest = s.state->prefix, equals = s.state->rank, lane = threadIdx.x % kWarpSize;
  float* lost = t.residuals[p.index].lost;
  uint32_t* indices = s.memory + s.words.indices;
  uint32_t* values = s.memory + s.words.values;
  // `before` has the counts before each segment of the group, one segment per lane: a warp scan of two counts at once.
  // It is hand-written: see scan.cuh.
  const int64_t own = int64_t{p.tile} * kGroupSegments + lane;
  uint2 count = own * kSegment < s.n ? s.picked()[own] : uint2{0, 0}, sum = count;
#pragma unroll
  for (uint32_t d = 1; d < kWarpSize; d *= 2) {
    const uint2 other = {__shfl_up_sync(kWholeWarp, sum.x, d), __shfl_up_sync(kWholeWarp, sum.y, d)};
    if (lane >= d) sum.x += other.x, sum.y += other.y;
  }
  const uint2 of_group = s.groups()[p.tile];
  const uint2 before = {of_group.x + sum.x - count.x, of_group.y + sum.y - count.y};
  const auto pick = [&](uint32_t segment, auto each) {
    uint32_t above = __shfl_sync(kWholeWarp, before.x, segment % kGroupSegments),
             equal = __shfl_sync(kWholeWarp, before.y, segment % kGroupSegments);
    each([&](bool there, float x, uint32_t i) {
      const uint32_t magnitude = magnitude_of(x);
      const uint32_t larger = __ballot_sync(kWholeWarp, there && magnitude > smallest),
                     same = __ballot_sync(kWholeWarp, there && magnitude == smallest);
      const uint32_t equal_here = equal + before_lane(same);
      const bool sent = there && (magnitude > smallest || (magnitude == smallest && equal_here < equals));
      if (sent) {
        const uint32_t at = above + before_lane(larger) + (equal_here < equals ? equal_here : equals);
        indices[at] = i;
        values[at] = bits_of(sent_as(x));
      }
      above += static_cast<uint32_t>(__popc(larger)), equal += static_cast<uint32_t>(__popc(same));
      return sent;
    });
  };
  if (lost == nullptr) {
    s.with_candidates(p.tile, pick);
    return;
  }
  s.each_segment(p.tile, [&](uint32_t segment) {
    pick(segment, [&](auto place) {
      s.each_element(segment, [&](bool there, float undivided, uint32_t i) {
        if (!place(there, s.divided(undivided), i) && there) lost[i] = is_finite(undivided) ? undivided : s.old[i];
      });
    });
  });
}

}  // namespace

void launch_selection(SelectionLaunches& launches) {
  const auto of_segments = [](int64_t n, int64_t, Item&) { return div_up(n, kSegment * kSelectWarps); };
  const auto of_groups = [](int64_t n, int64_t, Item&) { return div_up(n, kGroup); };
  launches.launch(find_kernel, "find kernel", 0, of_segments);
  launches.launch(refine_kernel, "refine kernel", 0, of_groups);
  for (int32_t digit = 0; digit < kDigits; ++digit) launches.launch(digit_kernel, "digit kernel", digit, of_groups);
  launches.launch(count_kernel, "count kernel", 0, of_groups);
  launches.launch(pick_kernel, "pick kernel", 0, of_groups);
}

}  // namespace jaxcgx::cuda
