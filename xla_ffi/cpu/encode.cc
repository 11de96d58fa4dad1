#include "cpu/encode.h"
#include "cpu/pages.h"
#include "cpu/topk.h"

namespace jaxcgx::cpu {

void encode(const Encode& a, const Pool& pool, int64_t only, const Source& source) {
  const Layout& l = a.layout;
  if (is_sparse(l.codec.kind)) return encode_topk(a, pool);
  const Kernels& k = kernels();
  const bool feedback = a.residuals != nullptr;
  const int64_t first = std::max<int64_t>(only, 0), chunks = only < 0 ? l.chunks() : 1;
  const Target target{l, a.payload, chunks * l.chunk_bytes, only >= 0, a.leaf_ids, a.keys};

  const auto place = [&](const Span& s, int64_t at) {  // an index in the leaf's buffer, which has the whole batch
    return s.row * l.leaves[static_cast<size_t>(s.piece->leaf)].size + at;
  };
  const auto fetch = [&](const Span& s, int64_t at, int64_t n, float* buffer) -> const float* {
    const auto i = static_cast<size_t>(s.piece->leaf);
    const float* x = nullptr;
    if (source) {
      x = source(i, at, n, buffer);
    } else {
      const DType dtype = l.leaves[i].dtype;
      const void* leaf = at_element(a.leaves[i], dtype, place(s, at));
      x = static_cast<const float*>(leaf);
      if (dtype != DType::kF32) {
        k.load(dtype, leaf, n, buffer);
        x = buffer;
      }
    }
    if (!feedback) return x;
    k.add(x, a.residuals[i] + place(s, at), n, buffer);
    return buffer;
  };
  const auto keep = [&](const Span& s, int64_t at, int64_t n, const float* x, const float* decoded) {
    const auto i = static_cast<size_t>(s.piece->leaf);
    k.residual(x, decoded, a.residuals[i] + place(s, at), n, a.new_residuals[i] + place(s, at));
  };

  ask_for_large_pages(a.payload, a.batch * chunks * l.chunk_bytes);
  const Spans spans(l, a.batch, [&](int64_t) { return first; }, chunks);
  for (int64_t row = 0; row < a.batch; ++row) {
    for (int64_t c = 0; c < chunks; ++c) clear_gaps(l, first + c, a.payload + (row * chunks + c) * l.chunk_bytes);
  }
  const bool lossless = is_lossless(l.codec.kind), whole = !feedback && !source;
  const bool as_is = whole && (is_raw(l.codec.kind) || lossless);
  if (!as_is) Encoder(target, fetch, keep, feedback).run(spans, pool);
  if (as_is || (l.codec.skip_incomplete && whole)) {
    // Elements that stay raw are copied bitwise, including NaNs.
    spans.each(pool, [&](const Span& s) {
      if (!s.raw && !lossless) return;
      const auto i = static_cast<size_t>(s.piece->leaf);
      const DType dtype = l.leaves[i].dtype;
      const void* const from = at_element(a.leaves[i], dtype, place(s, s.piece->start + s.begin));
      if (lossless) return pack_elements(l, *s.piece, s.begin, s.count, from, target.chunk(s));
      std::memcpy(target.chunk(s) + plain_at(l, s, s.begin), from, static_cast<size_t>(s.count * size_of(dtype)));
    });
  }
  if (!lossless) return;
  close_up(l, a.batch * chunks, [&](int64_t i) { return first + i % chunks; }, a.payload, pool);
}

}  // namespace jaxcgx::cpu
