#include "cpu/topk.h"

#include <memory>
#include <numeric>

#include "cpu/encode.h"
#include "cpu/pages.h"

namespace jaxcgx::cpu {
namespace {

uint32_t word_at(const uint8_t* p, int64_t i) {
  uint32_t word;
  std::memcpy(&word, p + 4 * i, 4);
  return word;
}

void put_indices(const IndexList& l, const int32_t* index, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(l.bytes));
  if (l.is_implied()) return;
  const auto set = [&](int64_t bit) { out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1 << bit % 8); };
  if (!l.split) {
    for (int64_t j = 0; j < l.k && index[j] < l.n; ++j) set(index[j]);
    return;
  }
  for (int64_t j = 0; j < l.k; ++j) set(l.one_of(j, index[j]));
  for (int i = 0; i < l.low / 8; ++i) {
    for (int64_t j = 0; j < l.k; ++j) out[l.byte_at(i, j)] = static_cast<uint8_t>(index[j] >> 8 * i);
  }
  if (l.packed_bits() == 0) return;
  std::vector<int32_t> codes(static_cast<size_t>(l.k));
  for (int64_t j = 0; j < l.k; ++j) codes[static_cast<size_t>(j)] = l.packed_of(index[j]);
  kernels().pack(codes.data(), l.k, l.packed_bits(), out + l.packed_at());
}

// A decoded list: ascending indices, and the place of each in the list. Missing indices are left out.
struct Listed {
  std::vector<int32_t> index, place;
};

Listed read_indices(const IndexList& l, const uint8_t* in) {
  Listed out;
  const auto k = static_cast<size_t>(l.k);
  out.index.resize(k);
  out.place.resize(k);
  std::iota(out.place.begin(), out.place.end(), 0);
  if (l.is_implied()) {
    std::iota(out.index.begin(), out.index.end(), 0);
    return out;
  }
  std::vector<int32_t> low(l.split ? k : 0);
  if (l.split && l.packed_bits() > 0) kernels().unpack(in + l.packed_at(), l.k, l.packed_bits(), low.data());
  int64_t place = 0, last = -1;
  size_t found = 0;
  for (int64_t w = 0; w < div_up(l.bits, 32) && place < l.k; ++w) {
    for (uint32_t word = word_at(in, w); word != 0 && place < l.k; word &= word - 1) {
      const int64_t bit = 32 * w + __builtin_ctz(word);
      if (bit >= l.bits) break;
      int64_t index = bit;
      if (l.split) {
        const int64_t high = bit - place;
        if (high > l.n >> l.low) break;  // this index and all following ones count as missing
        index = high << l.low | int64_t{low[static_cast<size_t>(place)]} << l.low / 8 * 8;
        for (int i = 0; i < l.low / 8; ++i) index |= int64_t{in[l.byte_at(i, place)]} << 8 * i;
      }
      if (index > last) {
        last = index;
        if (index >= l.n) break;
        out.index[found] = static_cast<int32_t>(index);
        out.place[found++] = static_cast<int32_t>(place);
      }
      ++place;
    }
  }
  out.index.resize(found);
  out.place.resize(found);
  return out;
}

// Decodes the elements of a piece.
Elements read(const Codec& c, int64_t n, const uint8_t* bytes, const Pool& pool) {
  const IndexList list(n, capacity(c.sparse, n));
  Listed listed = read_indices(list, bytes);
  const Layout layout = values_layout(c, n);
  std::vector<float> values(static_cast<size_t>(list.k));
  void* leaf = values.data();
  decode({layout, 1, bytes + values_at(c, n), &leaf}, pool);
  for (size_t i = 0; i < listed.place.size(); ++i) values[i] = values[static_cast<size_t>(listed.place[i])];
  values.resize(listed.place.size());
  return {std::move(listed.index), std::move(values)};
}

// Calls f(piece, row) for the pieces of `chunks` chunks from first_chunk(row) on. Small pieces share a task.
template <class FirstChunk, class Fn>
void each_piece(const Layout& l, int64_t batch, FirstChunk first_chunk, int64_t chunks, const Pool& pool, Fn f) {
  struct Task {
    const Piece* piece;
    int64_t row;
  };
  std::vector<Task> pieces;
  std::vector<size_t> tasks;
  int64_t elements = kTask;
  for (int64_t row = 0; row < batch; ++row) {
    for (const Piece& p : l.pieces_of(first_chunk(row), chunks)) {
      if (elements >= kTask) tasks.push_back(pieces.size()), elements = 0;
      elements += p.coded;
      pieces.push_back({&p, row});
    }
  }
  tasks.push_back(pieces.size());
  parallel_for(pool, static_cast<int64_t>(tasks.size()) - 1, [&](int64_t t) {
    for (size_t i = tasks[static_cast<size_t>(t)]; i < tasks[static_cast<size_t>(t) + 1]; ++i)
      f(*pieces[i].piece, pieces[i].row);
  });
}
// Calls f(piece, row) for all pieces.
template <class Fn>
void each_piece(const Layout& l, int64_t batch, const Pool& pool, Fn f) {
  each_piece(l, batch, [](int64_t) { return 0; }, l.chunks(), pool, f);
}

// Calls f(first, count) for each stretch of n elements.
template <class Fn>
void each_stretch(int64_t n, const Pool& pool, Fn f) {
  constexpr int64_t kEach = 4 * kStretch;
  parallel_for(pool, div_up(n, kEach), [&](int64_t task) {
    for (int64_t at = task * kEach; at < std::min(n, (task + 1) * kEach); at += kStretch)
      f(at, std::min(kStretch, n - at));
  });
}
// Calls f(index, place in e) for the elements of e with indices first .. first + n - 1.
template <class Fn>
void each_within(const Elements& e, int64_t first, int64_t n, Fn f) {
  const auto from = [&](int64_t index) {
    return static_cast<size_t>(std::lower_bound(e.index.begin(), e.index.end(), index) - e.index.begin());
  };
  for (size_t i = from(first), end = from(first + n); i < end; ++i) f(e.index[i], i);
}

// The destination of an encoded piece, and the source of its noise.
struct Piecewise {
  const Layout& layout;
  uint8_t* chunk;
  const int64_t* leaf_ids;
  const uint32_t* key;  // the key of the piece's row; may be null
};

const uint32_t* key_of(const uint32_t* keys, int64_t row) { return keys == nullptr ? nullptr : keys + kKeyWords * row; }

// Writes the list of indices and the values of a piece, and extends `sent` to the length of the list. If `keeps`, calls
// keep(first, n, decoded), where `decoded` has the decoded numbers of the n values from `first` on.
template <class Keep>
void put(const Piecewise& to, const Piece& p, Elements& sent, const Pool& pool, bool keeps, Keep keep) {
  const Codec& c = to.layout.codec;
  const IndexList list(p.coded, capacity(c.sparse, p.coded));
  uint8_t* out = to.chunk + p.codes;
  const auto count = static_cast<int64_t>(sent.index.size());
  for (float& x : sent.values) x = sent_as(x);
  sent.index.resize(static_cast<size_t>(list.k), static_cast<int32_t>(p.coded));
  sent.values.resize(static_cast<size_t>(list.k));
  put_indices(list, sent.index.data(), out);
  const int64_t at = values_at(c, p.coded);
  std::memset(out + list.bytes, 0, static_cast<size_t>(at - list.bytes));

  const Layout layout = values_layout(c, p.coded);
  const auto fetch = [&](const Span&, int64_t first, int64_t, float*) -> const float* {
    return sent.values.data() + first;
  };
  const auto told = [&](const Span&, int64_t first, int64_t n, const float*, const float* decoded) {
    keep(first, std::min(n, count - first), decoded);
  };
  const Target target{layout, out + at, layout.chunk_bytes, false, to.leaf_ids + p.leaf, to.key, p.start};
  clear_gaps(layout, 0, out + at);
  Encoder(target, fetch, told, keeps).run(Spans(layout, 1, [](int64_t) { return int64_t{0}; }, 1), pool);
}

// Selects the elements of a piece that are sent.
Elements choose(const Piecewise& to, const Piece& p, const Numbers& numbers, float* new_residual, const Pool& pool) {
  const Sparse& s = to.layout.codec.sparse;
  int32_t random = 0;
  if (s.select != Select::kExact) {
    uint16_t noise[kBlock];
    const int64_t last = p.start + p.coded - 1;
    kernels().noise(to.key, static_cast<uint32_t>(to.leaf_ids[p.leaf]), last / kBlock * kBlock, 1, noise);
    random = noise[last % kBlock];
  }
  return select(numbers, capacity(s, p.coded), s, random, new_residual, pool);
}

// Updates the residuals of n sent elements from sent.index[first] on. x: the elements' numbers before encoding.
void update_sent(const Elements& sent, int64_t first, int64_t n, const float* x, const float* decoded,
                 float* residual) {
  float old[kTile];
  const int32_t* index = sent.index.data() + first;
  for (int64_t i = 0; i < n; ++i) old[i] = residual[index[i]];
  kernels().residual(x, decoded, old, n, old);
  for (int64_t i = 0; i < n; ++i) residual[index[i]] = old[i];
}

// Writes the sum of a piece over the payloads of all ranks to `out`. The own leaf, if there is one, replaces a payload.
// The residual, if there is one, is added. The sum is divided by `divisor`.
void sum_to(const Reduce& a, const Piece& p, int64_t row, float divisor, float* out, const Pool& pool) {
  const Layout& l = a.layout;
  const Kernels& k = kernels();
  const auto leaf = static_cast<size_t>(p.leaf);
  const int64_t own = a.own != nullptr ? a.where[2 * row + 1] : -1, at_leaf = row * l.leaves[leaf].size + p.start;
  std::vector<Elements> lists(static_cast<size_t>(a.ranks));
  parallel_for(pool, a.ranks, [&](int64_t r) {
    if (r != own)
      lists[static_cast<size_t>(r)] =
          read(l.codec, p.coded, a.payloads + (row * a.ranks + r) * l.chunk_bytes + p.codes, pool);
  });
  each_stretch(p.coded, pool, [&](int64_t at, int64_t n) {
    float* sum = out + at;
    std::memset(sum, 0, static_cast<size_t>(n) * sizeof(float));
    for (int64_t r = 0; r < a.ranks; ++r) {
      if (r == own) {
        const DType dtype = l.leaves[leaf].dtype;
        alignas(64) float buffer[kStretch];
        k.load(dtype, at_element(a.own[leaf], dtype, at_leaf + at), n, buffer);
        k.add(sum, buffer, n, sum);
        continue;
      }
      const Elements& e = lists[static_cast<size_t>(r)];
      each_within(e, at, n, [&](int32_t index, size_t i) { out[index] = out[index] + e.values[i]; });
    }
    if (a.residuals != nullptr) k.add(sum, a.residuals[leaf] + at_leaf + at, n, sum);
    if (divisor != 1.0f) k.divide(sum, n, divisor, sum, Write::kOver);
  });
}

}  // namespace

void encode_topk(const Encode& a, const Pool& pool) {
  const Layout& l = a.layout;
  each_piece(l, a.batch, pool, [&](const Piece& p, int64_t row) {
    const auto i = static_cast<size_t>(p.leaf);
    const int64_t first = row * l.leaves[i].size + p.start;
    const bool feedback = a.residuals != nullptr;
    const Numbers numbers{p.coded, l.leaves[i].dtype, at_element(a.leaves[i], l.leaves[i].dtype, first),
                          feedback ? a.residuals[i] + first : nullptr, 1.0f};
    float* residual = feedback ? a.new_residuals[i] + first : nullptr;
    const Piecewise to{l, a.payload + l.chunk_at(row, p.chunk), a.leaf_ids, key_of(a.keys, row)};
    Elements sent = choose(to, p, numbers, residual, pool);
    put(to, p, sent, pool, feedback, [&](int64_t at, int64_t n, const float* decoded) {
      update_sent(sent, at, n, sent.values.data() + at, decoded, residual);
    });
  });
  for (int64_t row = 0; row < a.batch; ++row) {
    for (int64_t c = 0; c < l.chunks(); ++c) clear_gaps(l, c, a.payload + l.chunk_at(row, c));
  }
}

void decode_topk(const Decode& a, const Pool& pool) {
  const Layout& l = a.layout;
  for (size_t i = 0; i < l.leaves.size(); ++i)
    ask_for_large_pages(a.leaves[i], a.batch * l.leaves[i].size * size_of(l.leaves[i].dtype));
  each_piece(l, a.batch, pool, [&](const Piece& p, int64_t row) {
    const auto i = static_cast<size_t>(p.leaf);
    const DType dtype = l.leaves[i].dtype;
    Elements e = read(l.codec, p.coded, a.payload + l.chunk_at(row, p.chunk) + p.codes, pool);
    std::vector<uint16_t> halves(dtype == DType::kF32 ? 0 : e.values.size());
    if (dtype != DType::kF32)
      kernels().store(dtype, e.values.data(), static_cast<int64_t>(e.values.size()), halves.data());
    void* leaf = at_element(a.leaves[i], dtype, row * l.leaves[i].size + p.start);
    each_stretch(p.coded, pool, [&](int64_t at, int64_t n) {
      std::memset(at_element(leaf, dtype, at), 0, static_cast<size_t>(n * size_of(dtype)));
      each_within(e, at, n, [&](int32_t index, size_t j) {
        if (dtype == DType::kF32)
          static_cast<float*>(leaf)[index] = e.values[j];
        else
          static_cast<uint16_t*>(leaf)[index] = halves[j];
      });
    });
  });
}

void reduce_topk(const Reduce& a, const Pool& pool) {
  const Layout& l = a.layout;
  const auto first_chunk = [&](int64_t row) { return int64_t{a.where[2 * row]}; };
  const Kernels& k = kernels();
  if (a.payload == nullptr) {
    for (size_t i = 0; i < l.leaves.size(); ++i) {
      if (l.leaves[i].size > 0) ask_for_large_pages(a.leaves[i], a.batch * l.leaves[i].size * int64_t{sizeof(float)});
    }
    return each_piece(l, a.batch, first_chunk, 1, pool, [&](const Piece& p, int64_t row) {
      float* out = a.leaves[p.leaf] + row * l.leaves[static_cast<size_t>(p.leaf)].size + p.start;
      sum_to(a, p, row, a.divisor, out, pool);
    });
  }
  const Layout sum = of_sum(l, a.ranks);
  // The pieces of both layouts have the same elements, in the same order.
  each_piece(sum, a.batch, first_chunk, 1, pool, [&](const Piece& p, int64_t row) {
    const std::unique_ptr<float[]> total(new float[static_cast<size_t>(p.coded)]);
    ask_for_large_pages(total.get(), p.coded * int64_t{sizeof(float)});
    sum_to(a, l.pieces[static_cast<size_t>(&p - sum.pieces.data())], row, 1.0f, total.get(), pool);
    const Piecewise to{sum, a.payload + row * sum.chunk_bytes, a.leaf_ids, key_of(a.keys, row)};
    Elements sent = choose(to, p, {p.coded, DType::kF32, total.get(), nullptr, a.divisor}, nullptr, pool);
    float* residual = nullptr;
    if (a.residuals != nullptr) {
      residual = a.residuals[p.leaf] + row * l.leaves[static_cast<size_t>(p.leaf)].size + p.start;
      each_stretch(p.coded, pool, [&](int64_t at, int64_t n) {
        update_unsent(total.get() + at, residual + at, at, n, sent, residual + at);
      });
    }
    put(to, p, sent, pool, residual != nullptr, [&](int64_t at, int64_t n, const float* decoded) {
      alignas(64) float x[kTile], multiplied[kTile];
      for (int64_t i = 0; i < n; ++i) x[i] = total[static_cast<size_t>(sent.index[static_cast<size_t>(at + i)])];
      k.scale(decoded, n, a.divisor, multiplied);
      update_sent(sent, at, n, x, multiplied, residual);
    });
  });
  for (int64_t row = 0; row < a.batch; ++row) clear_gaps(sum, first_chunk(row), a.payload + row * sum.chunk_bytes);
}

void clear(const Clear& a, const Pool& pool) {
  const Layout& l = a.layout;
  each_piece(l, a.batch, pool, [&](const Piece& p, int64_t row) {
    const auto i = static_cast<size_t>(p.leaf);
    const DType dtype = l.leaves[i].dtype;
    void* array = at_element(a.arrays[i], dtype, row * l.leaves[i].size + p.start);
    const IndexList list(p.coded, capacity(l.codec.sparse, p.coded));
    for (const int32_t index : read_indices(list, a.payload + l.chunk_at(row, p.chunk) + p.codes).index) {
      if (dtype == DType::kF32)
        static_cast<float*>(array)[index] = 0.0f;
      else
        static_cast<uint16_t*>(array)[index] = 0;
    }
  });
}

}  // namespace jaxcgx::cpu
