// The layout of TopK's workspace, in 32-bit words, and functions that its kernels share.
#pragma once

#include <vector>

#include "cuda/load_store.cuh"
#include "cuda/piece_table.cuh"

namespace jaxcgx::cuda {

CGX_HD constexpr int64_t align_words(int64_t words) { return (words + 3) & ~int64_t{3}; }

// The memory for encoding a piece: offsets in words. A warp reads a segment at a time, and a thread block a tile.
constexpr uint32_t kSelectThreads = 512, kSelectWarps = kSelectThreads / kWarpSize;
constexpr int64_t kSegment = 1024, kSelectTile = kSegment * kSelectWarps;
// A thread block finds the wanted one of so many keys by itself.
constexpr int64_t kLeastListed = 1024, kMostListed = 16 * kSelectThreads;
struct SelectionWords {
  int64_t room;    // the most candidates of a segment that are kept
  int64_t listed;  // the most candidates in the list of those that may be the last one sent
  int64_t found, above, of_blocks, candidates, list, indices, values, decoded, sample, sums, all;

  CGX_HD SelectionWords(const Sparse& s, uint32_t n, uint32_t k) {
    // Twice the average number of sent elements, plus 32. If this is more than half of a segment, no candidates are
    // kept, and later passes read the segment again.
    room = k == 0 ? 0 : 2 * (static_cast<uint32_t>(kSegment) / (n / k)) + 32;
    if (room > kSegment / 2) room = 0;
    const int64_t segments = div_up(n, kSegment);
    all = 0;
    listed = segments * room > kLeastListed ? segments * room : kLeastListed;
    if (listed > kMostListed) listed = kMostListed;
    if (listed > n) listed = n;
    found = take(segments);
    above = take(segments);
    of_blocks = take(div_up(n, kSelectTile));
    candidates = take(2 * segments * room);
    list = take(2 * listed);
    indices = take(k);
    values = take(k);
    decoded = take(k);
    const int64_t count = k == 0 || k == n ? 0 : sample_of(s, n, k).count;
    sample = take(count);
    sums = take(s.select == Select::kExponential ? div_up(count, kBlock) : 0);
  }
  CGX_HD int64_t take(int64_t words) {
    const int64_t begin = all;
    all += align_words(words);
    return begin;
  }

  // Returns the sample for the first threshold. Exact selection may use any sample, because its result does not depend
  // on the first threshold.
  CGX_HD static Sample sample_of(Sparse s, int64_t n, int64_t k) {
    constexpr int64_t kMost = 4096, kEvery = 16;
    if (s.select == Select::kExact)
      s.share = n < kMost * kEvery ? 1.0 / kEvery : static_cast<double>(kMost) / static_cast<double>(n);
    return Sample(s, n, k);
  }
};

// The memory for decoding a list of indices and its values: offsets in words. A thread block counts the ones in a
// stretch of the list's bitmap. The number of stretches is limited, so that every thread block can sum the counts of
// all stretches before its own.
constexpr uint32_t kListThreads = 128;
struct ListWords {
  int64_t each;  // words of the bitmap per thread
  int64_t stretches, indices, values, all;

  CGX_HD explicit ListWords(const IndexList& list) {
    constexpr int64_t kMostStretches = 4096;
    const int64_t words = div_up(list.bits, 32);
    each = div_up(words, kListThreads * kMostStretches);
    stretches = each == 0 ? 0 : div_up(words, kListThreads * each);
    indices = align_words(stretches + 1);  // after the counts, there is the number of indices
    values = indices + align_words(list.k);
    all = values + align_words(list.k);
  }
};

// Returns a * b, limited to kTooMuch to avoid overflow. No memory has so many words.
inline int64_t times(int64_t a, int64_t b) {
  constexpr int64_t kTooMuch = int64_t{1} << 50;
  return b > 0 && a > kTooMuch / b ? kTooMuch : a * b;
}

// The offset of each piece's memory in the workspace, in words. A piece takes words(piece) words. one_chunk: each row
// has only one chunk, so pieces of different chunks share memory.
struct Memory {
  std::vector<int64_t> begin;  // by piece: the offset in the first row
  int64_t row = 0, end;        // row: words of a row; end: the offset after all rows

  template <class Words>
  Memory(const Layout& l, int64_t rows, bool one_chunk, int64_t from, Words words) {
    int64_t at = 0;
    for (size_t i = 0; i < l.pieces.size(); ++i) {
      if (one_chunk && i > 0 && l.pieces[i].chunk != l.pieces[i - 1].chunk) at = 0;
      begin.push_back(from + at);
      at += align_words(words(l.pieces[i]));
      row = std::max(row, at);
    }
    end = from + times(rows, row);
  }
};

// Calls f(the field's byte in the list, its first bit in this byte, its width, its first bit in the index) for each
// field of the low bits of index j. The fields are whole bytes, and the fields of codec/pack.h.
template <class Fn>
CGX_D void each_field(const IndexList& list, int64_t j, Fn f) {
  uint32_t from = 0;
  for (int i = 0; i < list.low / 8; ++i, from += 8) f(list.byte_at(i, j), 0u, 8u, from);
  const auto width = static_cast<uint32_t>(list.packed_bits());
  const int64_t block = j / kBlock, left = list.k - block * kBlock;
  const auto in_block = static_cast<uint32_t>(j % kBlock), lanes = static_cast<uint32_t>(lanes_of(left));
  const uint32_t row = in_block / lanes, lane = in_block % lanes;
  int64_t at = list.packed_at() + block * kLanes * width;
#pragma unroll
  for (uint32_t field = 4; field > 0; field /= 2) {  // the bits of a field are as many as the bytes of a lane's word
    if (!(width & field)) continue;
    f(at + lane * field + field * row / 8, field * row % 8, field, from);
    at += lanes * field;
    from += field;
  }
}

// The values of all pieces as one message in TopK's codec of values, whose bytes are within TopK's message. `memory`:
// the memory of the pieces. `values(n, k)`: the offset of the values in the memory of a piece.
struct Values {
  Layout layout;
  std::vector<const void*> leaves;
  std::vector<int64_t> ids, starts;  // empty without leaf_ids

  template <class At>
  Values(const Layout& l, const Memory& memory, const void* workspace, const int64_t* leaf_ids, At values)
      : layout(values_of(l.codec), {}, l.chunks()) {
    layout.chunk_bytes = l.chunk_bytes;
    layout.first.assign(1, 0);
    for (size_t i = 0; i < l.pieces.size(); ++i) {
      const Piece& p = l.pieces[i];
      while (static_cast<int64_t>(layout.first.size()) <= p.chunk)
        layout.first.push_back(static_cast<int64_t>(layout.pieces.size()));
      const int64_t at = p.codes + values_at(l.codec, p.coded);
      for (Piece v : values_layout(l.codec, p.coded).pieces) {
        v.leaf = static_cast<int32_t>(i), v.chunk = p.chunk;
        v.meta += at, v.codes += at, v.tail += at;
        layout.pieces.push_back(v);
      }
      layout.leaves.push_back({memory.row, DType::kF32});
      leaves.push_back(static_cast<const uint32_t*>(workspace) + memory.begin[i] +
                       values(p.coded, capacity(l.codec.sparse, p.coded)));
      if (leaf_ids == nullptr) continue;
      ids.push_back(leaf_ids[p.leaf]);
      starts.push_back(p.start);
    }
    while (static_cast<int64_t>(layout.first.size()) <= l.chunks())
      layout.first.push_back(static_cast<int64_t>(layout.pieces.size()));
    layout.meta_end.assign(static_cast<size_t>(l.chunks()), l.chunk_bytes);
  }
};

// The workspace of an operation that decodes `payloads` payloads per row (encode: 0). `encodes`: whether the operation
// encodes. The workspace has, in this order: the states of the selection, the lists of the payloads, the sums of a
// chunk, the memory of the selection, and the workspace for encoding the values.
struct TopkWork {
  Layout to;  // the layout of the encoded message
  int64_t states;
  Memory lists, sums, selection;
  int64_t end;

  TopkWork(const Layout& l, int64_t batch, int64_t payloads, bool encodes);
};

inline Status too_large() { return {"workspace", cudaErrorInvalidConfiguration}; }

// Encodes the leaves to the layout work.to. If the message sums, encodes the sums in the workspace. topk_encode.cu
Status encode_topk(const TopkWork& work, const Call& call);
// Decodes like decode_all. If the message has a payload, the sum is encoded to the payload. topk_decode.cu
Status decode_topk(const Call& call);

}  // namespace jaxcgx::cuda
