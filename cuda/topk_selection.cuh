// Shared by the kernels that select TopK's elements: the state of a selection, access to a piece, and launches.
#pragma once

#include "codec/rng.h"
#include "cuda/decode_sum.cuh"
#include "cuda/encode_quad.cuh"
#include "cuda/key_range.cuh"

namespace jaxcgx::cuda {

// What has been done with a piece.
enum class Done : uint32_t { kNothing, kSampled, kFound, kLowered, kCounted, kListed, kPicked };

// `range`: of the sample's magnitudes, then of the candidates' keys.
struct Progress {
  Range range;
  Done done;
};

// The data that one pass over a piece leaves for later passes. All fields are 0 before the first pass.
struct State {
  // A turn reads the histogram of the last turn, counts its own, and clears that of the next turn.
  uint32_t bins[3][kBins];
  Progress progress[2];  // after even turns, after odd turns
  uint64_t cut;          // the elements whose keys are at or above this one are sent
  uint32_t
      steps[kMostRefinements + 1];  // number of elements that reach a threshold of the ladder, but not the one before
  uint32_t done;                    // for is_last
  uint32_t arrived,
      more[3];         // of the launch, in its first piece: for wait_for_all; whether the turn after is not the last
  uint32_t threshold;  // candidates are the elements at or above this magnitude
  uint32_t lowest;     // the last threshold of the ladder
  uint32_t reached, reached_later;  // number of elements that reach the first threshold; a later one
  uint32_t reread;  // whether the kept candidates are of an earlier threshold, so the piece is read again
  uint32_t listed;  // number of listed candidates
  // For exponential distributions: the sample's largest magnitude, the number of elements in a round's sum, and t.
  uint32_t largest, number;
  float t;
};
constexpr int64_t kStateWords = align_words(sizeof(State) / 4);

struct SelectionRow : Early, Draws, Residual {
  uint32_t k, memory;  // the most elements that are sent; offset in the workspace of the piece's memory, in words
  uint32_t state;      // index of its State
  uint32_t round;      // of Exponential (codec/topk.h), and the factor of the round
  float factor;
};
using Pieces = Table<SelectionRow>;

// A piece, as the kernels see it.
struct Selection {
  const Message& m;
  const Entry& e;
  const SelectionRow row;
  uint32_t n, k;
  SelectionWords words;
  State* state;
  uint32_t* memory;  // the piece's memory (SelectionWords)

  CGX_D Selection(const Pieces& t, const Place& p)
      : m(t.message), e(t.entries[p.index]), row(t.rows[p.index]), n(e.count), k(row.k), words(m.codec.sparse, n, k) {
    state = reinterpret_cast<State*>(m.workspace + row.state * kStateWords);
    memory = reinterpret_cast<uint32_t*>(m.workspace) + row.memory;
  }
  CGX_D uint2* candidates(uint32_t segment) const {
    return reinterpret_cast<uint2*>(memory + words.candidates) + segment * words.room;
  }
  CGX_D uint2* list() const { return reinterpret_cast<uint2*>(memory + words.list); }
  CGX_D uint32_t segments() const { return static_cast<uint32_t>(div_up(n, kSegment)); }

  CGX_D bool is_exact() const { return m.codec.sparse.select == Select::kExact; }
  // Returns whether too few elements reach the first threshold.
  CGX_D bool is_misled() const { return state->reached < enough_of(m.codec.sparse, k); }
  CGX_D static int64_t enough_of(const Sparse& s, int64_t k) { return s.select == Select::kExact ? k : enough(s, k); }
  // Returns the number of candidates, and that of elements that are sent.
  CGX_D uint32_t reached() const { return is_misled() ? state->reached_later : state->reached; }
  CGX_D uint32_t taken() const { return reached() < k ? reached() : k; }

  // Elements are sent in the order of their keys: larger magnitudes first, then lower indices.
  CGX_D uint32_t index_bits() const { return 32 - static_cast<uint32_t>(__clz(static_cast<int>(n - 1))); }
  CGX_D uint64_t key_of(uint32_t magnitude, uint32_t index) const {
    return uint64_t{magnitude} << index_bits() | (n - 1 - index);
  }

  CGX_D float undivided(uint32_t i) const {
    const float x = load_element(e.leaf, static_cast<DType>(e.dtype), i);
    return row.old != nullptr ? x + row.old[i] : x;
  }
  CGX_D float divided(float undivided) const {
    float x[1] = {undivided};
    if (m.sums) divide(m, x);
    return x[0];
  }
  // Loads every kWarpSize-th number from `first` on. All loads are issued before one is used. If an element does not
  // exist, its number is 0.
  template <uint32_t kAhead>
  CGX_D void load(uint32_t first, float (&x)[kAhead]) const {
    const auto each = [&](const auto* from, auto use) {
      std::remove_const_t<std::remove_pointer_t<decltype(from)>> raw[kAhead];
      from += first;
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) raw[a] = first + a * kWarpSize < n ? __ldcs(from + a * kWarpSize) : 0;
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) use(x[a], raw[a]);
    };
    const DType dtype = static_cast<DType>(e.dtype);
    if (dtype == DType::kF32)
      each(static_cast<const float*>(e.leaf), [](float& to, float number) { to = number; });
    else
      each(static_cast<const uint16_t*>(e.leaf), [&](float& to, uint16_t half) { to = widen(dtype, half); });
    if (row.old != nullptr) each(row.old, [](float& to, float residual) { to += residual; });
  }
  // Calls f(segment, each) for this warp's segments from `first` to `end`. Every kSelectWarps-th segment is this
  // warp's. each(g) calls g(whether the element exists, its undivided number, its index) for the elements of a segment,
  // in order. All lanes of a warp call g together, for kWarpSize consecutive elements. The next elements of the warp
  // are loaded before g is called.
  template <class Fn>
  CGX_D void with_elements(uint32_t first, uint32_t end, Fn f) const {
    constexpr uint32_t kAhead = 8, kLoads = kSegment / (kAhead * kWarpSize);  // loads in flight; times per segment
    const uint32_t lane = threadIdx.x % kWarpSize, n = this->n;
    float next[kAhead];
    const auto load_next = [&](uint32_t segment, uint32_t part) {
      if (segment < end) load(segment * kSegment + part * (kAhead * kWarpSize) + lane, next);
    };
    uint32_t segment = first + threadIdx.x / kWarpSize;
    load_next(segment, 0);
    for (; segment < end; segment += kSelectWarps) {
      f(segment, [&](auto g) {
#pragma unroll 1
        for (uint32_t part = 0; part < kLoads; ++part) {
          float x[kAhead];
#pragma unroll
          for (uint32_t a = 0; a < kAhead; ++a) x[a] = next[a];
          const bool last = part + 1 == kLoads;
          load_next(segment + (last ? kSelectWarps : 0), last ? 0 : part + 1);
          uint32_t i = segment * kSegment + part * (kAhead * kWarpSize) + lane;
#pragma unroll 1
          for (uint32_t left = kAhead; left > 0; --left, i += kWarpSize) {
            g(i < n, x[0], i);
#pragma unroll
            for (uint32_t a = 0; a + 1 < kAhead; ++a) x[a] = x[a + 1];
          }
        }
      });
    }
  }
  // The same for candidates: each(g) calls g(whether the candidate exists, x, its index). If all of them were kept, the
  // loads of the first candidates of several segments are in flight before one is used.
  template <class Fn>
  CGX_D void with_candidates(uint32_t first, uint32_t end, Fn f) const {
    constexpr uint32_t kAhead = 4;
    const uint32_t lane = threadIdx.x % kWarpSize;
    const bool kept = state->reread == 0;
    for (first += threadIdx.x / kWarpSize; first < end; first += kSelectWarps * kWarpSize) {
      const auto segment_of = [&](uint32_t i) { return first + i * kSelectWarps; };
      const uint32_t of_lane = segment_of(lane) < end ? memory[words.found + segment_of(lane)] : 0;
      const uint32_t last = segment_of(kWarpSize) < end ? segment_of(kWarpSize) : end;
      if (!kept || __ballot_sync(kWholeWarp, of_lane > words.room) != 0) {
        with_elements(first - threadIdx.x / kWarpSize, last, [&](uint32_t segment, auto each) {
          f(segment, [&](auto g) {
            each([&](bool there, float undivided, uint32_t i) {
              const float x = divided(undivided);
              g(there && magnitude_of(x) >= state->threshold, x, i);
            });
          });
        });
        continue;
      }
      for (uint32_t i = 0; segment_of(i) < last; i += kAhead) {
        uint2 head[kAhead];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; ++a) {
          const uint32_t found = __shfl_sync(kWholeWarp, of_lane, i + a);
          head[a] = lane < found ? candidates(segment_of(i + a))[lane] : uint2{0, 0};
        }
#pragma unroll 1
        for (uint32_t a = 0; a < kAhead && segment_of(i + a) < last; ++a) {
          const uint32_t found = __shfl_sync(kWholeWarp, of_lane, i + a), segment = segment_of(i + a);
          f(segment, [&](auto g) {
            uint2 candidate = head[0];
#pragma unroll 1
            for (uint32_t j = lane; j - lane < found; j += kWarpSize) {
              if (j >= kWarpSize) candidate = j < found ? candidates(segment)[j] : uint2{0, 0};
              g(j < found, float_of(candidate.x), candidate.y);
            }
          });
#pragma unroll
          for (uint32_t b = 0; b + 1 < kAhead; ++b) head[b] = head[b + 1];
        }
      }
    }
  }
  // Writes the magnitudes of the elements `begin` to `end` of the sample to memory.
  CGX_D void collect(const Sample& sample, const Place& p, int64_t begin, int64_t end) const {
    int64_t first = 0;
    if (m.codec.sparse.select != Select::kExact) {
      const uint64_t last = static_cast<uint64_t>(row.start) + n - 1;
      int32_t word[4];
      const uint32_t* const key = m.keys + kKeyWords * p.row;
      draw(word, key, last / kBlock * kLanes + last % kLanes, row.id);
      first = sample.first(noise_of<Scalar>(word, static_cast<int>(last % kBlock / kLanes), key[2]));
    }
#pragma unroll 8
    for (int64_t j = begin + threadIdx.x; j < end; j += kSelectThreads) {
      const float x = undivided(static_cast<uint32_t>(first + j * sample.stride));
      memory[words.sample + j] = magnitude_of(divided(x));
    }
  }
};

// If four neighbouring elements can be loaded at once (those that begin at a multiple of four), calls f(row), where row
// has the type of four elements in memory.
template <class Fn>
CGX_D void with_quads(const Selection& s, Fn f) {
  const bool single = static_cast<DType>(s.e.dtype) == DType::kF32;
  if (!aligned(s.e.leaf, single ? 16 : 8) || !aligned(s.row.old, 16)) return;
  if (single)
    f(float4{0, 0, 0, 0});
  else
    f(uint2{0, 0});
}

// Returns whether this thread block is the last to call this: whether all blocks together have done `all` units of
// work, of which this one has done `mine`. The last one sees all stores of the others, because the atomic operation
// releases and acquires. What it does for thread 0 it does for its whole block: the order is cumulative over the
// barriers. Every thread of the block must call this.
CGX_D bool is_last(State* s, uint32_t mine, int64_t all) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_in_order(&s->done, mine) + mine == all;
    if (last) s->done = 0;
  }
  __syncthreads();
  return last;
}

// Launches kernels on all pieces of a message, until one fails.
class SelectionLaunches {
 public:
  Status status;

  SelectionLaunches(const TopkWork& work, const Call& call) : work_(work), call_(call) {}

  const Sparse& sparse() const { return work_.to.codec.sparse; }

  // Launches a kernel on tiles(n, k, row) tiles of each piece. This function may change the piece's row. Returns
  // whether any piece has a tile. resident: see Launches.
  template <class Tiles>
  bool launch(void (*kernel)(Pieces), const char* name, Tiles tiles, bool resident = false) {
    if (status.call != nullptr) return false;
    const Layout& l = work_.to;
    Launches launches(call_, kernel, name, kSelectThreads);
    if (resident) launches.make_resident();
    bool any = false;
    for (int64_t row = 0; row < call_.batch; ++row) {
      for (size_t i = 0; i < l.pieces.size(); ++i) {
        const Piece& p = l.pieces[i];
        const int64_t k = capacity(sparse(), p.coded);
        Item<SelectionRow> item(l, call_.leaves, row, p);
        if (call_.message.sums) {
          item.entry.leaf = call_.message.workspace + work_.sums.begin[i] + row * work_.sums.row;
          item.entry.dtype = static_cast<uint32_t>(DType::kF32);
        }
        item.entry.count = static_cast<uint32_t>(p.coded);
        item.row.k = static_cast<uint32_t>(k);
        item.row.state = static_cast<uint32_t>(row * static_cast<int64_t>(l.pieces.size()) + static_cast<int64_t>(i));
        item.row.memory = static_cast<uint32_t>(work_.selection.begin[i] + row * work_.selection.row);
        const int64_t count = tiles(p.coded, k, item.row);
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

// Finds the first threshold of each piece of Select::kExponential, from a sample. topk_threshold.cu
void launch_threshold(SelectionLaunches& launches);
// Finds the elements that are sent, in order. topk_select.cu
void launch_selection(SelectionLaunches& launches);

}  // namespace jaxcgx::cuda
