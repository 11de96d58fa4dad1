#include "cpu/encode.h"
#include "cpu/pages.h"
#include "cpu/topk.h"

namespace jaxcgx::cpu {

void reduce(const Reduce& a, const Pool& pool) {
  const Layout& l = a.layout;
  if (is_sparse(l.codec.kind)) return reduce_topk(a, pool);
  const Kernels& k = kernels();
  const DecodeFn decode_codes = k.decoder(l.codec);
  const int meta_count = meta_floats(l.codec.kind);

  const auto residual_at = [&](const Span& s, int64_t at) {
    const auto i = static_cast<size_t>(s.piece->leaf);
    return a.residuals[i] + s.row * l.leaves[i].size + at;
  };
  // Sums the bases of all ranks, then unit * value of one rank after another: the order is part of the wire. `last` is
  // how `out` is written last. If there is a divisor, `undivided` gets the sum before the division.
  const auto sum_to = [&](const Span& s, int64_t at, int64_t n, float* out, float* undivided, Write last) {
    const auto i = static_cast<size_t>(s.piece->leaf);
    const uint8_t* payloads = a.payloads + s.row * a.ranks * l.chunk_bytes;
    const int64_t own = a.own != nullptr ? a.where[2 * s.row + 1] : -1;
    float* const result = out;
    if (a.divisor != 1.0f) out = undivided;
    const auto add_own = [&](bool first) {
      const DType dtype = l.leaves[i].dtype;
      const void* x = at_element(a.own[i], dtype, s.row * l.leaves[i].size + at);
      alignas(64) float buffer[kTile];
      float* to = first ? out : buffer;
      k.load(dtype, x, n, to);
      if (!first) k.add(out, buffer, n, out);
    };
    if (s.bucket > 0) {
      const int64_t rel = at - s.piece->start, index = rel / s.bucket, offset = rel % s.bucket;
      const int64_t meta_offset = meta_at(l, *s.piece, index), codes_offset = codes_at(l, *s.piece, index, offset);
      const auto meta = [&](int64_t rank, int which) {
        float value;
        std::memcpy(&value, payloads + rank * l.chunk_bytes + meta_offset + 4 * which, 4);
        return value;
      };
      float base = 0.0f;
      if (meta_count == 2) {
        for (int64_t r = 0; r < a.ranks; ++r) {
          if (r != own) base = base + meta(r, 1);
        }
      }
      const bool once = out == result && a.own == nullptr && a.ranks <= Terms::kMost;
      Write write = once ? last : Write::kOver;
      Terms terms;
      const auto flush = [&] {
        decode_codes(terms, n, base, out, write);
        terms.ranks = 0;
        write = Write::kOnto;
      };
      for (int64_t r = 0; r < a.ranks; ++r) {
        if (r != own) terms.add(payloads + r * l.chunk_bytes + codes_offset, meta(r, 0));
        if (r == own || terms.ranks == Terms::kMost || r + 1 == a.ranks) flush();
        if (r == own) add_own(false);
      }
    } else {
      const int64_t offset = plain_at(l, s, at - s.piece->start);
      const DType dtype = plain_dtype(l, s);
      for (int64_t r = 0; r < a.ranks; ++r) {
        if (r == own) {
          add_own(r == 0);
        } else {
          alignas(64) float buffer[kTile];
          k.load(dtype, payloads + r * l.chunk_bytes + offset, n, r == 0 ? out : buffer);
          if (r > 0) k.add(out, buffer, n, out);
        }
      }
    }
    if (a.residuals != nullptr) k.add(out, residual_at(s, at), n, out);
    if (a.divisor != 1.0f) k.divide(undivided, n, a.divisor, result, last);
  };

  const Spans spans(l, a.batch, [&](int64_t row) { return int64_t{a.where[2 * row]}; }, 1);
  if (a.payload != nullptr) {
    for (int64_t row = 0; row < a.batch; ++row) clear_gaps(l, a.where[2 * row], a.payload + row * l.chunk_bytes);
    const auto sum = [&](const Span& s, int64_t at, int64_t n, float* buffer) -> const float* {
      sum_to(s, at, n, buffer, buffer + kTile, Write::kOver);
      return buffer;
    };
    const auto keep = [&](const Span& s, int64_t at, int64_t n, const float* x, const float* decoded) {
      float* residual = residual_at(s, at);
      if (a.divisor == 1.0f) return k.residual(x, decoded, residual, n, residual);
      alignas(64) float multiplied[kTile];  // the undivided sum follows x
      k.scale(decoded, n, a.divisor, multiplied);
      k.residual(x + kTile, multiplied, residual, n, residual);
    };
    Encoder(Target{l, a.payload, l.chunk_bytes, true, a.leaf_ids, a.keys}, sum, keep, a.residuals != nullptr)
        .run(spans, pool);
    return;
  }
  const Write write = write_of_leaves(l, a.batch);
  for (size_t i = 0; i < l.leaves.size(); ++i) {
    if (l.leaves[i].size > 0) ask_for_large_pages(a.leaves[i], a.batch * l.leaves[i].size * int64_t{sizeof(float)});
  }
  spans.each(pool, [&](const Span& s) {
    const auto i = static_cast<size_t>(s.piece->leaf);
    each_bucket(s, kTile, [&](int64_t, int64_t, int64_t at, int64_t n) {
      alignas(64) float undivided[kTile];
      sum_to(s, at, n, a.leaves[i] + s.row * l.leaves[i].size + at, undivided, write);
    });
  });
}

}  // namespace jaxcgx::cpu
