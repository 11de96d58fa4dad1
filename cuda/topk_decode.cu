// TopK's decoding. The lists of indices are decoded to the workspace, and their values, too, which are a message in
// another codec. Then each thread block makes a stretch of the numbers: it adds the elements that each list has in this
// stretch, rank after rank.
#include "cuda/decode_sum.cuh"
#include "cuda/launchers.cuh"
#include "cuda/scan.cuh"
#include "cuda/topk.cuh"

namespace jaxcgx::cuda {
namespace {

struct ListRow : Early, Sum {
  uint32_t k, memory;  // the most indices; offset in the workspace of the list's memory, in words
  uint32_t next;       // words of the workspace from a list to the list of the next rank
};
using Lists = Table<ListRow>;

// A list of indices. Each decoded index is replaced by the maximum of itself and all indices before it. So indices
// ascend even in bytes that no encoder wrote. An index that is not above the index before it counts as missing.
struct List {
  IndexList list;
  ListWords words;
  uint32_t* memory;

  CGX_D List(const Message& m, const Entry& e, const ListRow& row)
      : list(e.count, row.k), words(list), memory(reinterpret_cast<uint32_t*>(m.workspace) + row.memory) {}

  CGX_D uint32_t* stretches() const { return memory; }
  CGX_D uint32_t* indices() const { return memory + words.indices; }
  CGX_D const float* values() const { return reinterpret_cast<const float*>(memory + words.values); }

  CGX_D uint32_t count() const { return list.is_implied() ? static_cast<uint32_t>(list.k) : memory[words.stretches]; }
  CGX_D uint32_t index(uint32_t j) const { return list.is_implied() ? j : indices()[j]; }
  CGX_D bool is_there(uint32_t j) const { return index(j) < list.n && (j == 0 || index(j) > index(j - 1)); }
  // Returns the number of indices below a bound. The lanes of a warp call this together, and read kWarpSize indices at
  // a time. A thread alone would wait for one index after another.
  CGX_D uint32_t below(int64_t bound) const {
    uint32_t from = 0, to = count();
    while (from < to) {
      const uint32_t step = (to - from - 1) / kWarpSize + 1, at = from + threadIdx.x % kWarpSize * step;
      const auto less = static_cast<uint32_t>(__popc(__ballot_sync(kWholeWarp, at < to && index(at) < bound)));
      if (less == 0) return from;
      if (less * step < to - from) to = from + less * step;
      from += (less - 1) * step + 1;
    }
    return from;
  }

  // Returns a word of the list's bitmap, with the bits past its end cleared.
  CGX_D uint32_t row(const uint8_t* bytes, int64_t word) const {
    const int64_t left = list.bits - 32 * word;
    if (left <= 0) return 0;
    const uint32_t bits = reinterpret_cast<const uint32_t*>(bytes)[word];
    return left < 32 ? bits & ((1u << left) - 1) : bits;
  }
  // Returns index j, which set `bit` of the bitmap.
  CGX_D uint32_t read(const uint8_t* bytes, int64_t j, int64_t bit) const {
    if (!list.split) return static_cast<uint32_t>(bit);
    const int64_t high = bit - j;
    if (high > list.n >> list.low) return static_cast<uint32_t>(list.n);
    uint32_t index = static_cast<uint32_t>(high) << list.low;
    each_field(list, j, [&](int64_t at, uint32_t bit, uint32_t width, uint32_t from) {
      index |= (bytes[at] >> bit & ((1u << width) - 1)) << from;
    });
    return index;
  }
};

// Counts the ones of each stretch of the bitmap.
__global__ void __launch_bounds__(kListThreads) ones_kernel(const __grid_constant__ Lists t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const List l(m, e, t.rows[p.index]);
  if (p.tile >= l.words.stretches) return;
  const uint8_t* bytes = payloads_of(m, p) + e.codes;
  const int64_t first = (int64_t{p.tile} * kListThreads + threadIdx.x) * l.words.each;
  uint32_t ones = 0, all;
  for (int64_t word = first; word < first + l.words.each; ++word)
    ones += static_cast<uint32_t>(__popc(l.row(bytes, word)));
  sum_before<kListThreads>(ones, &all);
  if (threadIdx.x == 0) l.stretches()[p.tile] = all;
}

// Reads the indices of each stretch of the bitmap, and replaces each index by the maximum of itself and all indices
// before it.
__global__ void __launch_bounds__(kListThreads) indices_kernel(const __grid_constant__ Lists t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const List l(m, e, t.rows[p.index]);
  if (p.tile >= l.words.stretches) return;
  const uint8_t* bytes = payloads_of(m, p) + e.codes;
  const int64_t k = l.list.k, first_bit = int64_t{p.tile} * kListThreads * l.words.each * 32;
  uint32_t ones = 0, before, all;
  for (uint32_t i = threadIdx.x; i < p.tile; i += kListThreads) ones += l.stretches()[i];
  sum_before<kListThreads>(ones, &before);
  const int64_t first = first_bit / 32 + threadIdx.x * l.words.each;
  ones = 0;
  for (int64_t word = first; word < first + l.words.each; ++word)
    ones += static_cast<uint32_t>(__popc(l.row(bytes, word)));
  const int64_t first_j = int64_t{before} + sum_before<kListThreads>(ones, &all);
  if (threadIdx.x == 0 && p.tile + 1 == l.words.stretches) {
    l.stretches()[l.words.stretches] = static_cast<uint32_t>(int64_t{before} + all < k ? int64_t{before} + all : k);
  }
  // Calls f(j, its bit) for each index of this thread.
  const auto each = [&](auto f) {
    int64_t j = first_j;
    for (int64_t word = first; word < first + l.words.each; ++word) {
      for (uint32_t bits = l.row(bytes, word); bits != 0 && j < k; bits &= bits - 1, ++j)
        f(j, 32 * word + __ffs(static_cast<int>(bits)) - 1);
    }
  };
  const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  uint32_t largest = 0;
  each([&](int64_t j, int64_t bit) { largest = larger(largest, l.indices()[j] = l.read(bytes, j, bit)); });
  largest = fold_before<kListThreads>(largest, &all, larger);
  // Only indices with the same high bits can be out of order, and their ones are adjacent. So, of the earlier
  // stretches, only the run of ones directly before this stretch matters. Every warp reads this run by itself.
  const auto is_one = [&](int64_t bit) { return bit >= 0 && (l.row(bytes, bit / 32) >> (bit % 32) & 1) != 0; };
  if (l.list.split && is_one(first_bit) && before < k) {
    uint32_t run = 0;
    int64_t bit = first_bit - 1 - threadIdx.x % kWarpSize, j = int64_t{before} - 1 - threadIdx.x % kWarpSize;
    for (uint32_t zeros = 0; zeros == 0; bit -= kWarpSize, j -= kWarpSize) {
      zeros = ~__ballot_sync(kWholeWarp, is_one(bit));
      if ((zeros & ((2u << (threadIdx.x % kWarpSize)) - 1)) == 0) run = larger(run, l.read(bytes, j, bit));
    }
    // This reduction is hand-written: see scan.cuh.
#pragma unroll
    for (uint32_t lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
      run = larger(run, __shfl_xor_sync(kWholeWarp, run, lanes));
    largest = larger(largest, run);
  }
  each([&](int64_t j, int64_t) { largest = l.indices()[j] = larger(largest, l.indices()[j]); });
}

constexpr uint32_t kScatterThreads = 256, kAtOnce = 64;  // kAtOnce: number of lists searched at a time
constexpr int64_t kStretch = 4096;

// Writes the sum of the lists in rank order, or NaN if `where` is out of range. The lists of the ranks are e.meta words
// apart in memory.
__global__ void __launch_bounds__(kScatterThreads) scatter_kernel(const __grid_constant__ Lists t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Message& m = t.message;
  const Entry& e = t.entries[p.index];
  const int64_t first = p.tile * kStretch;
  if (first >= e.count) return;
  const auto here = static_cast<uint32_t>(e.count - first < kStretch ? e.count - first : kStretch);
  List l(m, e, t.rows[p.index]);
  __shared__ float x[kStretch];
  __shared__ uint32_t from[2 * kAtOnce];  // two per list: positions of the first index in and after the stretch
  for (uint32_t i = threadIdx.x; i < here; i += kScatterThreads) x[i] = p.rank == kNowhere ? float_of(kNaNBits) : 0.0f;
  for (uint32_t rank = 0; rank < m.ranks && p.rank != kNowhere; ++rank, l.memory += t.rows[p.index].next) {
    __syncthreads();
    if (rank % kAtOnce == 0) {
      const uint32_t lists = m.ranks - rank < kAtOnce ? m.ranks - rank : kAtOnce;
      for (uint32_t i = threadIdx.x / kWarpSize; i < 2 * lists; i += kScatterThreads / kWarpSize) {
        List other = l;
        other.memory += i / 2 * int64_t{t.rows[p.index].next};
        const uint32_t position = other.below(i % 2 == 0 ? first : first + here);
        if (threadIdx.x % kWarpSize == 0) from[i] = position;
      }
      __syncthreads();
    }
    if (rank == p.rank) {
      for (uint32_t i = threadIdx.x; i < here; i += kScatterThreads)
        x[i] += load_element(e.leaf, static_cast<DType>(e.dtype), first + i);
      continue;
    }
    for (uint32_t j = from[rank % kAtOnce * 2] + threadIdx.x; j < from[rank % kAtOnce * 2 + 1]; j += kScatterThreads) {
      if (!l.is_there(j)) continue;
      float& to = x[l.index(j) - first];
      to = m.sums ? to + l.values()[j] : l.values()[j];
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < here; i += kScatterThreads) {
    float value[1] = {x[i]};
    if (m.sums)
      divide(m, value), t.rows[p.index].sum[first + i] = value[0];
    else
      store_element(const_cast<void*>(e.leaf), static_cast<DType>(e.dtype), first + i, value[0]);
  }
}

// Sets the elements of a list to 0.
__global__ void __launch_bounds__(kScatterThreads) zero_kernel(const __grid_constant__ Lists t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Entry& e = t.entries[p.index];
  const List l(t.message, e, t.rows[p.index]);
  const uint32_t j = p.tile * kScatterThreads + threadIdx.x;
  if (j < l.count() && l.is_there(j))
    store_element(const_cast<void*>(e.leaf), static_cast<DType>(e.dtype), l.index(j), 0.0f);
}

// A kernel that runs on lists of indices.
struct ListKernel {
  void (*function)(Lists);
  const char* name;
  uint32_t threads;
};

// Launches a kernel on all pieces, with `blocks(row, piece, k, item)` thread blocks each. In `memory`, each row has
// `lists` lists, one after another.
template <class Blocks>
Status launch_lists(const Call& call, const Memory& memory, int64_t lists, const ListKernel& kernel, Blocks blocks) {
  const Layout& l = call.layout;
  Launches launches(call, kernel.function, kernel.name, kernel.threads);
  for (int64_t row = 0; row < call.batch; ++row) {
    for (size_t i = 0; i < l.pieces.size(); ++i) {
      const Piece& p = l.pieces[i];
      const int64_t k = capacity(l.codec.sparse, p.coded);
      Item<ListRow> item(l, call.leaves, row, p);
      item.entry.count = static_cast<uint32_t>(p.coded);
      item.row.k = static_cast<uint32_t>(k);
      item.row.memory = static_cast<uint32_t>(memory.begin[i] + row * lists * memory.row);
      item.row.next = static_cast<uint32_t>(memory.row);
      if (const int64_t count = blocks(row, i, k, &item); count > 0) launches.add(item, count);
    }
  }
  return launches.finish();
}

// Decodes the indices of all lists of a message, which has `rows` rows of one list each.
Status decode_indices(const Call& given, int64_t rows, const Memory& memory) {
  const Layout& l = given.layout;
  Call call{l, rows, {}, given.message, given.stream};
  call.early = given.early;
  call.message.ranks = 1;
  call.message.own = false;
  const auto stretches = [&](int64_t, size_t i, int64_t k, Item<ListRow>*) {
    return ListWords(IndexList(l.pieces[i].coded, k)).stretches;
  };
  const Status s = launch_lists(call, memory, 1, {ones_kernel, "ones kernel", kListThreads}, stretches);
  if (s.call != nullptr) return s;
  return launch_lists(call, memory, 1, {indices_kernel, "indices kernel", kListThreads}, stretches);
}

}  // namespace

Status decode_topk(const Call& given) {
  Call call = given;
  const Layout& l = call.layout;
  Message& m = call.message;
  const bool encodes = m.payload != nullptr;
  const int64_t lists = m.ranks, rows = call.batch * lists;
  const TopkWork work(l, call.batch, lists, encodes);
  if (work.end > UINT32_MAX) return too_large();
  m.lists = m.ranks;
  call.early = begins_early();
  Status s = decode_indices(call, rows, work.lists);
  if (s.call != nullptr) return s;

  const Values values(l, work.lists, m.workspace, nullptr,
                      [](int64_t n, int64_t k) { return ListWords(IndexList(n, k)).values; });
  if (s = check_size(values.layout, rows); s.call != nullptr) return s;
  Call decode_values{values.layout, rows, {values.leaves.data()}, message_of(values.layout), call.stream};
  decode_values.early = call.early;
  decode_values.message.payloads = m.payloads;
  decode_values.message.where = m.where;
  decode_values.message.lists = m.lists;
  if (s = decode_all(decode_values); s.call != nullptr) return s;

  m.lists = 1;
  if (encodes) m.divisor = m.inverse = 1.0f, m.exact = true;  // the sum's encoding divides
  s = launch_lists(call, work.lists, lists, {scatter_kernel, "scatter kernel", kScatterThreads},
                   [&](int64_t row, size_t i, int64_t, Item<ListRow>* item) {
                     if (encodes) item->row.sum = m.workspace + work.sums.begin[i] + row * work.sums.row;
                     return div_up(l.pieces[i].coded, kStretch);
                   });
  return s.call == nullptr && encodes ? encode_topk(work, given) : s;
}

Status clear(const Clear& a, cudaStream_t stream) {
  const Layout& l = a.layout;
  if (const Status s = check_size(l, a.batch); s.call != nullptr) return s;
  const TopkWork work(l, a.batch, 1, false);
  if (work.end > UINT32_MAX) return too_large();
  Call call{l, a.batch, {const_cast<const void* const*>(a.arrays)}, message_of(l), stream};
  call.message.payloads = a.payload;
  call.message.workspace = static_cast<float*>(a.workspace);
  call.early = begins_early();
  const Status s = decode_indices(call, a.batch, work.lists);
  if (s.call != nullptr) return s;
  return launch_lists(call, work.lists, 1, {zero_kernel, "zero kernel", kScatterThreads},
                      [](int64_t, size_t, int64_t k, Item<ListRow>*) { return div_up(k, kScatterThreads); });
}

}  // namespace jaxcgx::cuda
