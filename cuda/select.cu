// TopK's encoding. The largest elements of a piece are found in two passes over it at most, but for data that mislead
// the sample: one looks for candidates, elements that reach a threshold which the sample gives, and keeps them; radix
// selection among them, by three digits of their magnitudes, finds the smallest one that is sent. Elements have their
// places in the list from counts and their sums, never from the order in which blocks run. With feedback the second
// pass leaves the residuals.
#include <cmath>

#include "codec/rng.h"
#include "cuda/encode.cuh"
#include "cuda/rest.cuh"
#include "cuda/sum.cuh"
#include "cuda/topk.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr uint32_t kBins = 2048;  // of a digit of 11 bits; the second and the third have 10
constexpr int kDigits = 3;
static_assert(kMostRefinements < kBins, "");

// What the passes over a piece tell each other. All 0 before the first one.
struct State {
  uint32_t bins[kBins];
  uint32_t blocks;  // of this pass that have come to their end
  uint32_t prefix,
      rank;  // the digits of the magnitude looked for, and its rank among those that begin so (1: the largest)
  uint32_t threshold;        // candidates reach it
  uint32_t reached, taken;   // elements that do, and how many of them are sent
  uint32_t reread;           // whether the candidates that were kept are those of another threshold
  uint32_t largest, number;  // of the sample, for exponential distributions; and where they have come to
  float t;
};
constexpr int64_t kStateWords = align_words(sizeof(State) / 4);

// A piece, as its blocks see it.
struct Selection {
  const Message& m;
  const Entry& e;
  const Extra& extra;
  const float* old;
  uint32_t n, k;
  SelectionWords words;
  State* state;
  uint32_t* memory;  // the piece's

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
  // f(is it there, undivided, number) for 32 elements of a segment at a time, in order, by all lanes of a warp.
  template <class Fn>
  CGX_D void each_element(uint32_t segment, Fn f) const {
    constexpr uint32_t kAhead = 8;  // loads that are under way before one is used
    const uint32_t first = segment * kSegment;
    for (uint32_t i = first + threadIdx.x % 32; i < first + kSegment; i += 32 * kAhead) {
      float x[kAhead];
      const auto load = [&](const auto* leaf, auto convert) {
        std::remove_const_t<std::remove_pointer_t<decltype(leaf)>> raw[kAhead];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; ++a) raw[a] = i + 32 * a < n ? __ldcs(leaf + i + 32 * a) : 0;
#pragma unroll
        for (uint32_t a = 0; a < kAhead; ++a) x[a] = convert(raw[a]);
      };
      const DType dtype = static_cast<DType>(e.dtype);
      if (dtype == DType::kF32)
        load(static_cast<const float*>(e.leaf), [](float number) { return number; });
      else
        load(static_cast<const uint16_t*>(e.leaf), [&](uint16_t half) { return widen(dtype, half); });
      if (old != nullptr) {
        float y[kAhead];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; ++a) y[a] = i + 32 * a < n ? old[i + 32 * a] : 0.0f;
#pragma unroll
        for (uint32_t a = 0; a < kAhead; ++a) x[a] += y[a];
      }
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) f(i + 32 * a < n, x[a], i + 32 * a);
    }
  }
  // f(is it there, x, number) for candidates, likewise.
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
    for (uint32_t i = threadIdx.x % 32; i - threadIdx.x % 32 < found; i += 32) {
      const uint2 candidate = i < found ? candidates(segment)[i] : uint2{0, 0};
      f(i < found, float_of(candidate.x), candidate.y);
    }
  }
  // f(segment) for those of a group that are this warp's.
  template <class Fn>
  CGX_D void each_segment(uint32_t group, Fn f) const {
    for (uint32_t i = threadIdx.x / 32; i < 32; i += kSelectWarps) {
      if (const uint32_t segment = group * 32 + i; segment * kSegment < n) f(segment);
    }
  }
};

// Whether this block is the last of so many to come here; it then sees what all of them have written.
CGX_D bool is_last(State* s, int64_t blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&s->blocks, 1u) + 1 == blocks;
    if (last) s->blocks = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// A histogram of the block's own, to begin with and to add to that of the piece.
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

CGX_D uint32_t shift_of(int digit) { return 20u - 10u * static_cast<uint32_t>(digit); }
CGX_D void count_digit(uint32_t (&bins)[kBins], uint32_t magnitude, int digit, uint32_t prefix) {
  const uint32_t code = magnitude >> shift_of(digit);
  if (digit == 0)
    atomicAdd(&bins[code], 1u);
  else if (code >> 10 == prefix)
    atomicAdd(&bins[code & 1023], 1u);
}
// From the histogram of a digit, by the whole block: the digit of the magnitude of this rank. Rank 0 is above all
// magnitudes.
CGX_D void find_digit(State* s, int digit, uint32_t prefix, uint32_t rank) {
  constexpr uint32_t kEach = kBins / kSelectThreads;
  uint32_t* bins = s->bins + kBins - kEach * (threadIdx.x + 1);
  uint32_t sum = 0, all;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) sum += bins[i];
  uint32_t above = sum_before(sum, &all);
#pragma unroll
  for (uint32_t i = kEach; i-- > 0;) {
    const uint32_t count = bins[i];
    if (above < rank && rank <= above + count) {
      s->prefix = prefix << 10 | (kBins - kEach * (threadIdx.x + 1) + i);
      s->rank = rank - above;
    }
    above += count;
    bins[i] = 0;
  }
  if (rank == 0 && threadIdx.x == 0) s->prefix = kMagnitude >> shift_of(digit), s->rank = 0;
  __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads) clear_kernel(uint4* a, int64_t a_count, uint4* b, int64_t b_count) {
  const int64_t first = int64_t{blockIdx.x} * kSelectThreads + threadIdx.x,
                stride = int64_t{gridDim.x} * kSelectThreads;
  for (int64_t i = first; i < a_count; i += stride) a[i] = {0, 0, 0, 0};
  for (int64_t i = first; i < b_count; i += stride) b[i] = {0, 0, 0, 0};
}

constexpr int64_t kSampled = 8 * kSelectThreads;  // elements of the sample that a block has

// Collects the sample, and by the three digits of the magnitude of a rank in it finds the first threshold.
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
    draw(word, s.m.keys + 2 * p.row, last / kBlock * kLanes + last % kLanes, s.extra.id);
    first = sample.first(noise_of<Scalar>(word, static_cast<int>(last % kBlock / kLanes)));
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
    // Of as many elements as that, more are as large but for one message in thousands; if not, it only takes longer.
    if (sparse.select == Select::kExact) wanted += static_cast<int64_t>(4.0f * sqrtf(static_cast<float>(wanted))) + 4;
    rank = static_cast<uint32_t>(wanted < sample.count ? wanted : sample.count);
  }
  __syncthreads();
  find_digit(s.state, digit, prefix, rank);
  if (threadIdx.x == 0 && digit == kDigits - 1)
    s.state->threshold = s.state->prefix < kLargest ? s.state->prefix : kLargest;
}

// A round of codec/topk.h's exponential distributions, whose factor is extra.id's bits.
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
#pragma unroll
  for (uint32_t lane_bit = kLanes / 2; lane_bit > 0; lane_bit /= 2) sum += __shfl_xor_sync(kWarp, sum, lane_bit);
  if (lane == 0 && here > 0) sums[part] = sum;
  sum_before(number, &all);
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

// Looks for candidates, and keeps those for which there is room.
__global__ void __launch_bounds__(kSelectThreads, 4) find_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const uint32_t segment = p.tile * kSelectWarps + threadIdx.x / 32, threshold = s.state->threshold;
  const int64_t blocks = div_up(s.n, kSegment * kSelectWarps);
  if (p.tile >= blocks) return;
  uint32_t found = 0, all;
  if (segment * kSegment < s.n) {
    uint2* const candidates = s.candidates(segment);
    const auto room = static_cast<uint32_t>(s.words.room);
    s.each_element(segment, [&](bool there, float undivided, uint32_t i) {
      const float x = s.divided(undivided);
      const bool reaches = there && magnitude_of(x) >= threshold;
      const uint32_t ballot = __ballot_sync(kWarp, reaches);
      if (ballot == 0) return;
      const uint32_t at = found + before_lane(ballot);
      if (reaches && at < room) candidates[at] = {bits_of(x), i};
      found += static_cast<uint32_t>(__popc(ballot));
    });
    if (threadIdx.x % 32 == 0) s.memory[s.words.found + segment] = found;
  }
  sum_before(threadIdx.x % 32 == 0 ? found : 0, &all);
  if (threadIdx.x == 0) atomicAdd(&s.state->reached, all);
  if (!is_last(s.state, blocks) || threadIdx.x != 0) return;
  const Sparse& sparse = s.m.codec.sparse;
  const uint32_t reached = s.state->reached;
  s.state->reread = reached < (sparse.select == Select::kExact ? s.k : enough(sparse, s.k));
  s.state->taken = reached < s.k ? reached : s.k;
}

// Where too few elements reach the threshold, counts those that reach the next ones, all in one pass. Of exact
// selection the next one is 0.
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

// The three digits of the smallest magnitude that is sent.
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
  s.each_segment(p.tile, [&](uint32_t segment) {
    s.each_candidate(segment, [&](bool there, float x, uint32_t) {
      if (there) count_digit(bins, magnitude_of(x), digit, prefix);
    });
  });
  add_bins(s.state, bins);
  if (!is_last(s.state, blocks)) return;
  const uint32_t rank = digit == 0 ? s.state->taken : s.state->rank;
  __syncthreads();
  find_digit(s.state, digit, prefix, rank);
}

// Counts, in each segment, the elements above that magnitude and those that have it; and in the groups before each
// group.
__global__ void __launch_bounds__(kSelectThreads, 4) count_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t blocks = div_up(s.n, kGroup);
  if (p.tile >= blocks) return;
  const uint32_t smallest = s.state->prefix;
  uint2 mine = {0, 0}, all;
  s.each_segment(p.tile, [&](uint32_t segment) {
    uint2 count = {0, 0};
    s.each_candidate(segment, [&](bool there, float x, uint32_t) {
      const uint32_t magnitude = magnitude_of(x);
      count.x += static_cast<uint32_t>(__popc(__ballot_sync(kWarp, there && magnitude > smallest)));
      count.y += static_cast<uint32_t>(__popc(__ballot_sync(kWarp, there && magnitude == smallest)));
    });
    if (threadIdx.x % 32 == 0) s.picked()[segment] = count;
    mine.x += count.x, mine.y += count.y;
  });
  if (threadIdx.x % 32 != 0) mine = {0, 0};
  sum_before(mine.x, &all.x);
  sum_before(mine.y, &all.y);
  if (threadIdx.x == 0) s.groups()[p.tile] = all;
  if (!is_last(s.state, blocks)) return;
  const int64_t each = div_up(blocks, kSelectThreads), first = threadIdx.x * each;
  mine = {0, 0};
  for (int64_t i = first; i < first + each && i < blocks; ++i) mine.x += s.groups()[i].x, mine.y += s.groups()[i].y;
  uint2 before = {sum_before(mine.x, &all.x), sum_before(mine.y, &all.y)};
  for (int64_t i = first; i < first + each && i < blocks; ++i) {
    const uint2 count = s.groups()[i];
    s.groups()[i] = before;
    before.x += count.x, before.y += count.y;
  }
}

// Writes the elements that are sent in order and, with feedback, all others to the residuals.
__global__ void __launch_bounds__(kSelectThreads, 4) pick_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  if (p.tile >= div_up(s.n, kGroup)) return;
  const uint32_t smallest = s.state->prefix, equals = s.state->rank, lane = threadIdx.x % 32;
  float* lost = t.residuals[p.index].lost;
  uint32_t* indices = s.memory + s.words.indices;
  uint32_t* values = s.memory + s.words.values;
  // Of the segments of the group, what is before each.
  const int64_t own = int64_t{p.tile} * 32 + lane;
  uint2 count = own * kSegment < s.n ? s.picked()[own] : uint2{0, 0}, sum = count;
#pragma unroll
  for (uint32_t d = 1; d < 32; d *= 2) {
    const uint2 other = {__shfl_up_sync(kWarp, sum.x, d), __shfl_up_sync(kWarp, sum.y, d)};
    if (lane >= d) sum.x += other.x, sum.y += other.y;
  }
  const uint2 of_group = s.groups()[p.tile];
  const uint2 before = {of_group.x + sum.x - count.x, of_group.y + sum.y - count.y};
  s.each_segment(p.tile, [&](uint32_t segment) {
    uint32_t above = __shfl_sync(kWarp, before.x, segment % 32), equal = __shfl_sync(kWarp, before.y, segment % 32);
    const auto place = [&](bool there, float x, uint32_t i) {
      const uint32_t magnitude = magnitude_of(x);
      const uint32_t larger = __ballot_sync(kWarp, there && magnitude > smallest),
                     same = __ballot_sync(kWarp, there && magnitude == smallest);
      const uint32_t equal_here = equal + before_lane(same);
      const bool sent = there && (magnitude > smallest || (magnitude == smallest && equal_here < equals));
      if (sent) {
        const uint32_t at = above + before_lane(larger) + (equal_here < equals ? equal_here : equals);
        indices[at] = i;
        values[at] = bits_of(sent_as(x));
      }
      above += static_cast<uint32_t>(__popc(larger)), equal += static_cast<uint32_t>(__popc(same));
      return sent;
    };
    if (lost == nullptr) {
      s.each_candidate(segment, place);
    } else {
      s.each_element(segment, [&](bool there, float undivided, uint32_t i) {
        if (!place(there, s.divided(undivided), i) && there) lost[i] = is_finite(undivided) ? undivided : s.old[i];
      });
    }
  });
}

// Bits of a byte of the payload, which was 0; other threads may set others.
CGX_D void set_bits(uint8_t* byte, uint32_t bits) {
  const auto at = reinterpret_cast<uintptr_t>(byte);
  atomicOr(reinterpret_cast<uint32_t*>(at & ~uintptr_t{3}), bits << (8 * (at & 3)));
}

// The list of indices: a thread writes one. What there are not enough elements for is n, and 0.
__global__ void __launch_bounds__(kSelectThreads, 4) list_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t j = int64_t{p.tile} * kSelectThreads + threadIdx.x;
  if (j >= s.k) return;
  uint32_t& index = s.memory[s.words.indices + j];
  if (j >= s.state->taken) index = s.n, s.memory[s.words.values + j] = 0;
  const IndexList list(s.n, s.k);
  if (list.is_implied()) return;
  uint8_t* bytes = s.m.payload + (s.m.where != nullptr ? p.row : p.slot) * s.m.chunk_bytes + s.e.codes;
  const int64_t one = list.split ? list.one_of(j, index) : index;
  if (one < list.bits) set_bits(bytes + one / 8, 1u << (one % 8));
  if (!list.split) return;
  each_field(list, j, [&](int64_t at, uint32_t bit, uint32_t width, uint32_t from) {
    set_bits(bytes + at, (index >> from & ((1u << width) - 1)) << bit);
  });
}

// What encoding lost of the elements that were sent.
__global__ void __launch_bounds__(kSelectThreads, 4) lost_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t j = int64_t{p.tile} * kSelectThreads + threadIdx.x;
  if (j >= s.k || j >= s.state->taken) return;
  const uint32_t i = s.memory[s.words.indices + j];
  const float lost = s.undivided(i) - s.m.divisor * float_of(s.memory[s.words.decoded + j]);
  t.residuals[p.index].lost[i] = is_finite(lost) ? lost : s.old[i];
}

}  // namespace

TopkWork::TopkWork(const Layout& l, int64_t batch, int64_t payloads, bool encodes)
    : to(payloads > 0 ? of_sum(l, payloads) : l),
      states(encodes ? times(batch, static_cast<int64_t>(to.pieces.size()) * kStateWords) : 0),
      lists(l, batch * payloads, encodes, states,
            [&](const Piece& p) { return ListWords(IndexList(p.coded, capacity(l.codec.sparse, p.coded))).all; }),
      sums(l, encodes && payloads > 0 ? batch : 0, true, lists.end, [](const Piece& p) { return p.coded; }),
      selection(to, encodes ? batch : 0, payloads > 0, sums.end,
                [&](const Piece& p) {
                  const Sparse& sparse = to.codec.sparse;
                  return SelectionWords(sparse, static_cast<uint32_t>(p.coded),
                                        static_cast<uint32_t>(capacity(sparse, p.coded)))
                      .all;
                }),
      end(selection.end) {
  if (!encodes) return;
  for (const Piece& p : to.pieces) {
    for (const Piece& v : values_layout(to.codec, p.coded).pieces)
      end += times(batch, workspace_floats(values_of(to.codec), v));
  }
}

Status encode_topk(const TopkWork& work, int64_t batch, const Leaves& leaves, const Message& given,
                   cudaStream_t stream) {
  const Layout& l = work.to;
  const Sparse& sparse = l.codec.sparse;
  if (work.end > UINT32_MAX) return too_large();
  if (batch == 0 || l.pieces.empty()) return {};
  Message m = given;
  m.codec = l.codec;
  m.chunk_bytes = l.chunk_bytes;
  m.payloads = nullptr;
  m.own = false;
  Status status;
  // A kernel on all pieces, if it has as many blocks for each as `blocks(n, k, the piece's item)` says.
  const auto launch = [&](auto kernel, const char* name, int32_t stage, auto blocks) {
    if (status.call != nullptr) return false;
    m.stage = stage;
    Launches launches(m, stream, kernel, name, kSelectThreads);
    bool any = false;
    for (int64_t row = 0; row < batch; ++row) {
      for (size_t i = 0; i < l.pieces.size(); ++i) {
        const Piece& p = l.pieces[i];
        const int64_t k = capacity(sparse, p.coded);
        Item item(l, leaves, row, p);
        if (m.sums) {
          item.entry.leaf = m.workspace + work.sums.begin[i] + row * work.sums.row;
          item.entry.dtype = static_cast<uint32_t>(DType::kF32);
        }
        item.entry.meta = static_cast<uint32_t>(row * static_cast<int64_t>(l.pieces.size()) + static_cast<int64_t>(i));
        item.entry.count = static_cast<uint32_t>(p.coded);
        item.extra.last = k;
        item.extra.work = static_cast<uint32_t>(work.selection.begin[i] + row * work.selection.row);
        const int64_t count = blocks(p.coded, k, item);
        if (count == 0) continue;
        launches.add(item, count);
        any = true;
      }
    }
    status = launches.finish();
    return any;
  };
  const auto of_sample = [&](int64_t n, int64_t k, Item&) {
    return k == 0 || k == n ? 0 : div_up(SelectionWords::sample_of(sparse, n, k).count, kSampled);
  };
  const auto of_segments = [](int64_t n, int64_t, Item&) { return div_up(n, kSegment * kSelectWarps); };
  const auto of_groups = [](int64_t n, int64_t, Item&) { return div_up(n, kGroup); };
  const auto of_list = [](int64_t, int64_t k, Item&) { return div_up(k, kSelectThreads); };

  const int64_t bytes = batch * (m.where != nullptr ? 1 : l.chunks()) * l.chunk_bytes;
  constexpr int64_t kMostBlocks = 1024;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<uint32_t>(std::min(kMostBlocks, div_up(std::max(bytes / 16, work.states / 4), kSelectThreads))));
  config.blockDim = dim3(kSelectThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, clear_kernel, reinterpret_cast<uint4*>(m.payload), bytes / 16,
                                               reinterpret_cast<uint4*>(m.workspace), work.states / 4);
  if (error != cudaSuccess) return {"clear kernel", error};
  const bool exponential = sparse.select == Select::kExponential;
  for (int32_t digit = 0; digit < (exponential ? 1 : kDigits); ++digit)
    launch(sample_kernel, "sample kernel", digit, of_sample);
  const auto of_round = [&](int64_t n, int64_t k, Item& item) {
    const int64_t blocks = of_sample(n, k, item);
    if (blocks == 0) return blocks;
    const Exponential fit(n, k);
    item.extra.id = bits_of(fit.factor(m.stage));
    return m.stage < fit.rounds ? blocks : 0;
  };
  if (exponential) {
    for (int32_t round = 0; launch(exponential_kernel, "exponential kernel", round, of_round); ++round) {
    }
  }
  launch(find_kernel, "find kernel", 0, of_segments);
  launch(refine_kernel, "refine kernel", 0, of_groups);
  for (int32_t digit = 0; digit < kDigits; ++digit) launch(digit_kernel, "digit kernel", digit, of_groups);
  launch(count_kernel, "count kernel", 0, of_groups);
  launch(pick_kernel, "pick kernel", 0, of_groups);
  launch(list_kernel, "list kernel", 0, of_list);
  if (status.call != nullptr) return status;

  const auto part = [&](int64_t SelectionWords::* of) {
    return [&sparse, of](int64_t n, int64_t k) {
      return SelectionWords(sparse, static_cast<uint32_t>(n), static_cast<uint32_t>(k)).*of;
    };
  };
  const Values values(l, work.selection, m.workspace, leaves.ids, part(&SelectionWords::values));
  if (status = check_size(values.layout, batch); status.call != nullptr) return status;
  Message of_values = message_of(values.layout);
  of_values.payload = m.payload;
  of_values.where = m.where;
  of_values.keys = m.keys;
  of_values.workspace = m.workspace + work.selection.end;
  status = encode_all(values.layout, batch,
                      {values.leaves.data(), nullptr, nullptr, values.ids.data(), values.starts.data()}, of_values,
                      false, stream);
  if (leaves.residuals == nullptr || status.call != nullptr) return status;
  const Values decoded(l, work.selection, m.workspace, nullptr, part(&SelectionWords::decoded));
  of_values.payloads = m.payload;
  status = decode_all(decoded.layout, batch, {decoded.leaves.data()}, of_values, stream);
  launch(lost_kernel, "lost kernel", 0, of_list);
  return status;
}

}  // namespace jaxcgx::cuda
