// Encodes fp32 numbers from any source: leaves (encode.cc), the sum of payloads (reduce.cc) or TopK's values (topk.cc).
#pragma once

#include <functional>

#include "cpu/spans.h"

namespace jaxcgx::cpu {

// The destination of encoded numbers, and the source of their noise.
struct Target {
  const Layout& layout;
  uint8_t* payload;  // row r, chunk c is at payload + r * row_bytes + (one_chunk ? 0 : c) * chunk_bytes
  int64_t row_bytes;
  bool one_chunk;
  const int64_t* leaf_ids;
  const uint32_t* keys;
  int64_t noise_from = 0;  // element 0 of a leaf draws the noise of this element

  uint8_t* chunk(const Span& s) const {
    return payload + s.row * row_bytes + (one_chunk ? 0 : s.piece->chunk * layout.chunk_bytes);
  }
  const uint32_t* key(int64_t row) const { return keys + kKeyWords * row; }
};

// Sets the padding of chunk c to 0: all bytes of `chunk` that no bucket writes.
void clear_gaps(const Layout& l, int64_t c, uint8_t* chunk);

// The size of the buffer that `fetch` gets. The first half is for the numbers. The second half is for other data that
// `keep` needs: in reduce.cc, the undivided sum.
constexpr int64_t kBuffer = 2 * kMostTogether;

// Returns a pointer to n numbers of a leaf from `element` on: in `buffer` or in place.
using Fetch = std::function<const float*(const Span& span, int64_t element, int64_t n, float* buffer)>;
// Gets the pointer that Fetch returned last, and the decoded numbers.
using Keep = std::function<void(const Span& span, int64_t element, int64_t n, const float* x, const float* decoded)>;

// Encodes the numbers of all spans. If `keep` is not empty, calls it for all of them.
void encode_spans(const Target& target, const Spans& spans, const Fetch& fetch, const Keep& keep, const Pool& pool);

}  // namespace jaxcgx::cpu
