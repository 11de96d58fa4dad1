// Lossless on a CPU (codec/lossless.h): the positions of blocks in a chunk, and packing and unpacking of stretches of
// elements.
#pragma once

#include <cstring>

#include "cpu/spans.h"

namespace jaxcgx::cpu {

inline DType dtype_of(const Layout& l, const Piece& p) { return l.leaves[static_cast<size_t>(p.leaf)].dtype; }

// Returns the bytes in the overflow of the blocks with the elements begin .. end - 1 of a piece. `begin` is the first
// element of a block. A head that no encoder wrote counts at most lossless_most_bytes, so reads stay within the chunk.
inline int64_t overflow_of(const Layout& l, const Piece& p, const uint8_t* chunk, int64_t begin, int64_t end) {
  int64_t bytes = 0;
  for (int64_t at = begin; at < end; at += kLosslessBlock) {
    const int64_t n = std::min(kLosslessBlock, p.coded - at);
    const int64_t half = chunk[p.codes + 2 * (at / kLosslessBlock) + 1];
    bytes += std::min(2 * half, lossless_most_bytes(dtype_of(l, p), n));
  }
  return bytes;
}

// Returns the planes of the block that begins at element `at` of a piece.
inline uint8_t* planes_at(const Layout& l, const Piece& p, uint8_t* chunk, int64_t at) {
  return chunk + p.codes + lossless_head_bytes(p.coded) +
         at / kLosslessBlock * lossless_plane_bytes(dtype_of(l, p), kLosslessBlock);
}

// Packs `count` elements of a piece from `begin` on, the first element of a group. Each group gets room for its most
// bytes in the overflow, so that threads can pack groups in any order. close_up removes the gaps.
inline void pack_elements(const Layout& l, const Piece& p, int64_t begin, int64_t count, const void* x,
                          uint8_t* chunk) {
  const DType dtype = dtype_of(l, p);
  const int64_t block = begin / kLosslessBlock;
  kernels().pack_blocks(dtype, x, count, chunk + p.codes + 2 * block, planes_at(l, p, chunk, begin),
                        chunk + p.overflow + block * lossless_most_bytes(dtype, kLosslessBlock));
}

// Unpacks `count` elements of a piece from `begin` on. `overflow` is the offset of the first block's overflow in the
// chunk. It is advanced past the last block.
inline void unpack_elements(const Layout& l, const Piece& p, int64_t begin, int64_t count, const uint8_t* chunk,
                            int64_t* overflow, void* x) {
  const DType dtype = dtype_of(l, p);
  for (int64_t at = begin; at < begin + count; at += kLosslessBlock) {
    const int64_t n = std::min(kLosslessBlock, begin + count - at), bytes = overflow_of(l, p, chunk, at, at + n);
    kernels().unpack_block(dtype, n, chunk[p.codes + 2 * (at / kLosslessBlock)],
                           planes_at(l, p, const_cast<uint8_t*>(chunk), at), chunk + *overflow, bytes,
                           at_element(x, dtype, at - begin));
    *overflow += bytes;
  }
}

// Removes the gaps between groups from the overflow of a packed chunk, and sets the padding of the heads to 0. Returns
// the end of the overflow.
inline int64_t move_together(const Layout& l, int64_t c, uint8_t* chunk) {
  int64_t end = l.overflow[static_cast<size_t>(c)];
  for (const Piece& p : l.pieces_of(c)) {
    std::memset(chunk + p.codes + 2 * div_up(p.coded, kLosslessBlock), 0,
                static_cast<size_t>(lossless_head_bytes(p.coded) - 2 * div_up(p.coded, kLosslessBlock)));
    const int64_t most = lossless_most_bytes(dtype_of(l, p), kLosslessBlock);
    for (int64_t at = 0; at < p.coded; at += kLosslessGroup) {
      const int64_t bytes = overflow_of(l, p, chunk, at, std::min(at + kLosslessGroup, p.coded));
      std::memmove(chunk + end, chunk + p.overflow + at / kLosslessBlock * most, static_cast<size_t>(bytes));
      end += bytes;
    }
  }
  return end;
}

// Finishes `count` packed chunks: removes the gaps, and sets the bytes after the overflow to 0. chunk_of(i) returns the
// number of the i-th chunk in its message.
template <class ChunkOf>
void close_up(const Layout& l, int64_t count, ChunkOf chunk_of, uint8_t* payload, const Pool& pool) {
  std::vector<int64_t> ends(static_cast<size_t>(count));
  parallel_for(pool, count, [&](int64_t i) {
    ends[static_cast<size_t>(i)] = move_together(l, chunk_of(i), payload + i * l.chunk_bytes);
  });
  constexpr int64_t kPart = 1 << 18;  // bytes
  const int64_t parts = div_up(l.chunk_bytes, kPart);
  parallel_for(pool, count * parts, [&](int64_t task) {
    const int64_t i = task / parts, part = task % parts;
    const int64_t begin = std::max(ends[static_cast<size_t>(i)], part * kPart);
    const int64_t end = std::min((part + 1) * kPart, l.chunk_bytes);
    if (begin < end) std::memset(payload + i * l.chunk_bytes + begin, 0, static_cast<size_t>(end - begin));
  });
}

// Returns, for each span, the offset of its first block's overflow in the chunk. chunk_of(span) returns the span's
// chunk in a payload.
template <class ChunkOf>
std::vector<int64_t> overflows(const Layout& l, const Spans& spans, ChunkOf chunk_of) {
  std::vector<int64_t> begins;
  int64_t end = 0;
  for (const Span& s : spans.spans) {
    const auto c = static_cast<size_t>(s.piece->chunk);
    if (s.begin == 0 && s.piece == &l.pieces[static_cast<size_t>(l.first[c])]) end = l.overflow[c];
    begins.push_back(end);
    end += overflow_of(l, *s.piece, chunk_of(s), s.begin, s.begin + s.count);
  }
  return begins;
}

}  // namespace jaxcgx::cpu
