#include "cpu/lossless.h"
#include "cpu/pages.h"
#include "cpu/rotated.h"
#include "cpu/spans.h"
#include "cpu/topk.h"

namespace jaxcgx::cpu {

void decode(const Decode& a, const Pool& pool, int64_t only) {
  const Layout& l = a.layout;
  if (is_sparse(l.codec.kind)) return decode_topk(a, pool);
  const Kernels& k = kernels();
  const DecodeFn decode_codes = k.decoder(l.codec);
  const bool rotated = is_rotated(l.codec);
  const Write write = write_of_leaves(l, a.batch);
  for (size_t i = 0; i < l.leaves.size() && only < 0; ++i)
    ask_for_large_pages(a.leaves[i], a.batch * l.leaves[i].size * size_of(l.leaves[i].dtype));

  const int64_t first = std::max<int64_t>(only, 0), chunks = only < 0 ? l.chunks() : 1;
  const Spans spans(l, a.batch, [&](int64_t) { return first; }, chunks);
  const auto chunk_of = [&](const Span& s) {
    return a.payload + (s.row * chunks + s.piece->chunk - first) * l.chunk_bytes;
  };
  std::vector<int64_t> overflow;
  if (is_lossless(l.codec.kind)) overflow = overflows(l, spans, chunk_of);
  spans.each(pool, [&](const Span& s) {
    const auto i = static_cast<size_t>(s.piece->leaf);
    const DType dtype = l.leaves[i].dtype;
    const uint8_t* chunk = chunk_of(s);
    if (!overflow.empty()) {
      return unpack_elements(l, *s.piece, s.begin, s.count, chunk,
                             &overflow[static_cast<size_t>(&s - spans.spans.data())],
                             at_element(a.leaves[i], dtype, s.row * l.leaves[i].size + s.piece->start + s.begin));
    }
    const int meta_count = meta_floats(l.codec);
    const int64_t most = dtype == DType::kF32 || (rotated && !s.raw) ? kSpan : kTile;
    each_bucket(s, most, [&](int64_t index, int64_t offset, int64_t at, int64_t n) {
      void* leaf = at_element(a.leaves[i], dtype, s.row * l.leaves[i].size + at);
      alignas(64) float buffer[kMostTogether];
      float* out = dtype == DType::kF32 ? static_cast<float*>(leaf) : buffer;
      if (s.bucket > 0) {
        float meta[2] = {1.0f, 0.0f};
        std::memcpy(meta, chunk + meta_at(l, *s.piece, index), sizeof(float) * static_cast<size_t>(meta_count));
        const uint8_t* codes = chunk + codes_at(l, *s.piece, index, offset);
        Terms terms;
        terms.add(codes, meta[0]);
        if (rotated)
          decode_rotated(k, l.codec, codes, meta, n, out, dtype == DType::kF32 ? write : Write::kOver);
        else
          decode_codes(terms, n, meta[1], out, dtype == DType::kF32 ? write : Write::kOver);
      } else if (const uint8_t* plain = chunk + plain_at(l, s, at - s.piece->start); s.raw) {
        std::memcpy(leaf, plain, static_cast<size_t>(n * size_of(dtype)));
        return;
      } else {
        k.load(plain_dtype(l, s), plain, n, out);
      }
      if (dtype != DType::kF32) k.store(dtype, buffer, n, leaf);
    });
  });
}

}  // namespace jaxcgx::cpu
