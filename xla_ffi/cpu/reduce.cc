#include "cpu/encode.h"
#include "cpu/pages.h"
#include "cpu/topk.h"

namespace jaxcgx::cpu {
namespace {

// The n elements of a span from element `at` of the leaf on.
struct Stretch {
  const Span& span;
  int64_t at, n;
};

// Sums messages of all codecs except TopK, one stretch at a time.
class Reducer {
 public:
  explicit Reducer(const Reduce& a)
      : a_(a),
        l_(a.layout),
        k_(kernels()),
        decode_codes_(k_.decoder(l_.codec)),
        meta_count_(meta_floats(l_.codec)),
        spans_(l_, a.batch, [&](int64_t row) { return int64_t{a.where[2 * row]}; }, 1) {
    for (int64_t r = 0; r < a.ranks && is_lossless(l_.codec.kind); ++r)
      overflow_.push_back(overflows(l_, spans_, [&](const Span& s) { return payloads(s) + r * l_.chunk_bytes; }));
  }

  void to_payload(const Pool& pool) const {
    for (int64_t row = 0; row < a_.batch; ++row) clear_gaps(l_, a_.where[2 * row], a_.payload + row * l_.chunk_bytes);
    const auto sum_in = [&](const Span& s, int64_t at, int64_t n, float* buffer) -> const float* {
      sum({s, at, n}, buffer, buffer + kMostTogether, Write::kOver);
      return buffer;
    };
    const auto keep = [&](const Span& s, int64_t at, int64_t n, const float* x, const float* decoded) {
      keep_lost({s, at, n}, x, decoded);
    };
    Encoder(Target{l_, a_.payload, l_.chunk_bytes, true, a_.leaf_ids, a_.keys}, sum_in, keep, a_.residuals != nullptr)
        .run(spans_, pool);
    if (overflow_.empty()) return;
    close_up(l_, a_.batch, [&](int64_t row) { return a_.where[2 * row]; }, a_.payload, pool);
  }

  void to_leaves(const Pool& pool) const {
    const Write write = write_of_leaves(l_, a_.batch);
    for (size_t i = 0; i < l_.leaves.size() && l_.chunks() == 1; ++i) {  // for one of several chunks, the caller asks
      const int64_t size = l_.leaves[i].size;
      if (size > 0) ask_for_large_pages(a_.leaves[i], a_.batch * size * int64_t{sizeof(float)});
    }
    spans_.each(pool, [&](const Span& s) {
      each_bucket(s, is_rotated(l_.codec) && !s.raw ? kMostTogether : kTile,
                  [&](int64_t, int64_t, int64_t at, int64_t n) {
                    alignas(64) float undivided[kMostTogether];
                    sum({s, at, n}, in_leaf(a_.leaves, {s, at, n}), undivided, write);
                  });
    });
  }

 private:
  // Writes the divided sum of a stretch to `out`. `last`: how the last write to `out` is done. If the divisor is not 1,
  // `undivided` gets the sum before the division.
  void sum(const Stretch& x, float* out, float* undivided, Write last) const {
    const bool divides = a_.divisor != 1.0f;
    float* const to = divides ? undivided : out;
    if (x.span.bucket > 0)
      sum_bucket(x, to, divides ? Write::kOver : last);
    else
      sum_plain(x, to);
    if (a_.residuals != nullptr) k_.add(to, in_leaf(a_.residuals, x), x.n, to);
    if (divides) k_.divide(to, x.n, a_.divisor, out, last);
  }

  // Sums the bases of all ranks, then adds unit * value of one rank after another. This order is part of the wire
  // format.
  void sum_bucket(const Stretch& x, float* out, Write last) const {
    const Span& s = x.span;
    const int64_t rel = x.at - s.piece->start, index = rel / s.bucket, offset = rel % s.bucket, own = own_rank(s);
    const uint8_t* const meta = payloads(s) + meta_at(l_, *s.piece, index);
    const uint8_t* const codes = payloads(s) + codes_at(l_, *s.piece, index, offset);
    if (is_rotated(l_.codec)) return sum_rotated(x, meta, codes, out);
    const float base = meta_count_ == 2 ? sum_of_bases(meta, own) : 0.0f;
    const bool once = a_.own == nullptr && a_.ranks <= Terms::kMost;
    Write write = once ? last : Write::kOver;
    Terms terms;
    for (int64_t r = 0; r < a_.ranks; ++r) {
      if (r != own) terms.add(codes + r * l_.chunk_bytes, meta_count_ == 0 ? 1.0f : meta_of(meta, r, 0));
      if (r == own || terms.ranks == Terms::kMost || r + 1 == a_.ranks) {
        decode_codes_(terms, x.n, base, out, write);
        terms.ranks = 0;
        write = Write::kOnto;
      }
      if (r == own) put(own_elements(x), leaf_of(s).dtype, x.n, false, out);
    }
  }

  // Rotates the bucket of one rank after another back, and adds it.
  void sum_rotated(const Stretch& x, const uint8_t* meta, const uint8_t* codes, float* out) const {
    std::fill(out, out + x.n, 0.0f);
    for (int64_t r = 0, own = own_rank(x.span); r < a_.ranks; ++r) {
      if (r == own) {
        put(own_elements(x), leaf_of(x.span).dtype, x.n, false, out);
      } else {
        const float sent[2] = {meta_of(meta, r, 0), meta_count_ == 2 ? meta_of(meta, r, 1) : 0.0f};
        decode_rotated(k_, l_.codec, codes + r * l_.chunk_bytes, sent, x.n, out, Write::kOnto);
      }
    }
  }

  // Adds elements without buckets, one rank after another.
  void sum_plain(const Stretch& x, float* out) const {
    const Span& s = x.span;
    const int64_t place = x.at - s.piece->start;
    for (int64_t r = 0, own = own_rank(s); r < a_.ranks; ++r) {
      const uint8_t* const chunk = payloads(s) + r * l_.chunk_bytes;
      if (r == own) {
        put(own_elements(x), leaf_of(s).dtype, x.n, r == 0, out);
      } else if (overflow_.empty()) {
        put(chunk + plain_at(l_, s, place), plain_dtype(l_, s), x.n, r == 0, out);
      } else {
        alignas(64) float unpacked[kTile];
        int64_t at = overflow_[static_cast<size_t>(r)][static_cast<size_t>(&s - spans_.spans.data())];
        at += overflow_of(l_, *s.piece, chunk, s.begin, place);
        unpack_elements(l_, *s.piece, place, x.n, chunk, &at, unpacked);
        put(unpacked, leaf_of(s).dtype, x.n, r == 0, out);
      }
    }
  }

  // Adds n elements to `out`. If `first`, copies them to `out` instead.
  void put(const void* elements, DType dtype, int64_t n, bool first, float* out) const {
    if (first) return k_.load(dtype, elements, n, out);
    alignas(64) float buffer[kMostTogether];
    k_.load(dtype, elements, n, buffer);
    k_.add(out, buffer, n, out);
  }

  // Sets the residuals to the error of encoding the sum x. If the divisor is not 1, the residuals are of the undivided
  // sum, which is kMostTogether elements after x in memory (to_payload).
  void keep_lost(const Stretch& lost, const float* x, const float* decoded) const {
    float* const residual = in_leaf(a_.residuals, lost);
    if (a_.divisor == 1.0f) return k_.residual(x, decoded, residual, lost.n, residual);
    alignas(64) float multiplied[kMostTogether];
    k_.scale(decoded, lost.n, a_.divisor, multiplied);
    k_.residual(x + kMostTogether, multiplied, residual, lost.n, residual);
  }

  // Returns metadata number `which` of a bucket in the payload of a rank. `meta`: the bucket's metadata in the payload
  // of the first rank.
  float meta_of(const uint8_t* meta, int64_t rank, int which) const {
    float value;
    std::memcpy(&value, meta + rank * l_.chunk_bytes + 4 * which, 4);
    return value;
  }
  float sum_of_bases(const uint8_t* meta, int64_t own) const {
    float sum = 0.0f;
    for (int64_t r = 0; r < a_.ranks; ++r) {
      if (r != own) sum = sum + meta_of(meta, r, 1);
    }
    return sum;
  }

  // Returns the first rank's payload.
  const uint8_t* payloads(const Span& s) const { return a_.payloads + s.row * a_.ranks * l_.chunk_bytes; }
  // Returns the rank whose payload is replaced by its raw leaves; -1: none.
  int64_t own_rank(const Span& s) const { return a_.own != nullptr ? a_.where[2 * s.row + 1] : -1; }
  const Leaf& leaf_of(const Span& s) const { return l_.leaves[static_cast<size_t>(s.piece->leaf)]; }
  int64_t element_of(const Stretch& x) const { return x.span.row * leaf_of(x.span).size + x.at; }
  float* in_leaf(float* const* leaves, const Stretch& x) const {
    return leaves[static_cast<size_t>(x.span.piece->leaf)] + element_of(x);
  }
  const void* own_elements(const Stretch& x) const {
    const void* const leaf = a_.own[static_cast<size_t>(x.span.piece->leaf)];
    return at_element(leaf, leaf_of(x.span).dtype, element_of(x));
  }

  const Reduce& a_;
  const Layout& l_;
  const Kernels& k_;
  const DecodeFn decode_codes_;
  const int meta_count_;
  const Spans spans_;
  std::vector<std::vector<int64_t>> overflow_;  // Lossless only: by rank and span, the offset of the span's overflow
};

}  // namespace

void reduce(const Reduce& a, const Pool& pool) {
  if (is_sparse(a.layout.codec.kind)) return reduce_topk(a, pool);
  const Reducer reducer(a);
  if (a.payload != nullptr)
    reducer.to_payload(pool);
  else
    reducer.to_leaves(pool);
}

}  // namespace jaxcgx::cpu
