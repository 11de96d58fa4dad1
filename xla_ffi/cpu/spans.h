// Cuts a message into spans: stretches of a piece that one thread processes at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace jaxcgx::cpu {

constexpr int64_t kSpan = kSumGroup;             // the most elements of a span
constexpr int64_t kTile = 2048;                  // elements that fit in the L1 cache while they are processed
constexpr int64_t kMostTogether = kMostRotated;  // the most elements fetched at a time: a rotated bucket
constexpr int64_t kTask = 32768;                 // the fewest elements of a task, except of the last one
static_assert(kTile % kLosslessGroup == 0 && kSpan % kLosslessGroup == 0, "a group is packed in one call");

// Returns how to write float32 leaves. Large leaves would not stay in the caches, so they are written with non-temporal
// stores.
inline Write write_of_leaves(const Layout& layout, int64_t batch) {
  constexpr int64_t kStreamElements = int64_t{2} << 20;
  int64_t elements = 0;
  for (const Leaf& leaf : layout.leaves) elements += batch * leaf.size;
  return elements >= kStreamElements ? Write::kAround : Write::kOver;
}

struct Span {
  const Piece* piece;
  int64_t row;           // index in the batch
  int64_t begin, count;  // elements, counted from the first one of the piece: whole buckets, or a part of one
  int64_t bucket;        // elements of a bucket; 0: no buckets (Raw, Cast, Lossless, a raw tail)
  bool raw;              // the raw tail of a leaf, or the Raw codec
  int64_t part_of;       // index in Spans::big of the bucket that this span is a part of; -1: none
};

// A bucket larger than a span. Threads share the work on it: first its statistics, then its codes.
struct BigBucket {
  int64_t first, last;  // its spans are first .. last - 1
};

struct Spans {
  std::vector<Span> spans;
  std::vector<BigBucket> big;
  std::vector<int64_t> tasks;  // task t has the spans tasks[t] .. tasks[t + 1] - 1

  Spans(const Layout& layout, int64_t batch, const std::function<int64_t(int64_t)>& first_chunk, int64_t chunks) {
    for (int64_t row = 0; row < batch; ++row) {
      for (const Piece& p : layout.pieces_of(first_chunk(row), chunks)) add(layout, p, row);
    }
    int64_t elements = kTask;
    for (size_t i = 0; i < spans.size(); ++i) {
      if (elements >= kTask) tasks.push_back(static_cast<int64_t>(i)), elements = 0;
      elements += spans[i].count;
    }
    tasks.push_back(static_cast<int64_t>(spans.size()));
  }

  // Calls f for each span, in parallel.
  void each(const Pool& pool, const std::function<void(const Span&)>& f) const {
    parallel_for(pool, static_cast<int64_t>(tasks.size()) - 1, [&](int64_t t) {
      for (int64_t i = tasks[static_cast<size_t>(t)]; i < tasks[static_cast<size_t>(t) + 1]; ++i)
        f(spans[static_cast<size_t>(i)]);
    });
  }

 private:
  void add(const Layout& layout, const Piece& p, int64_t row) {
    const bool raw = is_raw(layout.codec.kind);
    if (p.bucket > kSpan) {
      for (int64_t b = 0; b < p.coded; b += p.bucket) {
        const int64_t n = std::min(p.bucket, p.coded - b), first = static_cast<int64_t>(spans.size());
        const int64_t id = n > kSpan ? static_cast<int64_t>(big.size()) : -1;
        for (int64_t at = 0; at < n; at += kSpan)
          spans.push_back({&p, row, b + at, std::min(kSpan, n - at), p.bucket, raw, id});
        if (id >= 0) big.push_back({first, static_cast<int64_t>(spans.size())});
      }
    } else {
      const int64_t step = p.bucket > 0 ? kSpan / p.bucket * p.bucket : kSpan;
      for (int64_t at = 0; at < p.coded; at += step)
        spans.push_back({&p, row, at, std::min(step, p.coded - at), p.bucket, raw, -1});
    }
    if (p.raw > 0) spans.push_back({&p, row, p.coded, p.raw, 0, true, -1});
  }
};

// Calls f(bucket's index in the piece, offset in the bucket, element in the leaf, count) for each stretch of a span. A
// stretch is in one bucket and has at most `most` elements. Offsets are multiples of `most`.
template <class Fn>
void each_bucket(const Span& s, int64_t most, Fn f) {
  const int64_t bucket = s.bucket > 0 ? s.bucket : s.count + s.begin;
  for (int64_t at = s.begin; at < s.begin + s.count;) {
    const int64_t index = at / bucket, offset = at % bucket;
    const int64_t n = std::min({most, bucket - offset, s.begin + s.count - at});
    f(index, offset, s.piece->start + at, n);
    at += n;
  }
}

// Return the offset in the chunk of a bucket's codes, from element `offset` of the bucket on, and of its metadata.
inline int64_t codes_at(const Layout& l, const Piece& p, int64_t bucket_index, int64_t offset) {
  return p.codes + bucket_index * bucket_bytes(l.codec, p.bucket) + bucket_bytes(l.codec, offset);
}
inline int64_t meta_at(const Layout& l, const Piece& p, int64_t bucket_index) {
  return p.meta + bucket_index * 4 * meta_floats(l.codec);
}
// Returns the offset in the chunk of an element without buckets. `at` counts from the first element of the piece.
inline int64_t plain_at(const Layout& l, const Span& s, int64_t at) {
  const DType dtype = l.leaves[static_cast<size_t>(s.piece->leaf)].dtype;
  if (s.raw)
    return at < s.piece->coded ? s.piece->codes + at * size_of(dtype)
                               : s.piece->tail + (at - s.piece->coded) * size_of(dtype);
  return s.piece->codes + at * 2;
}
// Returns the dtype on the wire of elements without buckets.
inline DType plain_dtype(const Layout& l, const Span& s) {
  const bool stays = s.raw || is_lossless(l.codec.kind);
  return stays ? l.leaves[static_cast<size_t>(s.piece->leaf)].dtype : static_cast<DType>(l.codec.bits);
}

template <class T>
T* at_element(T* base, DType dtype, int64_t element) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<Byte*>(base) + element * size_of(dtype);
}

}  // namespace jaxcgx::cpu
