// The layout of a message in bytes. Host only; jaxcgx/native/layout.py computes the same for shapes.
//
// A message is a list of leaves. It is cut into `chunks` chunks of equal length in bytes, one for each owner. Cuts are
// between units: a unit is a bucket, or 512 elements if the codec has no buckets. Chunk c begins at the first unit
// boundary at or past c / chunks of the message's bytes. The part of a leaf in a chunk is a piece. With `shares`, the
// message is first cut into parts whose bytes have these proportions. Every part is cut into the same number of chunks
// of equal length.
//
// A chunk has the metadata of its buckets, piece after piece, then the codes of each piece. The codes of each piece are
// aligned to 16 bytes. With skip_incomplete, the raw tail of a leaf follows its codes, also aligned. All padding is
// zero. The overflow of Lossless follows the last piece. A piece of TopK is one bucket without metadata, and cuts
// balance its elements instead of its bytes.
#pragma once

#include <vector>

#include "codec/topk.h"
#include "codec/traits.h"

namespace jaxcgx {

struct Leaf {
  int64_t size;  // elements
  DType dtype;
};

struct Piece {
  int32_t leaf;
  int32_t chunk;
  int64_t start;     // index in the leaf of the first element
  int64_t coded;     // number of elements that the codec sees
  int64_t raw;       // number of elements in the raw tail after the coded elements
  int64_t bucket;    // elements of a bucket (the last may be short); 0 without buckets
  int64_t meta;      // offset of the metadata; all offsets are in bytes from the beginning of the chunk
  int64_t codes;     // offset of the codes
  int64_t tail;      // offset of the raw tail
  int64_t overflow;  // offset of the piece's overflow if all blocks before the piece use the most bytes
};

int64_t topk_bytes(const Codec& c, int64_t n);

// Returns the bytes of the codes of a piece, without the padding after them.
inline int64_t code_bytes(const Codec& c, DType leaf, const Piece& p) {
  if (p.bucket == 0) return code_bytes(c, leaf, p.coded);
  if (is_sparse(c.kind)) return topk_bytes(c, p.coded);
  return p.coded / p.bucket * code_bytes(c, leaf, p.bucket) + code_bytes(c, leaf, p.coded % p.bucket);
}

struct Layout {
  Codec codec;
  std::vector<Leaf> leaves;
  std::vector<Piece> pieces;      // by chunk, then by leaf
  std::vector<int64_t> first;     // chunk c has the pieces first[c] .. first[c + 1] - 1
  std::vector<int64_t> meta_end;  // per chunk: the offset at which the metadata ends
  std::vector<int64_t> overflow;  // per chunk: the offset of the overflow, after all pieces
  std::vector<int64_t> end;       // per chunk: the offset at which the chunk ends
  std::vector<int64_t> shares;    // the proportions of the parts; empty: there is one part
  int64_t chunk_bytes = 0;        // the length of the longest chunk; every chunk is padded to it

  int64_t chunks() const { return static_cast<int64_t>(first.size()) - 1; }
  // Returns the offset of a chunk in a payload [rows, chunks, chunk_bytes].
  int64_t chunk_at(int64_t row, int64_t chunk) const { return (row * chunks() + chunk) * chunk_bytes; }
  struct Range {  // of pieces
    const Piece *from, *to;
    const Piece* begin() const { return from; }
    const Piece* end() const { return to; }
  };
  // Returns the pieces of `count` chunks from `chunk` on.
  Range pieces_of(int64_t chunk, int64_t count = 1) const {
    const auto c = static_cast<size_t>(chunk);
    return {pieces.data() + first[c], pieces.data() + first[c + static_cast<size_t>(count)]};
  }

  Layout(const Codec& codec, std::vector<Leaf> leaves_in, int64_t chunks, std::vector<int64_t> shares_in = {})
      : codec(codec), leaves(std::move(leaves_in)), shares(std::move(shares_in)) {
    const int64_t parts = shares.empty() ? 1 : static_cast<int64_t>(shares.size()), cuts = chunks / parts;
    std::vector<int64_t> before{0};  // per part: the sum of the shares of all parts before it
    for (int64_t part = 0; part < parts; ++part)
      before.push_back(before.back() + (shares.empty() ? 1 : shares[static_cast<size_t>(part)]));
    const int64_t whole_shares = before.back() * cuts;
    const int64_t meta_bytes = 4 * meta_floats(codec);
    const int64_t unit = codec.bucket_size > 0 ? codec.bucket_size : kUnit;
    // If a piece is one bucket (`whole`), cuts ignore its metadata: its size does not depend on the number of elements.
    const bool sparse = is_sparse(codec.kind), whole = sparse || (has_buckets(codec.kind) && codec.bucket_size == 0);
    const auto weight = [&](DType dtype, int64_t n) {
      if (is_lossless(codec.kind)) return n * size_of(dtype);
      return sparse ? n : (whole ? 0 : meta_bytes) + code_bytes(codec, dtype, n);
    };
    struct Units {
      int64_t count, full, weight, bytes, before;
    };
    std::vector<Units> units;
    int64_t total = 0;
    for (const Leaf& leaf : leaves) {
      Units u;
      u.full = leaf.size / unit;
      u.weight = weight(leaf.dtype, unit);
      const int64_t rest = leaf.size % unit;
      u.count = u.full + (rest > 0);
      const int64_t last = rest == 0               ? 0
                           : codec.skip_incomplete ? rest * size_of(leaf.dtype)
                                                   : weight(leaf.dtype, rest);
      u.before = total;
      u.bytes = u.full * u.weight + last;
      total += u.bytes;
      units.push_back(u);
    }
    // Returns the message's bytes in the chunks before c.
    const auto bytes_before = [&](int64_t c) {
      const auto part = static_cast<size_t>(c / cuts);
      const int64_t share = before[part] * cuts + c % cuts * (before[part + 1] - before[part]);
      // ceil(share * total / whole_shares), split so that it does not overflow for any message that fits in memory
      return share * (total / whole_shares) + div_up(share * (total % whole_shares), whole_shares);
    };
    // Returns the number of units of a leaf in the message's first bytes.
    const auto cut = [](const Units& u, int64_t bytes) -> int64_t {
      if (bytes <= u.before) return 0;
      const int64_t wanted = div_up(bytes - u.before, u.weight);
      return wanted <= u.full ? wanted : u.count;
    };
    first.push_back(0);
    size_t left = 0;  // the first leaf that is not in the chunks before c
    int64_t begins = 0, ends = 0;
    for (int64_t c = 0; c < chunks; ++c, begins = ends) {
      const size_t begin = pieces.size();
      const bool last = c + 1 == chunks;
      if (!last) ends = bytes_before(c + 1);
      int64_t at = 0;
      for (size_t i = left; i < leaves.size() && (last || units[i].before < ends); ++i) {
        const int64_t from = cut(units[i], begins), to = last ? units[i].count : cut(units[i], ends);
        if (i == left && to == units[i].count) ++left;
        if (from >= to) continue;
        const Leaf& leaf = leaves[i];
        Piece p;
        p.leaf = static_cast<int32_t>(i);
        p.chunk = static_cast<int32_t>(c);
        p.start = from * unit;
        const int64_t end = to * unit < leaf.size ? to * unit : leaf.size;
        p.raw = codec.skip_incomplete && end % unit ? end % unit : 0;
        p.coded = end - p.start - p.raw;
        p.bucket = whole ? p.coded : codec.bucket_size;
        p.meta = at;
        if (p.bucket > 0) at += div_up(p.coded, p.bucket) * meta_bytes;
        p.codes = p.tail = p.overflow = 0;
        pieces.push_back(p);
      }
      meta_end.push_back(at);
      at = align16(at);
      for (size_t k = begin; k < pieces.size(); ++k) {
        Piece& p = pieces[k];
        const DType dtype = leaves[static_cast<size_t>(p.leaf)].dtype;
        p.codes = at;
        at = align16(at + code_bytes(codec, dtype, p));
        p.tail = at;
        at = align16(at + p.raw * size_of(dtype));
      }
      overflow.push_back(at);
      for (size_t k = begin; k < pieces.size() && is_lossless(codec.kind); ++k) {
        pieces[k].overflow = at;
        at += lossless_overflow_bytes(leaves[static_cast<size_t>(pieces[k].leaf)].dtype, pieces[k].coded);
      }
      at = align16(at);
      first.push_back(static_cast<int64_t>(pieces.size()));
      end.push_back(at);
      if (at > chunk_bytes) chunk_bytes = at;
    }
  }
};

// Returns the layout of a sum over `ranks` messages. Its pieces have the same elements.
inline Layout of_sum(const Layout& l, int64_t ranks) {
  return is_sparse(l.codec.kind) ? Layout(of_sum(l.codec, ranks), l.leaves, l.chunks(), l.shares) : l;
}

// Returns the layout of the values of a TopK piece of n elements: a separate message with one leaf.
inline Layout values_layout(const Codec& c, int64_t n) {
  return Layout(values_of(c), {{capacity(c.sparse, n), DType::kF32}}, 1);
}

// values_at returns the offset of the values in a TopK piece of n elements: its list of indices comes first.
// topk_bytes returns the bytes of the whole piece.
inline int64_t values_at(const Codec& c, int64_t n) { return align16(IndexList(n, capacity(c.sparse, n)).bytes); }
inline int64_t topk_bytes(const Codec& c, int64_t n) { return values_at(c, n) + values_layout(c, n).chunk_bytes; }

}  // namespace jaxcgx
