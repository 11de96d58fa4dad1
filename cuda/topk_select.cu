// TopK's selection. Two passes over a piece find its largest elements, unless the sample misleads. The first pass keeps
// candidates: elements at or above the threshold that the sample gave. A radix selection among the candidates, by three
// digits of their magnitudes, finds the smallest magnitude that is sent. The second pass writes the elements, and with
// feedback the residuals. The result is deterministic: an element's position in the list depends only on counts and
// their sums, not on the order in which thread blocks run.
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

// Counts the candidates of each segment, and keeps them while there is room. Counts their first digits.
__global__ void __launch_bounds__(kSelectThreads, 4) find_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  if (p.tile >= div_up(s.n, kSegment * kSelectWarps)) return;
  __shared__ uint32_t bins[kBins], reached;
  if (threadIdx.x == 0) reached = 0;
  begin_bins(bins);
  const uint32_t segment = p.tile * kSelectWarps + threadIdx.x / kWarpSize, threshold = s.state->threshold;
  if (segment * kSegment < s.n) {
    uint32_t found = 0;
    uint2* const candidates = s.candidates(segment);
    const auto room = static_cast<uint32_t>(s.words.room);
    s.each_element(segment, [&](bool there, float undivided, uint32_t i) {
      const float x = s.divided(undivided);
      // The threshold is at most kLargest, so all NaNs reach it.
      const bool reaches = there && (bits_of(x) & kMagnitude) >= threshold;
      const uint32_t ballot = __ballot_sync(kWholeWarp, reaches);
      if (ballot == 0) return;
      const uint32_t at = found + before_lane(ballot);
      if (reaches) {
        if (at < room) candidates[at] = {bits_of(x), i};
        count_digit(bins, magnitude_of(x), 0, 0);
      }
      found += static_cast<uint32_t>(__popc(ballot));
    });
    if (threadIdx.x % kWarpSize == 0) {
      s.memory[s.words.found + segment] = found;
      atomicAdd(&reached, found);
    }
  }
  add_bins(s.state, bins);
  if (threadIdx.x == 0) atomicAdd(&s.state->reached, reached);
}

// Finds the first digit of the smallest magnitude that is sent. If too few elements reach the threshold, it first
// counts the elements that reach each of the next thresholds, in one pass, and chooses a threshold. For exact
// selection, the only next threshold is 0.
__global__ void __launch_bounds__(kSelectThreads, 4) refine_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks) return;
  const Sparse& sparse = s.m.codec.sparse;
  const bool exact = sparse.select == Select::kExact;
  const int64_t wanted = exact ? s.k : enough(sparse, s.k);
  uint32_t reached = s.state->reached;
  const bool reads = reached < wanted;
  if (!reads && p.tile > 0) return;
  __shared__ uint32_t bins[kBins], tried[kMostRefinements + 1], steps[kMostRefinements + 1];
  if (reads) {
    const int32_t last = exact ? 1 : sparse.refinements;
    for (int32_t i = threadIdx.x; i <= last; i += kSelectThreads) steps[i] = 0;
    if (threadIdx.x == 0) {
      float next = float_of(s.state->threshold);
      for (int32_t i = 0; i <= last; ++i, next = exact ? 0.0f : next_threshold(sparse, next)) tried[i] = bits_of(next);
    }
    begin_bins(bins);
    // The elements that reach the first threshold have been counted.
    s.each_segment(p.tile, [&](uint32_t segment) {
      s.each_element(segment, [&](bool there, float undivided, uint32_t) {
        const uint32_t magnitude = magnitude_of(s.divided(undivided));
        int32_t i = 0;
        while (i <= last && magnitude < tried[i]) ++i;
        if (!there || i == 0 || i > last) return;
        atomicAdd(&steps[i], 1u);
        count_digit(bins, magnitude, 0, 0);
      });
    });
    add_bins(s.state, bins);
    for (int32_t i = threadIdx.x; i <= last; i += kSelectThreads) {
      if (steps[i] > 0) atomicAdd(&s.state->steps[i], steps[i]);
    }
    if (!is_last(s.state, blocks)) return;
    int32_t chosen = 1;
    for (; chosen <= last; ++chosen) {
      reached += s.state->steps[chosen];
      if (reached >= wanted || chosen == last) break;
    }
    if (threadIdx.x == 0) s.state->threshold = tried[chosen <= last ? chosen : last], s.state->reread = 1;
  }
  // Elements below the threshold may have been counted, too. They come after all that are sent.
  const uint32_t taken = reached < s.k ? reached : s.k;
  const Wanted found = find_digit(s.state->bins, 0, {0, taken});
  if (threadIdx.x == 0) s.state->prefix = found.prefix, s.state->rank = found.rank, s.state->taken = taken;
}

// Finds the second or third digit of the smallest magnitude that is sent.
__global__ void __launch_bounds__(kSelectThreads, 4) digit_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks) return;
  const int digit = s.m.stage;
  const Wanted wanted = {s.state->prefix, s.state->rank};
  __shared__ uint32_t bins[kBins];
  begin_bins(bins);
  s.with_candidates(p.tile, [&](uint32_t, auto each) {
    each([&](bool there, float x, uint32_t) {
      if (there) count_digit(bins, magnitude_of(x), digit, wanted.prefix);
    });
  });
  add_bins(s.state, bins);
  if (!is_last(s.state, blocks)) return;
  const Wanted found = find_digit(s.state->bins, digit, wanted);
  if (threadIdx.x == 0) s.state->prefix = found.prefix, s.state->rank = found.rank;
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

// Sets bits of a byte of the payload, which was cleared before. It is atomic, because other threads may set other bits
// of the same word.
CGX_D void set_bits(uint8_t* byte, uint32_t bits) {
  const auto at = reinterpret_cast<uintptr_t>(byte);
  atomicOr(reinterpret_cast<uint32_t*>(at & ~uintptr_t{3}), bits << (8 * (at & 3)));
}

// Writes index j of a list.
CGX_D void write_index(const IndexList& list, uint8_t* bytes, int64_t j, uint32_t index) {
  if (list.is_implied()) return;
  const int64_t one = list.split ? list.one_of(j, index) : index;
  if (one < list.bits) set_bits(bytes + one / 8, 1u << (one % 8));
  if (!list.split) return;
  each_field(list, j, [&](int64_t at, uint32_t bit, uint32_t width, uint32_t from) {
    set_bits(bytes + at, (index >> from & ((1u << width) - 1)) << bit);
  });
}

// Writes the sent elements, in order, as a list of indices and an array of values. Missing elements get index n and
// value 0. With feedback, writes all elements that are not sent to the residuals.
__global__ void __launch_bounds__(kSelectThreads, 4) pick_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks) return;
  const uint32_t smallest = s.state->prefix, equals = s.state->rank, lane = threadIdx.x % kWarpSize;
  const IndexList list(s.n, s.k);
  uint8_t* const bytes = s.m.payload + (s.m.where != nullptr ? p.row : p.slot) * s.m.chunk_bytes + s.e.codes;
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
        write_index(list, bytes, at, i);
      }
      above += static_cast<uint32_t>(__popc(larger)), equal += static_cast<uint32_t>(__popc(same));
      return sent;
    });
  };
  for (int64_t j = s.state->taken + p.tile * kSelectThreads + threadIdx.x; j < s.k; j += blocks * kSelectThreads) {
    indices[j] = s.n, values[j] = 0;
    write_index(list, bytes, j, s.n);
  }
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
  for (int32_t digit = 1; digit < kDigits; ++digit) launches.launch(digit_kernel, "digit kernel", digit, of_groups);
  launches.launch(count_kernel, "count kernel", 0, of_groups);
  launches.launch(pick_kernel, "pick kernel", 0, of_groups);
}

}  // namespace jaxcgx::cuda
