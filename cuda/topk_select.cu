// TopK's selection, in one kernel. One pass over a piece finds its largest elements, unless the sample misleads. It
// keeps candidates: elements at or above a threshold from a sample. A radix selection among the candidates, by three
// digits of their magnitudes, finds the smallest magnitude that is sent. Then the candidates that are sent are written.
// The result is deterministic: an element's position in the list depends only on counts and their sums, not on the
// order in which thread blocks run.
//
// All thread blocks of the kernel are resident. After each step they wait for each other, which takes less time than
// another launch. So the result of a digit is computed by each block that needs it, from the digit's histogram.
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

// The part of a piece that a thread block processes.
struct Part : Selection {
  uint32_t row;
  uint32_t first, end;  // its segments
  uint32_t block;       // the number of the piece's thread blocks before this one

  CGX_D Part(const Pieces& t, const Place& p) : Selection(t, p), row(p.row) {}

  CGX_D bool samples() const { return k > 0 && k < n; }
  // Returns the digits of the wanted magnitude up to `digit`, whose histogram is complete. Stores them for the next
  // step. rank: the wanted magnitude's rank; 1: the largest.
  CGX_D Wanted wanted_after(Whose whose, int digit, uint32_t rank) const {
    const uint32_t* const bins = bins_of(state, whose, digit);
    const Wanted wanted =
        digit == 0 ? find_digit<kBins>(bins, {0, rank}) : find_digit<kBins / 2>(bins, state->wanted[whose][digit - 1]);
    if (first == 0 && threadIdx.x == 0) state->wanted[whose][digit] = wanted;
    return wanted;
  }
};

// The tiles of all pieces, in order, as the thread blocks share them. If not every line has as many tiles, those after
// the last piece of a line are nothing.
struct Shares {
  uint32_t each, rest;  // each thread block has as many tiles, and the first `rest` blocks have one more

  CGX_D explicit Shares(const Pieces& t) {
    const uint32_t tiles = t.width * t.lines;
    each = tiles / gridDim.x, rest = tiles % gridDim.x;
  }
  CGX_D uint32_t begin(uint32_t block) const { return block * each + (block < rest ? block : rest); }
  CGX_D uint32_t block_of(uint32_t tile) const {
    const uint32_t of_larger = rest * (each + 1);
    return tile < of_larger ? tile / (each + 1) : rest + (tile - of_larger) / each;
  }
};

// Calls f(part) for each part that this thread block processes.
template <class Fn>
CGX_D void each_part(const Pieces& t, Fn f) {
  const Shares shares(t);
  const uint32_t end = shares.begin(blockIdx.x + 1);
  for (uint32_t tile = shares.begin(blockIdx.x); tile < end;) {
    const uint32_t y = t.lines == 1 ? 0 : tile / t.width, x = tile - y * t.width;
    const Place p = place_of(t, x, y);
    const uint32_t all = p.index < 0 ? 0 : static_cast<uint32_t>(div_up(t.entries[p.index].count, kSelectTile)),
                   left = all - p.tile;
    if (p.tile >= all) {
      tile += t.width - x;
      continue;
    }
    const uint32_t here = end - tile < left ? end - tile : left;
    Part part(t, p);
    part.first = p.tile * kSelectWarps;
    part.end = here == left ? part.segments() : part.first + here * kSelectWarps;
    part.block = blockIdx.x - shares.block_of(tile - p.tile);
    f(part);
    tile += here;
  }
}

// The first threshold is the sample's magnitude at a given rank. Exact selection needs only two of its digits.
CGX_D int digits_of_sample(bool exact) { return exact ? kDigits - 1 : kDigits; }
CGX_D Wanted sample_after(const Part& s, const Sample& sample, int digit) {
  int64_t rank = sample.rank(s.n, s.k);
  // For exact selection, four standard deviations are added. So enough elements reach the threshold, except in one
  // message in thousands, whose selection only takes longer.
  if (s.is_exact()) rank += static_cast<int64_t>(4.0f * sqrtf(static_cast<float>(rank))) + 4;
  return s.wanted_after(kOfSample, digit, static_cast<uint32_t>(rank < sample.count ? rank : sample.count));
}
CGX_D uint32_t first_threshold(const Part& s) {
  if (s.m.codec.sparse.select == Select::kExponential) return s.state->threshold;
  if (!s.samples()) return 0;
  const int digit = digits_of_sample(s.is_exact()) - 1;
  const Sample sample = SelectionWords::sample_of(s.m.codec.sparse, s.n, s.k);
  const uint32_t found = sample_after(s, sample, digit).prefix << shift_of(digit);
  // For exact selection, zeros reach no first threshold: many sums are mostly zeros, and would have too many
  // candidates.
  if (found == 0 && s.is_exact()) return 1;
  return found < kLargest ? found : kLargest;
}

// Collects the sample (digit 0), and counts a digit of its magnitudes.
CGX_D void count_sample(const Part& s, int digit, uint32_t (&bins)[kBins]) {
  if (!s.samples()) return;
  const Sample sample = SelectionWords::sample_of(s.m.codec.sparse, s.n, s.k);
  const int64_t begin = sample.count * s.first / s.segments(), end = sample.count * s.end / s.segments();
  if (digit == 0) s.collect(sample, s.row, begin, end);
  const uint32_t prefix = digit == 0 ? 0 : sample_after(s, sample, digit - 1).prefix;
  begin_bins(bins);
  for (int64_t i = begin + threadIdx.x; i < end; i += kSelectThreads)
    count_digit(bins, s.memory[s.words.sample + i], digit, prefix);
  add_bins(bins_of(s.state, kOfSample, digit), bins);
}

// Counts the candidates of each segment, and keeps them while there is room. Counts their first digits. A segment has
// kRows rows. A lane tests four neighbouring elements of each row, and bit 4 * r + j of its result is for element j of
// row r. So a warp scans counts once per segment.
CGX_D void find(const Part& s, uint32_t (&bins)[kBins]) {
  constexpr uint32_t kOfRow = 4 * kWarpSize, kElements = kRows * kOfRow;
  static_assert(kElements == kSegment, "");
  __shared__ uint32_t reached;
  const uint32_t threshold = first_threshold(s), room = static_cast<uint32_t>(s.words.room),
                 lane = threadIdx.x % kWarpSize, n = s.n;
  if (threadIdx.x == 0) {
    reached = 0;
    if (s.first == 0 && s.m.codec.sparse.select != Select::kExponential) s.state->threshold = threshold;
  }
  begin_bins(bins);
  const auto element_of = [&](uint32_t segment, uint32_t bit) {
    return segment * kElements + bit / 4 * kOfRow + 4 * lane + bit % 4;
  };
  const auto reaches = [&](float x) { return !(fabsf(x) < float_of(threshold)); };  // as all NaNs do
  uint32_t found_by_warp = 0;
  const auto keep = [&](uint32_t segment, uint32_t mine) {
    // The numbers of bits of each row, in the lanes up to this one: of even rows and of odd rows, a row in each byte.
    const uint32_t pairs = mine - (mine >> 1 & 0x55555555u),
                   counts = (pairs & 0x33333333u) + (pairs >> 2 & 0x33333333u);
    const uint32_t own[2] = {counts & 0x0f0f0f0fu, counts >> 4 & 0x0f0f0f0fu};
    const uint32_t up_to[2] = {fold_lanes(own[0], Add()), fold_lanes(own[1], Add())};
    const uint32_t all[2] = {__shfl_sync(kWholeWarp, up_to[0], kWarpSize - 1),
                             __shfl_sync(kWholeWarp, up_to[1], kWarpSize - 1)};
    const uint32_t before[2] = {up_to[0] - own[0], up_to[1] - own[1]};
    const auto of_row = [](const uint32_t (&of)[2], uint32_t r) {
      return (r % 2 == 0 ? of[0] : of[1]) >> r / 2 * 8 & 0xff;
    };
    const uint32_t in_row = lane < kRows ? of_row(all, lane) : 0, up_to_row = fold_lanes(in_row, Add()),
                   found = __shfl_sync(kWholeWarp, up_to_row, kWarpSize - 1);
    uint2* const candidates = s.candidates(segment);
    const auto first_bit = [](uint32_t of) { return static_cast<uint32_t>(__ffs(static_cast<int>(of))) - 1; };
    // The next candidate is loaded before one is used.
    float next = mine != 0 ? s.undivided(element_of(segment, first_bit(mine))) : 0.0f;
    for (uint32_t left = mine; __ballot_sync(kWholeWarp, left != 0) != 0;) {
      const uint32_t bit = left != 0 ? first_bit(left) : 0, r = bit / 4,
                     before_row = __shfl_sync(kWholeWarp, up_to_row - in_row, r);
      if (left == 0) continue;
      left &= left - 1;
      const float x = s.divided(next);
      if (left != 0) next = s.undivided(element_of(segment, first_bit(left)));
      const auto in_quad =
          static_cast<uint32_t>(__popc((mine ^ left) >> 4 * r) - 1);  // bits of the row before this one
      const uint32_t at = before_row + of_row(before, r) + in_quad;
      if (at < room) candidates[at] = {bits_of(x), element_of(segment, bit)};
      count_digit(bins, magnitude_of(x), 0, 0);
    }
    if (lane == 0) s.memory[s.words.found + segment] = found;
    found_by_warp += found;
  };
  const auto dtype = static_cast<DType>(s.e.dtype);
  const uint32_t whole = n / kElements, end_of_whole = s.end < whole ? s.end : whole;  // a shorter segment may follow
  uint32_t segment = s.first + threadIdx.x / kWarpSize;
  // Tests whole segments, in halves. The next half is loaded before this one's candidates are kept.
  const auto find_in_whole = [&](auto row, auto with_old) {
    using Row = decltype(row);
    constexpr bool feedback = decltype(with_old)::value;
    constexpr int kHalf = kRows / 2;
    Row rows[kHalf];
    float4 old[feedback ? kHalf : 1];
    const auto load = [&](uint32_t of, uint32_t half) {
      if (of >= end_of_whole) return;
      const int64_t first = (of * int64_t{2} + half) * (kHalf * kWarpSize) + lane;
#pragma unroll
      for (int r = 0; r < kHalf; ++r) {
        rows[r] = __ldcs(static_cast<const Row*>(s.e.leaf) + first + r * kWarpSize);
        if constexpr (feedback) old[r] = __ldcs(reinterpret_cast<const float4*>(s.old) + first + r * kWarpSize);
      }
    };
    load(segment, 0);
    for (; segment < end_of_whole; segment += kSelectWarps) {
      uint32_t mine = 0;
#pragma unroll 1
      for (uint32_t half = 0; half < 2; ++half) {
        uint32_t bits = 0;
#pragma unroll
        for (int r = 0; r < kHalf; ++r) {
          float x[4];
          set_row(x, four(dtype, rows[r]));
          if constexpr (feedback) add_row(x, old[r]);
          if (s.m.sums) divide(s.m, x);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (reaches(x[j])) bits |= 1u << (4 * r + j);
          }
        }
        load(half == 0 ? segment : segment + kSelectWarps, 1 - half);
        mine |= bits << half * 16;
      }
      keep(segment, mine);
    }
  };
  with_quads(s, [&](auto row) {
    if (s.old != nullptr)
      find_in_whole(row, std::true_type());
    else
      find_in_whole(row, std::false_type());
  });
  for (; segment < s.end; segment += kSelectWarps) {
    uint32_t mine = 0;
#pragma unroll 8
    for (uint32_t bit = 0; bit < 4 * kRows; ++bit) {
      const uint32_t i = element_of(segment, bit);
      if (i < n && reaches(s.divided(s.undivided(i)))) mine |= 1u << bit;
    }
    keep(segment, mine);
  }
  if (lane == 0) atomicAdd(&reached, found_by_warp);
  add_bins(bins_of(s.state, kOfCandidates, 0), bins);
  if (threadIdx.x == 0) atomicAdd(&s.state->reached, reached);
}

// Returns whether any piece of the launch needs a lower threshold.
CGX_D bool any_is_misled(const Pieces& t) {
  __shared__ uint32_t any;
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < t.count; i += kSelectThreads) {
    const Entry& e = t.entries[i];
    const Message& m = t.message;
    const auto* const state = reinterpret_cast<const State*>(m.workspace + e.meta * kStateWords);
    // With `where`, pieces of other chunks are not processed. They have no found elements.
    const bool processed = m.where == nullptr || place_of(t, 0, e.slot / m.chunks - t.first).slot == e.slot;
    if (processed && state->reached < Selection::enough_of(m.codec.sparse, t.extras[i].last)) atomicOr(&any, 1u);
  }
  __syncthreads();
  return any != 0;
}

// Lowers the threshold if too few elements reach it: counts the elements that reach each of the next thresholds, in one
// pass, and chooses one. For exact selection, the only next threshold is 0.
CGX_D void lower_threshold(const Part& s, uint32_t (&bins)[kBins]) {
  if (!s.is_misled()) return;
  const Sparse& sparse = s.m.codec.sparse;
  const int32_t last = s.is_exact() ? 1 : sparse.refinements;
  __shared__ uint32_t tried[kMostRefinements + 1], steps[kMostRefinements + 1];
  for (int32_t i = threadIdx.x; i <= last; i += kSelectThreads) steps[i] = 0;
  if (threadIdx.x == 0) {
    float next = float_of(s.state->threshold);
    for (int32_t i = 0; i <= last; ++i, next = s.is_exact() ? 0.0f : next_threshold(sparse, next))
      tried[i] = bits_of(next);
  }
  begin_bins(bins);
  // The elements that reach the first threshold have been counted.
  s.with_elements(s.first, s.end, [&](uint32_t, auto each) {
    each([&](bool there, float undivided, uint32_t) {
      const uint32_t magnitude = magnitude_of(s.divided(undivided));
      int32_t i = 0;
      while (i <= last && magnitude < tried[i]) ++i;
      if (!there || i == 0 || i > last) return;
      atomicAdd(&steps[i], 1u);
      count_digit(bins, magnitude, 0, 0);
    });
  });
  add_bins(bins_of(s.state, kOfCandidates, 0), bins);
  for (int32_t i = threadIdx.x; i <= last; i += kSelectThreads) {
    if (steps[i] > 0) atomicAdd(&s.state->steps[i], steps[i]);
  }
  if (!is_last(s.state, s.end - s.first, s.segments()) || threadIdx.x != 0) return;
  uint32_t reached = s.state->reached;
  int32_t chosen = 1;
  for (; chosen <= last; ++chosen) {
    reached += s.state->steps[chosen];
    if (reached >= Selection::enough_of(sparse, s.k) || chosen == last) break;
  }
  // Elements below the threshold may have been counted, too. They come after all that are sent.
  s.state->threshold = tried[chosen <= last ? chosen : last], s.state->reread = 1, s.state->reached_later = reached;
}

// Counts the second or third digit of the candidates.
CGX_D void count_candidates(const Part& s, int digit, uint32_t (&bins)[kBins]) {
  const uint32_t prefix = s.wanted_after(kOfCandidates, digit - 1, s.taken()).prefix;
  begin_bins(bins);
  s.with_candidates(s.first, s.end, [&](uint32_t, auto each) {
    each([&](bool there, float x, uint32_t) {
      if (there) count_digit(bins, magnitude_of(x), digit, prefix);
    });
  });
  add_bins(bins_of(s.state, kOfCandidates, digit), bins);
}

// Counts the elements above the smallest magnitude that is sent, and the elements equal to it: in each segment, and in
// the whole part.
CGX_D void count_sent(const Part& s) {
  const uint32_t smallest = s.wanted_after(kOfCandidates, kDigits - 1, 0).prefix;
  uint2 mine = {0, 0}, all;
  s.with_candidates(s.first, s.end, [&](uint32_t segment, auto each) {
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
  if (threadIdx.x == 0) s.of_blocks()[s.block] = all;
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
// value 0.
CGX_D void pick(const Part& s) {
  const Wanted wanted = s.state->wanted[kOfCandidates][kDigits - 1];
  const uint32_t smallest = wanted.prefix, equals = wanted.rank;
  const IndexList list(s.n, s.k);
  uint8_t* const bytes = s.m.payload + (s.m.where != nullptr ? s.row : s.e.slot) * s.m.chunk_bytes + s.e.codes;
  uint32_t* const indices = s.memory + s.words.indices;
  uint32_t* const values = is_raw(s.m.codec.sparse.values.kind)
                               ? reinterpret_cast<uint32_t*>(bytes + align16(list.bytes))
                               : s.memory + s.words.values;
  // The counts in all thread blocks of the piece before this one.
  uint2 mine = {0, 0}, before;
  for (uint32_t i = threadIdx.x; i < s.block; i += kSelectThreads)
    mine.x += s.of_blocks()[i].x, mine.y += s.of_blocks()[i].y;
  sum_before<kSelectThreads>(mine.x, &before.x);
  sum_before<kSelectThreads>(mine.y, &before.y);
  const auto put = [&](uint32_t j, uint32_t index, uint32_t value) {
    values[j] = value;
    if (s.lost != nullptr) indices[j] = index;  // for lost_kernel
    write_index(list, bytes, j, index);
  };
  if (const uint32_t taken = s.taken(); taken < s.k) {
    const uint32_t segments = s.segments(), missing = s.k - taken;
    const auto share = [&](uint32_t segments_before) {
      return taken + static_cast<uint32_t>(uint64_t{missing} * segments_before / segments);
    };
    for (uint32_t j = share(s.first) + threadIdx.x; j < share(s.end); j += kSelectThreads) put(j, s.n, 0);
  }
  __shared__ uint2 before_segment[kSelectThreads];
  for (uint32_t first = s.first; first < s.end; first += kSelectThreads) {
    const uint32_t end = s.end - first < kSelectThreads ? s.end : first + kSelectThreads;
    const uint2 count = first + threadIdx.x < end ? s.picked()[first + threadIdx.x] : uint2{0, 0};
    uint2 all;
    before_segment[threadIdx.x] = {before.x + sum_before<kSelectThreads>(count.x, &all.x),
                                   before.y + sum_before<kSelectThreads>(count.y, &all.y)};
    before.x += all.x, before.y += all.y;
    __syncthreads();
    s.with_candidates(first, end, [&](uint32_t segment, auto each) {
      uint32_t above = before_segment[segment - first].x, equal = before_segment[segment - first].y;
      each([&](bool there, float x, uint32_t i) {
        const uint32_t magnitude = magnitude_of(x);
        const uint32_t larger = __ballot_sync(kWholeWarp, there && magnitude > smallest),
                       same = __ballot_sync(kWholeWarp, there && magnitude == smallest);
        const uint32_t equal_here = equal + before_lane(same);
        if (there && (magnitude > smallest || (magnitude == smallest && equal_here < equals)))
          put(above + before_lane(larger) + (equal_here < equals ? equal_here : equals), i, bits_of(sent_as(x)));
        if (there && magnitude == smallest && equal_here + 1 == equals) s.state->first_unsent = i + 1;
        above += static_cast<uint32_t>(__popc(larger)), equal += static_cast<uint32_t>(__popc(same));
      });
    });
    __syncthreads();
  }
}

// The steps of the selection. All digits of the sample and of candidates are steps of their own.
enum Step { kFind = kDigits, kLower, kCount = kLower + kDigits, kPick };

__global__ void __launch_bounds__(kSelectThreads, 1) select_kernel(const __grid_constant__ Pieces t) {
  wait_for_previous<Pieces>();  // it has ended: a resident kernel is not early. But the next kernel may be
  __shared__ uint32_t bins[kBins];
  uint32_t* const arrived = &reinterpret_cast<State*>(t.message.workspace + t.entries[0].meta * kStateWords)->arrived;
  const Select select = t.message.codec.sparse.select;
  for (int step = select == Select::kExponential ? kFind : 0;; ++step) {
    if (step < kFind && step >= digits_of_sample(select == Select::kExact)) continue;
    if (step == kLower && !any_is_misled(t)) continue;
    each_part(t, [&](const Part& s) {
      if (step < kFind)
        count_sample(s, step, bins);
      else if (step == kFind)
        find(s, bins);
      else if (step == kLower)
        lower_threshold(s, bins);
      else if (step < kCount)
        count_candidates(s, step - kLower, bins);
      else if (step == kCount)
        count_sent(s);
      else
        pick(s);
    });
    if (step == kPick) return;
    wait_for_all(arrived);
  }
}

}  // namespace

void launch_selection(SelectionLaunches& launches) {
  launches.launch(
      select_kernel, "select kernel", 0, [](int64_t n, int64_t, Item&) { return div_up(n, kSelectTile); }, true);
}

}  // namespace jaxcgx::cuda
