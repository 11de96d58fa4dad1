// Blocks of patches of words (codec/patch.h). A thread block encodes or applies one of them. Its bits and ranks are in
// shared memory: a warp has 32 words at a time, and a ballot of its threads is a row of bits.
#include "cuda/cuda.h"
#include "cuda/piece_table.cuh"
#include "cuda/scan.cuh"

namespace jaxcgx::cuda {
namespace {

constexpr uint32_t kPatchThreads = 256, kMarkRows = kPatchBlock / kWarpSize;

// A bit for each word of a block of `rows` times 32 words, and for each 32 of them the number of bits before. All
// threads call clear() and scan().
struct Marks {
  uint32_t bits[kMarkRows], before[kMarkRows];

  CGX_D void clear(uint32_t rows) {
    for (uint32_t r = threadIdx.x; r < rows; r += kPatchThreads) bits[r] = 0;
    __syncthreads();
  }
  // Sets `before`. Returns the number of bits.
  CGX_D uint32_t scan(uint32_t rows) {
    constexpr uint32_t kOwn = kMarkRows / kPatchThreads;
    const uint32_t first = threadIdx.x * kOwn, end = first + kOwn < rows ? first + kOwn : rows;
    __syncthreads();
    uint32_t own = 0, all;
    for (uint32_t r = first; r < end; ++r) own += static_cast<uint32_t>(__popc(bits[r]));
    uint32_t sum = sum_before<kPatchThreads>(own, &all);
    for (uint32_t r = first; r < end; ++r) {
      before[r] = sum;
      sum += static_cast<uint32_t>(__popc(bits[r]));
    }
    __syncthreads();
    return all;
  }
  CGX_D bool has(int32_t i) const { return bits[i / 32] >> i % 32 & 1; }
  CGX_D int32_t rank(int32_t i) const {  // the number of bits before bit i
    return static_cast<int32_t>(before[i / 32]) + __popc(bits[i / 32] & ((1u << i % 32) - 1));
  }
  CGX_D void set(int32_t i) { atomicOr(bits + i / 32, 1u << i % 32); }
};

// Returns the number of words of a block whose first word is `first`.
CGX_D int32_t words_from(int64_t first, int64_t words) {
  return static_cast<int32_t>(words - first < kPatchBlock ? words - first : kPatchBlock);
}
CGX_D uint32_t mark_rows(int32_t n) { return (static_cast<uint32_t>(n) + kWarpSize - 1) / kWarpSize; }

// Calls f(index of a word, its row) in all threads, for n words and for those up to a whole row.
template <class F>
CGX_D void each_index(int32_t n, F f) {
  for (uint32_t r = threadIdx.x / kWarpSize; r < mark_rows(n); r += kPatchThreads / kWarpSize)
    f(static_cast<int32_t>(r * kWarpSize + threadIdx.x % kWarpSize), r);
}

CGX_D void put_ballot(uint32_t* row, bool in) {
  const uint32_t ballot = __ballot_sync(kWholeWarp, in);
  if (threadIdx.x % kWarpSize == 0) *row = ballot;
}

template <class T>
CGX_D void put_bytes(uint8_t* out, T value, int64_t bytes) {
  for (int64_t b = 0; b < bytes; ++b) out[b] = static_cast<uint8_t>(value >> 8 * b);
}

template <class T>
__global__ void __launch_bounds__(kPatchThreads) encode_patch_kernel(PatchEncode a) {
  constexpr int64_t kWidth = sizeof(T);
  __shared__ Marks changed, small, raw;
  __shared__ uint32_t bits[3 * kPatchBlock / 32 + 2];  // the indices and the codes
  const int64_t first = int64_t{blockIdx.x} * kPatchBlock;
  const int32_t n = words_from(first, a.words);
  const uint32_t rows = mark_rows(n);
  const T *old = static_cast<const T*>(a.old) + first, *now = static_cast<const T*>(a.now) + first;
  uint8_t* const out = a.slots + first * kWidth;
  const auto number_of = [=](int32_t i) { return i < n ? patch_number(old[i], now[i]) : T{0}; };
  each_index(n, [&](int32_t i, uint32_t r) {
    const T number = number_of(i);
    const bool is_raw = static_cast<uint64_t>(number) > static_cast<uint64_t>(most_small(kWidth));
    put_ballot(changed.bits + r, number != 0);
    put_ballot(small.bits + r, number > 2 && !is_raw);
    put_ballot(raw.bits + r, is_raw);
  });
  for (uint32_t at = threadIdx.x; at < sizeof(bits) / 4; at += kPatchThreads) bits[at] = 0;
  const uint32_t k = changed.scan(rows), smalls = small.scan(rows), raws = raw.scan(rows);
  const PatchIndices list(n, k);
  PatchHead head = {static_cast<uint16_t>(k), static_cast<uint16_t>(smalls), static_cast<uint16_t>(raws)};
  const int64_t codes = list.bytes(), small_at = codes + row_bytes(2 * int64_t{k}),
                raw_at = small_at + smalls * small_bytes(kWidth);
  const bool whole = raw_at + raws * kWidth >= n * kWidth;
  if (whole) head = {kPatchWhole, 0, 0};
  if (threadIdx.x == 0) a.heads[blockIdx.x] = head;
  if (whole) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < n; i += kPatchThreads)
      put_bytes(out + i * kWidth, now[i], kWidth);
    return;
  }
  const auto put_bits = [&](int64_t at, uint32_t value) {  // at most 16 bits
    atomicOr(bits + at / 32, value << at % 32);
    if (at % 32 > 16) atomicOr(bits + at / 32 + 1, value >> (32 - at % 32));
  };
  each_index(n, [&](int32_t i, uint32_t) {
    if (!changed.has(i)) return;
    const int32_t j = changed.rank(i);
    const T number = number_of(i);
    if (list.row > 0) put_bits(list.split ? (i >> list.low) + j : i, 1);
    if (list.split)
      put_bits(8 * row_bytes(list.row) + int64_t{j} * list.low, static_cast<uint32_t>(i & ((1 << list.low) - 1)));
    put_bits(8 * codes + 2 * j, raw.has(i) ? 3 : small.has(i) ? 2 : static_cast<uint32_t>(number) - 1);
    if (small.has(i))
      put_bytes(out + small_at + small.rank(i) * small_bytes(kWidth), static_cast<T>(number - 3), small_bytes(kWidth));
    if (raw.has(i)) put_bytes(out + raw_at + raw.rank(i) * kWidth, now[i], kWidth);
  });
  __syncthreads();
  for (int64_t at = threadIdx.x; at < small_at; at += kPatchThreads)
    out[at] = static_cast<uint8_t>(bits[at / 4] >> at % 4 * 8);
}

// The bytes of a block. Those behind the end of all blocks are 0.
struct BlockBytes {
  const uint8_t* first;
  int64_t left;

  CGX_D uint32_t operator[](int64_t at) const { return at < left ? first[at] : 0; }
  template <class T>
  CGX_D T number(int64_t at, int64_t bytes = sizeof(T)) const {
    T value = 0;
    for (int64_t b = 0; b < bytes; ++b) value = static_cast<T>(value | static_cast<T>((*this)[at + b]) << 8 * b);
    return value;
  }
};

// Marks the indices of a list, and returns whether there are k ascending ones below n.
CGX_D bool mark_indices(const PatchIndices& list, const BlockBytes& in, Marks& row, Marks& changed) {
  const auto n = static_cast<int32_t>(list.n), k = static_cast<int32_t>(list.k);
  const uint32_t rows = mark_rows(n);
  Marks& found = list.split ? row : changed;  // the first row
  const auto bits = static_cast<int32_t>(list.row == 0 && k == n ? n : list.row);
  each_index(n, [&](int32_t i, uint32_t r) {
    put_ballot(found.bits + r, i < bits && (list.row == 0 || (in[i / 8] >> i % 8 & 1) != 0));
  });
  const bool as_many = static_cast<int32_t>(found.scan(rows)) == k;
  if (!list.split || !as_many) return as_many;
  changed.clear(rows);
  const auto index_of = [&](int32_t one) {
    const int32_t j = row.rank(one);
    const int64_t at = int64_t{j} * list.low;
    const uint32_t low = in.number<uint32_t>(row_bytes(list.row) + at / 8, 3) >> at % 8;
    return (one - j) << list.low | static_cast<int32_t>(low & ((1u << list.low) - 1));
  };
  each_index(n, [&](int32_t one, uint32_t) {
    if (row.has(one) && index_of(one) < n) changed.set(index_of(one));
  });
  if (static_cast<int32_t>(changed.scan(rows)) != k) return false;
  bool ascends = true;  // then each index has as many before it as in the list
  each_index(n, [&](int32_t one, uint32_t) {
    if (row.has(one)) ascends = ascends && changed.rank(index_of(one)) == row.rank(one);
  });
  uint32_t others;
  count_before<kPatchThreads>(!ascends, &others);
  return others == 0;
}

template <class T>
__global__ void __launch_bounds__(kPatchThreads) apply_patch_kernel(PatchApply a) {
  constexpr int64_t kWidth = sizeof(T);
  __shared__ Marks row, changed, small, raw;
  const int64_t first = int64_t{blockIdx.x} * kPatchBlock, begin = a.begins[blockIdx.x];
  const int32_t n = words_from(first, a.words);
  const uint32_t rows = mark_rows(n);
  const T* old = static_cast<const T*>(a.old) + first;
  T* now = static_cast<T*>(a.now) + first;
  const PatchHead head = a.heads[blockIdx.x];
  const bool inside = begin >= 0 && begin <= a.bytes;
  const BlockBytes in{a.blocks + (inside ? begin : 0), inside ? a.bytes - begin : 0};
  if (head.changed == kPatchWhole) {
    if (threadIdx.x == 0) a.fits[blockIdx.x] = head.small == 0 && head.raw == 0;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < n; i += kPatchThreads) now[i] = in.number<T>(i * kWidth);
    return;
  }
  const PatchIndices list(n, head.changed < n ? head.changed : n);
  const int64_t codes = list.bytes(), small_at = codes + row_bytes(2 * list.k),
                raw_at = small_at + head.small * small_bytes(kWidth);
  bool good = head.changed <= n && mark_indices(list, in, row, changed);
  const auto code_of = [&](int32_t i) {
    const int64_t j = changed.rank(i);
    return in[codes + j / 4] >> j % 4 * 2 & 3;
  };
  if (good) {
    each_index(n, [&](int32_t i, uint32_t r) {
      const uint32_t code = changed.has(i) ? code_of(i) : 0;
      put_ballot(small.bits + r, code == 2);
      put_ballot(raw.bits + r, code == 3);
    });
    const uint32_t smalls = small.scan(rows), raws = raw.scan(rows);
    good = smalls == head.small && raws == head.raw;
  }
  if (threadIdx.x == 0) a.fits[blockIdx.x] = good;
  each_index(n, [&](int32_t i, uint32_t) {
    if (i >= n) return;
    T word = old[i];
    if (good && raw.has(i)) {
      word = in.number<T>(raw_at + raw.rank(i) * kWidth);
    } else if (good && changed.has(i)) {
      T number = static_cast<T>(code_of(i) + 1);
      if (small.has(i))
        number =
            static_cast<T>(number + in.number<T>(small_at + small.rank(i) * small_bytes(kWidth), small_bytes(kWidth)));
      word = static_cast<T>(word + patch_step(number));
    }
    now[i] = word;
  });
}

// Calls f(a word of this width).
template <class F>
Status with_word(int64_t width, F f) {
  return width == 1 ? f(uint8_t{}) : width == 2 ? f(uint16_t{}) : width == 4 ? f(uint32_t{}) : f(uint64_t{});
}

}  // namespace

Status encode_patch(const PatchEncode& a, cudaStream_t stream) {
  const auto config = config_of(div_up(a.words, kPatchBlock), kPatchThreads, stream);
  return with_word(a.width, [&](auto word) {
    return launch(config, encode_patch_kernel<decltype(word)>, "patch encode kernel", a);
  });
}

Status apply_patch(const PatchApply& a, cudaStream_t stream) {
  const auto config = config_of(div_up(a.words, kPatchBlock), kPatchThreads, stream);
  return with_word(
      a.width, [&](auto word) { return launch(config, apply_patch_kernel<decltype(word)>, "patch apply kernel", a); });
}

}  // namespace jaxcgx::cuda
