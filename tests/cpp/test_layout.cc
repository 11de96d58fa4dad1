// The layout of messages, and lists of indices, also for sizes that no test can allocate.
#include <algorithm>

#include "check.h"
#include "codec/topk.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

void check_layout(const Codec& codec, const std::vector<Leaf>& leaves, int64_t chunks) {
  const Layout l(codec, leaves, chunks);
  const std::string context = describe(l);
  const int64_t unit = codec.bucket_size > 0 ? codec.bucket_size : kUnit;
  CHECK(l.chunks() == chunks && l.chunk_bytes % 16 == 0 && l.chunk_bytes >= 0, context);
  // Every element is in exactly one piece, chunks in order.
  std::vector<int64_t> reached(leaves.size());
  bool right = true;
  int64_t longest = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    int64_t meta = 0, end = 0, overflow = 0;
    for (const Piece& p : l.pieces_of(c)) {
      const Leaf& leaf = leaves[static_cast<size_t>(p.leaf)];
      int64_t& from = reached[static_cast<size_t>(p.leaf)];
      right &=
          p.chunk == c && p.start == from && p.start % unit == 0 && p.coded >= 0 && p.raw >= 0 && p.coded + p.raw > 0;
      from += p.coded + p.raw;
      right &= from == leaf.size || from % unit == 0;
      right &= p.raw == (codec.skip_incomplete && from == leaf.size ? leaf.size % unit : 0);
      // Metadata of one piece after another, then codes and tails aligned to 16 bytes, without overlaps.
      const int64_t buckets = !has_buckets(codec.kind) ? 0 : codec.bucket_size == 0 ? 1 : (p.coded + unit - 1) / unit;
      right &= p.meta == meta;
      meta += buckets * 4 * meta_floats(codec);
      int64_t bytes = 0, rest = p.coded % unit;
      if (is_rotated(codec)) rest = padded(rest);
      const auto scaled = [&](int64_t n) {
        return (n + 127) / 128 * (16 * code_bits(codec) + (codec.bits == kNvfp4 ? 8 : 4));
      };
      if (traits_of(codec.kind).scales)
        bytes = p.coded / p.bucket * scaled(p.bucket) + scaled(is_rotated(codec) ? rest : p.coded % p.bucket);
      else if (buckets == 0)
        bytes = is_lossless(codec.kind) ? lossless_bytes(leaf.dtype, p.coded)
                                        : p.coded * (codec.kind == Kind::kCast ? 2 : size_of(leaf.dtype));
      else if (codec.bucket_size == 0)
        bytes = (p.coded + 7) / 8 * 8;
      else
        bytes = (p.coded / unit * ((unit + 7) / 8) + (rest + 7) / 8) * code_bits(codec);
      right &= p.codes % 16 == 0 && p.tail % 16 == 0 && p.codes >= end && p.tail >= p.codes + bytes &&
               p.tail < p.codes + bytes + 16;
      end = p.tail + p.raw * size_of(leaf.dtype);
      if (is_lossless(codec.kind)) {
        right &= p.overflow == l.overflow[static_cast<size_t>(c)] + overflow;
        overflow += lossless_overflow_bytes(leaf.dtype, p.coded);
      }
    }
    right &= l.overflow[static_cast<size_t>(c)] == (end + 15) / 16 * 16;
    if (overflow > 0) end = l.overflow[static_cast<size_t>(c)] + overflow;
    right &= l.meta_end[static_cast<size_t>(c)] == meta;
    const auto pieces = l.pieces_of(c);
    if (pieces.begin() < pieces.end()) right &= pieces.begin()->codes == (meta + 15) / 16 * 16;
    right &= end <= l.chunk_bytes;
    longest = std::max(longest, end);
  }
  CHECK(right, context);
  for (size_t i = 0; i < leaves.size(); ++i) CHECK(reached[i] == leaves[i].size, context);
  CHECK(l.chunk_bytes == (longest + 15) / 16 * 16, context);
}

void layouts() {
  Random r{29};
  std::vector<Codec> all = codecs_without_buckets();
  for (const int64_t bucket : {1, 7, 100, 512, 5000}) {
    for (const Codec& codec : codecs(bucket)) all.push_back(codec);
  }
  for (const Codec& codec : all) {
    for (int i = 0; i < 12; ++i) {
      std::vector<Leaf> leaves;
      for (int64_t k = r.below(6); k > 0; --k) leaves.push_back({r.below(int64_t{1} << r.below(17)), r.pick(kDTypes)});
      check_layout(codec, leaves, 1 + r.below(r.below(4) == 0 ? 60 : 9));
    }
    for (const int64_t chunks : {1, 7, 1000}) {
      check_layout(codec, {{int64_t{1} << 33, DType::kF32}, {(int64_t{1} << 33) + 77, DType::kBF16}, {3, DType::kF16}},
                   chunks);
    }
    check_layout(codec, {{int64_t{1} << 40, DType::kF32}, {int64_t{1} << 40, DType::kF32}},
                 1000);  // the handlers' limit
  }
}

// Wherever a sample begins, it stays inside its piece, and its threshold is one of its elements.
void samples() {
  for (const int64_t n : {int64_t{1}, int64_t{2}, int64_t{300}, int64_t{1} << 20, kMostIndices - 1, kMostIndices}) {
    for (const double share : {0x1p-15, 0.01, 1.0}) {
      for (const int64_t k : {int64_t{1}, std::max<int64_t>(n / 1000, 1), std::max<int64_t>(n - 1, 1)}) {
        Sparse s{};
        s.share = share;
        const Sample of(s, n, k);
        const std::string context = std::to_string(k) + " of " + std::to_string(n) + ", " + std::to_string(share);
        CHECK(of.count >= 1 && of.stride >= 1 && of.rank(n, k) >= 1 && of.rank(n, k) <= of.count, context);
        for (const int32_t random : {0, 0xffff})
          CHECK(of.first(random) >= 0 && of.first(random) + (of.count - 1) * of.stride < n, context);
        CHECK(0xffff * of.stride <= INT32_MAX || share < 0x1p-15, context);  // JAX's integers have 32 bits
      }
    }
  }
}

// Lists of indices, up to the largest piece. A list has exactly the bytes that its indices need, and each index is read
// back from its place.
void index_lists() {
  CHECK(IndexList(10, 3).bytes == 4 && !IndexList(10, 3).split, "a bit each");
  CHECK(IndexList(1000, 10).bytes == 4 + 2 * 6 && IndexList(1000, 10).low == 6,
        "25 high bits, 2 times 8 codes of 6 bits");
  CHECK(IndexList(kMostIndices, 2147484).bytes == 3208644 && IndexList(kMostIndices, 21474837).bytes == 22984790,
        "as in Python");
  for (const int64_t n : {int64_t{2}, int64_t{100}, int64_t{4097}, int64_t{1} << 20, kMostIndices - 1, kMostIndices}) {
    for (const int64_t k : {int64_t{0}, int64_t{1}, n / 1000, n / 100, n / 10, n / 2, n - 1, n}) {
      const IndexList l(n, k);
      const std::string context = std::to_string(k) + " of " + std::to_string(n);
      if (k == 0 || k == n) {
        CHECK(l.bytes == 0, context);
        continue;
      }
      CHECK(l.bytes > 0 && l.bytes <= bitmap_bytes(n), context);
      if (!l.split) continue;
      CHECK(l.packed_at() + packed_bytes(k, l.packed_bits()) == l.bytes, context);
      for (const int64_t j : {int64_t{0}, k / 2, k - 1}) {
        for (const int64_t index : {j, n - k + j, n}) {  // the lowest and the highest possible index, and none
          const int64_t one = l.one_of(j, index), high = (one - j) << l.low;
          int64_t low = int64_t{l.packed_of(index)} << (l.low - l.packed_bits());
          for (int i = 0; i < l.low / 8; ++i) low |= (index >> 8 * i & 255) << 8 * i;
          CHECK(one >= j && one < l.bits && (high | low) == index, context);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  jaxcgx::test::layouts();
  jaxcgx::test::index_lists();
  jaxcgx::test::samples();
  return jaxcgx::test::finish();
}
