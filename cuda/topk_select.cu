// TopK's selection, in one kernel. One pass over a piece finds its largest elements, unless the sample misleads. It
// keeps candidates: elements at or above a threshold from a sample. A histogram of the candidates tells which of them
// are sent, but for a few that are listed. Then the candidates that are sent are written. The result is deterministic:
// an element's position depends only on counts and their sums, not on the order in which thread blocks run.
//
// All thread blocks of the kernel are resident. After each turn they wait for each other, which takes less time than
// another launch. In a turn, each piece does its next step. What follows from a histogram or a list is computed by each
// block that needs it.
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

// The part of a piece that a thread block processes.
struct Part : Selection {
  const Place& place;
  uint32_t first, end;  // its segments
  uint32_t block;       // the number of the piece's thread blocks before this one

  CGX_D Part(const Pieces& t, const Place& p) : Selection(t, p), place(p) {}

  CGX_D bool samples() const { return k > 0 && k < n && m.codec.sparse.select != Select::kExponential; }
  CGX_D Sample sample() const { return SelectionWords::sample_of(m.codec.sparse, n, k); }
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

constexpr uint32_t kSampleBits = 31;
// Returns the whole sample, as a range of magnitudes. The first threshold is the wanted one.
CGX_D Range whole_sample(const Part& s) {
  const Sample sample = s.sample();
  int64_t rank = sample.rank(s.n, s.k);
  // For exact selection, four standard deviations are added. So enough elements reach the threshold, except in one
  // message in thousands, whose selection only takes longer.
  if (s.is_exact()) rank += static_cast<int64_t>(4.0f * sqrtf(static_cast<float>(rank))) + 4;
  if (rank > sample.count) rank = sample.count;
  return {0, kSampleBits, static_cast<uint32_t>(rank), static_cast<uint32_t>(sample.count)};
}

// Returns whether each thread block finds the wanted magnitude by itself.
CGX_D bool is_local(const Range& sample) { return sample.bits == kSampleBits && sample.count <= kMostListed; }

// Collects the sample, if the range is the whole one. Counts its magnitudes in the range.
CGX_D void count_sample(const Part& s, const Range& range, uint32_t* to, uint32_t (&bins)[kBins]) {
  const Sample sample = s.sample();
  const int64_t begin = sample.count * s.first / s.segments(), end = sample.count * s.end / s.segments();
  if (range.bits == kSampleBits) s.collect(sample, s.place, begin, end);
  if (is_local(range)) return;
  begin_bins(bins);
  for (int64_t i = begin + threadIdx.x; i < end; i += kSelectThreads)
    range.count_key(bins, s.memory[s.words.sample + i]);
  add_bins(to, bins);
}

CGX_D uint32_t first_threshold(const Part& s, const Range& range, uint32_t (&bins)[kBins]) {
  if (!s.samples()) return s.state->threshold;
  const auto found = static_cast<uint32_t>(
      wanted_key(range, range.count, !s.is_exact(), bins, [&](uint32_t j) { return s.memory[s.words.sample + j]; }));
  // For exact selection, zeros reach no first threshold: many sums are mostly zeros, and would have too many
  // candidates.
  if (found == 0 && s.is_exact()) return 1;
  return found < kLargest ? found : kLargest;
}

// Counts the candidates of each segment, and keeps them while there is room. Counts their magnitudes, from the
// threshold on. A segment has kRows rows. A lane tests four neighbouring elements of each row, and bit 4 * r + j of its
// result is for element j of row r. So a warp scans counts once per segment.
CGX_D void find(const Part& s, uint32_t threshold, uint32_t* to, uint32_t (&bins)[kBins]) {
  constexpr uint32_t kOfRow = 4 * kWarpSize, kElements = kRows * kOfRow;
  static_assert(kElements == kSegment, "");
  __shared__ uint32_t reached;
  const uint32_t room = static_cast<uint32_t>(s.words.room), lane = threadIdx.x % kWarpSize, n = s.n;
  if (threadIdx.x == 0) {
    reached = 0;
    if (s.first == 0) s.state->threshold = threshold;
  }
  begin_bins(bins);
  const auto element_of = [&](uint32_t segment, uint32_t bit) {
    return segment * kElements + bit / 4 * kOfRow + 4 * lane + bit % 4;
  };
  // Sets a lane's bit if its element is a candidate. last: the lane's last two candidates, the last one first.
  const auto test = [&](float x, uint32_t bit, uint32_t& mine, float (&last)[2]) {
    if (fabsf(x) < float_of(threshold)) return;  // NaNs reach all thresholds
    mine |= 1u << bit;
    last[1] = last[0], last[0] = x;
  };
  uint32_t found_by_warp = 0;
  // Keeps the candidates, the last ones first. Others than the last two are loaded again.
  const auto keep = [&](uint32_t segment, uint32_t mine, float (&last)[2]) {
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
    uint32_t left = mine;
    for (uint32_t done = 0; __ballot_sync(kWholeWarp, left != 0) != 0; ++done) {
      const uint32_t bit = left != 0 ? kWarpSize - 1 - static_cast<uint32_t>(__clz(static_cast<int>(left))) : 0,
                     r = bit / 4, before_row = __shfl_sync(kWholeWarp, up_to_row - in_row, r);
      if (left == 0) continue;
      left ^= 1u << bit;
      const float x = done < 2 ? last[0] : s.divided(s.undivided(element_of(segment, bit)));
      last[0] = last[1];
      const auto in_quad = static_cast<uint32_t>(__popc(left >> 4 * r));  // bits of the row before this one
      const uint32_t at = before_row + of_row(before, r) + in_quad;
      if (at < room) candidates[at] = {bits_of(x), element_of(segment, bit)};
      atomicAdd(&bins[bin_of(magnitude_of(x) - threshold)], 1u);
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
    constexpr uint32_t kHalf = kRows / 2;
    Row rows[kHalf];
    float4 old[feedback ? kHalf : 1];
    const auto load = [&](uint32_t of, uint32_t half) {
      if (of >= end_of_whole) return;
      const int64_t first = (of * int64_t{2} + half) * (kHalf * kWarpSize) + lane;
#pragma unroll
      for (uint32_t r = 0; r < kHalf; ++r) {
        rows[r] = __ldcs(static_cast<const Row*>(s.e.leaf) + first + r * kWarpSize);
        if constexpr (feedback) old[r] = __ldcs(reinterpret_cast<const float4*>(s.row.old) + first + r * kWarpSize);
      }
    };
    load(segment, 0);
    for (; segment < end_of_whole; segment += kSelectWarps) {
      uint32_t mine = 0;
      float last[2] = {};
#pragma unroll 1
      for (uint32_t half = 0; half < 2; ++half) {
        uint32_t bits = 0;
#pragma unroll
        for (uint32_t r = 0; r < kHalf; ++r) {
          float x[4];
          set_row(x, four(dtype, rows[r]));
          if constexpr (feedback) add_row(x, old[r]);
          if (s.m.sums) divide(s.m, x);
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) test(x[j], 4 * r + j, bits, last);
        }
        load(half == 0 ? segment : segment + kSelectWarps, 1 - half);
        mine |= bits << half * 16;
      }
      keep(segment, mine, last);
    }
  };
  with_quads(s, [&](auto row) {
    if (s.row.old != nullptr)
      find_in_whole(row, std::true_type());
    else
      find_in_whole(row, std::false_type());
  });
  for (; segment < s.end; segment += kSelectWarps) {
    uint32_t mine = 0;
    float last[2] = {};
#pragma unroll 8
    for (uint32_t bit = 0; bit < 4 * kRows; ++bit) {
      const uint32_t i = element_of(segment, bit);
      if (i < n) test(s.divided(s.undivided(i)), bit, mine, last);
    }
    keep(segment, mine, last);
  }
  if (lane == 0) atomicAdd(&reached, found_by_warp);
  add_bins(to, bins);
  if (threadIdx.x == 0) atomicAdd(&s.state->reached, reached);
}

// Lowers the threshold: counts the elements that reach each of the next thresholds, in one pass, and chooses one. For
// exact selection, the only next threshold is 0. Counts magnitudes, from the last threshold on.
CGX_D void lower_threshold(const Part& s, uint32_t* to, uint32_t (&bins)[kBins]) {
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
      if (!there || i > last) return;
      atomicAdd(&bins[bin_of(magnitude - tried[last])], 1u);
      if (i > 0) atomicAdd(&steps[i], 1u);
    });
  });
  add_bins(to, bins);
  for (int32_t i = threadIdx.x; i <= last; i += kSelectThreads) {
    if (steps[i] > 0) atomicAdd(&s.state->steps[i], steps[i]);
  }
  if (s.first == 0 && threadIdx.x == 0) s.state->lowest = tried[last];
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

// Returns the range of keys that the first histogram of the candidates leaves.
CGX_D Range first_range(const Part& s, const Bin& bin) {
  const uint32_t bits = s.index_bits(), taken = s.taken(), threshold = s.state->threshold;
  if (taken == 0) return {uint64_t{kMagnitude} << bits, 0, 0, 0};
  if (taken == s.reached()) return {uint64_t{threshold} << bits, 0, 0, 0};
  const Range found = range_of(bin);
  return {(found.low + (s.is_misled() ? s.state->lowest : threshold)) << bits, found.bits + bits, found.rank,
          found.count};
}

// Looks through the candidates. Lists those in the range, or counts their keys. Counts the candidates above it, in each
// segment and in the whole part.
CGX_D void look_through(const Part& s, const Range& range, bool lists, uint32_t* to, uint32_t (&bins)[kBins]) {
  // The thread block's list takes the memory of the histogram. What has no room goes to the piece's list at once.
  constexpr uint32_t kMost = kBins / 2;
  auto* const list = reinterpret_cast<uint2*>(bins);
  __shared__ uint32_t listed, begin;
  if (threadIdx.x == 0) listed = 0;
  begin_bins(bins);
  uint32_t mine = 0, all;
  const uint32_t lane = threadIdx.x % kWarpSize;
  s.with_candidates(s.first, s.end, [&](uint32_t segment, auto each) {
    uint32_t above = 0;
    each([&](bool there, float x, uint32_t i) {
      const uint32_t magnitude = magnitude_of(x);
      const uint64_t key = s.key_of(magnitude, i);
      above += static_cast<uint32_t>(__popc(__ballot_sync(kWholeWarp, there && key >= range.end())));
      if (!there || !range.has(key)) return;
      if (!lists) {
        range.count_key(bins, key);
      } else {
        const uint32_t at = atomicAdd(&listed, 1u);
        (at < kMost ? list[at] : s.list()[atomicAdd(&s.state->listed, 1u)]) = {magnitude, i};
      }
    });
    if (lane == 0) s.memory[s.words.above + segment] = above;
    mine += above;
  });
  sum_before<kSelectThreads>(lane == 0 ? mine : 0, &all);
  if (!lists) return add_bins(to, bins);
  const uint32_t number = listed < kMost ? listed : kMost;
  if (threadIdx.x == 0) {
    s.memory[s.words.of_blocks + s.block] = all;
    begin = atomicAdd(&s.state->listed, number);
  }
  __syncthreads();
  for (uint32_t j = threadIdx.x; j < number; j += kSelectThreads) s.list()[begin + j] = list[j];
  __syncthreads();  // the memory may next be another piece's histogram
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
CGX_D void pick(const Part& s, const Range& range, uint32_t (&bins)[kBins]) {
  const IndexList list(s.n, s.k);
  uint8_t* const bytes = chunk_of(s.m, s.place) + s.e.codes;
  uint32_t* const indices = s.memory + s.words.indices;
  uint32_t* const values = is_raw(s.m.codec.sparse.values.kind)
                               ? reinterpret_cast<uint32_t*>(bytes + align16(list.bytes))
                               : s.memory + s.words.values;
  // Elements that are sent: before those of this thread block; in each segment, and then before each.
  uint32_t mine = 0, before = 0;
  __shared__ uint32_t of_segment[kSelectThreads];
  const auto load_above = [&](uint32_t first) {
    of_segment[threadIdx.x] = first + threadIdx.x < s.end ? s.memory[s.words.above + first + threadIdx.x] : 0;
  };
  for (uint32_t i = threadIdx.x; i < s.block; i += kSelectThreads) mine += s.memory[s.words.of_blocks + i];
  load_above(s.first);
  const uint32_t listed = s.state->listed;
  const uint64_t cut =
      wanted_key(range, listed, false, bins, [&](uint32_t j) { return s.key_of(s.list()[j].x, s.list()[j].y); });
  if (s.first == 0 && threadIdx.x == 0) s.state->cut = cut;
  const auto is_sent = [&](uint32_t magnitude, uint32_t i) { return s.key_of(magnitude, i) >= cut; };
  uint32_t begin = 0;
  for (uint32_t first = s.first; first < s.end; first += kSelectThreads) {
    const uint32_t end = s.end - first < kSelectThreads ? s.end : first + kSelectThreads;
    __syncthreads();
#pragma unroll 8
    for (uint32_t j = threadIdx.x; j < listed; j += kSelectThreads) {
      const uint2 one = s.list()[j];
      const uint32_t segment = one.y / static_cast<uint32_t>(kSegment);
      if (!is_sent(one.x, one.y)) continue;
      if (first == s.first && segment < first) ++mine;
      if (segment >= first && segment < end) atomicAdd(&of_segment[segment - first], 1u);
    }
    __syncthreads();
    if (first == s.first) {
      sum_before<kSelectThreads>(mine, &before);
      begin = before;
    }
    uint32_t all;
    of_segment[threadIdx.x] = before + sum_before<kSelectThreads>(of_segment[threadIdx.x], &all);
    before += all;
    __syncthreads();
    s.with_candidates(first, end, [&](uint32_t segment, auto each) {
      uint32_t at = of_segment[segment - first];
      each([&](bool there, float x, uint32_t i) {
        const uint32_t sent = __ballot_sync(kWholeWarp, there && is_sent(magnitude_of(x), i));
        if (sent >> threadIdx.x % kWarpSize & 1) {
          const uint32_t j = at + before_lane(sent);
          values[j] = bits_of(sent_as(x)), indices[j] = i;
        }
        at += static_cast<uint32_t>(__popc(sent));
      });
    });
    __syncthreads();
    load_above(first + kSelectThreads);
  }
  // They take most of the instructions, so that no lane should be without one.
  for (uint32_t j = begin + threadIdx.x; j < before; j += kSelectThreads) write_index(list, bytes, j, indices[j]);
  if (const uint32_t taken = s.taken(); taken < s.k) {
    const uint32_t segments = s.segments(), missing = s.k - taken;
    const auto share = [&](uint32_t segments_before) {
      return taken + static_cast<uint32_t>(uint64_t{missing} * segments_before / segments);
    };
    for (uint32_t j = share(s.first) + threadIdx.x; j < share(s.end); j += kSelectThreads) {
      values[j] = 0;
      write_index(list, bytes, j, s.n);
    }
  }
}

// Returns what is to be done next with a piece, after the last turn's results.
CGX_D Progress next_step(const Part& s, Progress p, const uint32_t* last_bins) {
  Range& range = p.range;
  uint32_t rank = range.rank;  // of the wanted key in the last turn's histogram
  switch (p.done) {
    case Done::kNothing:
      if (s.samples()) range = whole_sample(s);
      p.done = s.samples() ? Done::kSampled : Done::kFound;
      return p;
    case Done::kSampled:
      if (!is_local(range)) break;
      p.done = Done::kFound;
      return p;
    case Done::kFound:
      if (s.is_misled()) {
        p.done = Done::kLowered;
        return p;
      }
      [[fallthrough]];
    case Done::kLowered:
      rank = s.taken();
      break;
    case Done::kCounted:
      break;
    default:
      p.done = Done::kPicked;
      return p;
  }
  const Bin bin = find_bin(last_bins, rank);
  if (p.done == Done::kSampled) {
    range = range.part(bin);
    if (range.bits == 0) p.done = Done::kFound;
    return p;
  }
  range = p.done == Done::kCounted ? range.part(bin) : first_range(s, bin);
  if (range.rank == range.count) range = {range.low, 0, 0, 0};
  p.done = range.count <= s.words.listed ? Done::kListed : Done::kCounted;
  return p;
}

// Does the next step of a piece's part. Returns whether the piece then needs more than one other step.
CGX_D bool proceed(const Part& s, uint32_t turn, uint32_t (&bins)[kBins]) {
  const Progress before = s.state->progress[(turn + 1) % 2], p = next_step(s, before, s.state->bins[(turn + 2) % 3]);
  if (s.first == 0) {
    uint32_t* const next = s.state->bins[(turn + 1) % 3];
    for (uint32_t i = threadIdx.x; i < kBins; i += kSelectThreads) next[i] = 0;
    if (threadIdx.x == 0) s.state->progress[turn % 2] = p;
  }
  if (before.done == Done::kPicked) return false;
  uint32_t* const now = s.state->bins[turn % 3];
  switch (p.done) {
    case Done::kSampled:
      count_sample(s, p.range, now, bins);
      break;
    case Done::kFound:
      find(s, first_threshold(s, p.range, bins), now, bins);
      break;
    case Done::kLowered:
      lower_threshold(s, now, bins);
      break;
    case Done::kCounted:
    case Done::kListed:
      look_through(s, p.range, p.done == Done::kListed, now, bins);
      break;
    default:
      pick(s, p.range, bins);
  }
  return p.done < Done::kListed;
}

__global__ void __launch_bounds__(kSelectThreads, 1) select_kernel(const __grid_constant__ Pieces t) {
  wait_for_previous<SelectionRow>();  // it has ended: a resident kernel is not early. But the next kernel may be
  alignas(16) __shared__ uint32_t bins[kBins];
  State* const all = reinterpret_cast<State*>(t.message.workspace + t.rows[0].state * kStateWords);
  bool last = false;  // whether this turn is the last one
  for (uint32_t turn = 0;; ++turn) {
    bool more = false;
    each_part(t, [&](const Part& s) { more |= proceed(s, turn, bins); });
    if (last) return;
    if (threadIdx.x == 0) {
      if (more) all->more[turn % 3] = 1;
      if (blockIdx.x == 0) all->more[(turn + 1) % 3] = 0;
    }
    wait_for_all(&all->arrived);
    last = all->more[turn % 3] == 0;
  }
}

}  // namespace

void launch_selection(SelectionLaunches& launches) {
  launches.launch(
      select_kernel, "select kernel", [](int64_t n, int64_t, SelectionRow&) { return div_up(n, kSelectTile); }, true);
}

}  // namespace jaxcgx::cuda
