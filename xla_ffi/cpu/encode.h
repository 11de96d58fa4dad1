// Encodes fp32 numbers from any source: leaves (encode.cc), the sum of payloads (reduce.cc) or TopK's values (topk.cc).
#pragma once

#include "codec/dispatch.h"
#include "cpu/lossless.h"
#include "cpu/rotated.h"
#include "cpu/spans.h"

namespace jaxcgx::cpu {

inline Grid grid_of(const Stats& s, float sum, int64_t n, const Codec& c) {
  return with_grid_codec(c, [&](auto type) { return decltype(type)::Codec::grid(s, sum, n, c); });
}

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
inline void clear_gaps(const Layout& l, int64_t c, uint8_t* chunk) {
  int64_t at = l.meta_end[static_cast<size_t>(c)];
  const auto clear_to = [&](int64_t end) {
    if (end > at) std::memset(chunk + at, 0, static_cast<size_t>(end - at));  // an empty message may have no memory
  };
  for (const Piece& p : l.pieces_of(c)) {
    const DType dtype = l.leaves[static_cast<size_t>(p.leaf)].dtype;
    clear_to(p.codes);
    at = p.codes + code_bytes(l.codec, dtype, p);
    clear_to(p.tail);
    at = p.tail + p.raw * size_of(dtype);
  }
  clear_to(is_lossless(l.codec.kind) ? l.overflow[static_cast<size_t>(c)] : l.chunk_bytes);  // close_up clears the rest
}

// The size of the buffer that `fetch` gets. The first half is for the numbers. The second half is for other data that
// `keep` needs: in reduce.cc, the undivided sum.
constexpr int64_t kBuffer = 2 * kMostTogether;

// Encodes the numbers of all spans. `fetch(span, element, n, buffer)` returns a pointer to n numbers of the leaf from
// `element` on: in `buffer` or in place. If `keeps`, `keep(span, element, n, numbers, decoded)` is called with the
// pointer that `fetch` returned last, and the decoded numbers.
template <class Fetch, class Keep>
class Encoder {
 public:
  Encoder(const Target& target, const Fetch& fetch, const Keep& keep, bool keeps)
      : t_(target),
        codec_(target.layout.codec),
        fetch_(fetch),
        keep_(keep),
        keeps_(keeps),
        needs_sums_(traits_of(codec_.kind).sums),
        k_(kernels()),
        encode_(k_.encoder(codec_)),
        decode_(k_.decoder(codec_)) {}

  void run(const Spans& spans, const Pool& pool) const {
    // Threads share big buckets. So their statistics come first: of each part, then of each whole bucket.
    std::vector<Stats> stats(spans.spans.size());
    std::vector<Grid> grids(spans.big.size());
    if (!spans.big.empty()) {
      std::vector<float> sums(spans.spans.size());
      const auto each_part = [&](auto f) {
        spans.each(pool, [&](const Span& s) {
          if (s.part_of >= 0) f(s, static_cast<size_t>(&s - spans.spans.data()));
        });
      };
      const auto each_big = [&](auto f) {
        IeeeMode mode;
        for (size_t b = 0; b < spans.big.size(); ++b) {
          Stats all = empty();
          float sum = 0.0f;
          int64_t n = 0;
          for (auto i = static_cast<size_t>(spans.big[b].first); i < static_cast<size_t>(spans.big[b].last); ++i) {
            all.lo = min(all.lo, stats[i].lo);
            all.hi = max(all.hi, stats[i].hi);
            sum = sum + sums[i];
            n += spans.spans[i].count;
          }
          f(b, all, sum, n);
        }
      };
      each_part([&](const Span& s, size_t i) { stats[i] = stats_of(s, s.piece->start + s.begin, s.count); });
      if (needs_sums_) {
        std::vector<float> scales(spans.big.size());
        each_big([&](size_t b, const Stats& all, float, int64_t) { scales[b] = scale_of(largest_of(all)); });
        each_part([&](const Span& s, size_t i) {
          sums[i] = sum_of(s, s.piece->start + s.begin, s.count, scales[static_cast<size_t>(s.part_of)]);
        });
      }
      each_big([&](size_t b, const Stats& all, float sum, int64_t n) { grids[b] = grid_of(all, sum, n, codec_); });
    }
    spans.each(pool, [&](const Span& s) {
      if (s.bucket == 0) {
        plain(s);
      } else if (s.part_of >= 0) {
        const Grid& g = grids[static_cast<size_t>(s.part_of)];
        each_bucket(s, kTile, [&](int64_t index, int64_t offset, int64_t at, int64_t n) {
          if (offset == 0) put_meta(s, index, g);
          alignas(64) float buffer[kBuffer];
          put_codes(s, index, offset, at, n, g, fetch_(s, at, n, buffer));
        });
      } else {
        each_bucket(s, kSpan, [&](int64_t index, int64_t, int64_t at, int64_t n) {
          is_rotated(codec_) ? rotated(s, index, at, n) : bucket(s, index, at, n);
        });
      }
    });
  }

 private:
  static Stats empty() { return {__builtin_inff(), -__builtin_inff()}; }

  Stats stats_of(const Span& s, int64_t at, int64_t n) const {
    Stats stats = empty();
    alignas(64) float buffer[kBuffer];
    for (int64_t i = 0; i < n; i += kTile) {
      const int64_t m = std::min(kTile, n - i);
      k_.stats(fetch_(s, at + i, m, buffer), m, &stats);
    }
    return stats;
  }

  float sum_of(const Span& s, int64_t at, int64_t n, float scale) const {
    alignas(64) float buffer[kBuffer], scaled[kTile];
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i += kTile) {
      const int64_t m = std::min(kTile, n - i);
      k_.scale(fetch_(s, at + i, m, buffer), m, scale, scaled);
      sum = k_.sum(scaled, m, sum);
    }
    return sum;
  }

  // Encodes a bucket that fits in a span. If it fits in a tile, too, its numbers are fetched only once.
  void bucket(const Span& s, int64_t index, int64_t at, int64_t n) const {
    alignas(64) float buffer[kBuffer];
    const float* x = nullptr;
    Stats stats = empty();
    if (n <= kTile) x = fetch_(s, at, n, buffer);
    if (meta_floats(codec_) > 0) {  // without metadata, all buckets have the same grid
      if (x != nullptr)
        k_.stats(x, n, &stats);
      else
        stats = stats_of(s, at, n);
    }
    const float sum = needs_sums_ ? sum_of(s, at, n, scale_of(largest_of(stats))) : 0.0f;
    const Grid g = grid_of(stats, sum, n, codec_);
    put_meta(s, index, g);
    for (int64_t i = 0; i < n; i += kTile) {
      const int64_t m = std::min(kTile, n - i);
      put_codes(s, index, i, at + i, m, g, n <= kTile ? x : fetch_(s, at + i, m, buffer));
    }
  }

  // Rotates a bucket, then encodes it.
  void rotated(const Span& s, int64_t index, int64_t at, int64_t n) const {
    alignas(64) float buffer[kBuffer], y[kMostRotated], values[kMostRotated];
    alignas(64) uint16_t noise[kMostRotated + 2 * kBlock];
    const int64_t size = padded(n);
    const bool seeded = is_seeded(codec_);
    const float* x = fetch_(s, at, n, buffer);
    uint8_t* codes = t_.chunk(s) + codes_at(t_.layout, *s.piece, index, 0);
    const float largest = k_.largest(x, n);
    Grid g{};
    if (is_finite(largest)) {  // the rotation spreads a NaN, so that the unit becomes NaN
      const uint16_t* drawn = codec_.stochastic ? noise_of(s, at, seeded ? 2 : n, noise) : nullptr;
      const uint32_t seed = seeded ? seed_of(drawn[0], drawn[n > 1]) : 0;
      const Rotation rotation(largest);
      k_.rotate(x, n, rotation, seed, y);
      if (traits_of(codec_.kind).table) {
        g.unit = k_.normal_codes(y, size, codec_.bits, codes);
      } else {
        if (codec_.stochastic &&
            !seeded) {  // the padding repeats the bucket's noise; drawn == noise, as a bucket begins a block
          for (int64_t i = n; i < size; ++i) noise[i] = noise[i - n];
        }
        Stats stats = empty();
        k_.stats(y, size, &stats);
        g = grid_of(stats, 0.0f, size, codec_);
        if (g.finite) encode_(y, size, g, drawn, codes);
        if (seeded) {
          Terms terms;
          terms.add(codes, 1.0f);
          decode_(terms, size, 0.0f, values, Write::kOver);
          g.unit = k_.unbiased_unit(y, values, size);
        } else {
          g.base = rotation.as_sent(g.base, log_of(size));
        }
      }
      if (seeded) g.base = sent_seed(seed);
      g.unit = rotation.as_sent(g.unit, log_of(size));
      g.finite = is_finite(g.unit) && is_finite(g.base);
    }
    put_meta(s, index, g);
    if (!g.finite) std::memset(codes, 0, static_cast<size_t>(bucket_bytes(codec_, size)));
    if (keeps_) {
      const float meta[2] = {unit_of(g), base_of(g)};
      decode_rotated(k_, codec_, codes, meta, n, y, Write::kOver);
      keep_(s, at, n, x, y);
    }
  }

  void put_meta(const Span& s, int64_t index, const Grid& g) const {
    const float meta[2] = {unit_of(g), base_of(g)};
    std::memcpy(t_.chunk(s) + meta_at(t_.layout, *s.piece, index), meta,
                sizeof(float) * static_cast<size_t>(meta_floats(codec_)));
  }

  void put_codes(const Span& s, int64_t index, int64_t offset, int64_t at, int64_t n, const Grid& g,
                 const float* x) const {
    uint8_t* codes = t_.chunk(s) + codes_at(t_.layout, *s.piece, index, offset);
    alignas(64) float other[kTile];
    if (g.finite) {
      const float* scaled = x;
      if (g.scale != 1.0f) {
        k_.scale(x, n, g.scale, other);
        scaled = other;
      }
      alignas(64) uint16_t noise[kTile + 2 * kBlock];
      encode_(scaled, n, g, codec_.stochastic ? noise_of(s, at, n, noise) : nullptr, codes);
    } else {
      std::memset(codes, 0, static_cast<size_t>(bucket_bytes(codec_, n)));
    }
    if (keeps_) {
      Terms decoded;
      decoded.add(codes, unit_of(g));
      decode_(decoded, n, base_of(g), other, Write::kOver);
      keep_(s, at, n, x, other);
    }
  }

  // Returns the noise of n elements from `at` on. `at` may be inside a block, but only whole blocks can be drawn. So
  // `noise` has room for two more blocks.
  const uint16_t* noise_of(const Span& s, int64_t at, int64_t n, uint16_t* noise) const {
    at += t_.noise_from;
    const int64_t first = at / kBlock * kBlock;
    k_.noise(t_.key(s.row), static_cast<uint32_t>(t_.leaf_ids[s.piece->leaf]), first, div_up(at + n - first, kBlock),
             noise);
    return noise + (at - first);
  }

  // Encodes a span of a codec without buckets (Raw, Cast, Lossless), or a raw tail.
  void plain(const Span& s) const {
    const DType dtype = plain_dtype(t_.layout, s);
    const bool lossless = is_lossless(codec_.kind), stored = s.raw || lossless;
    const CastFn cast = stored ? nullptr : k_.caster(codec_);
    each_bucket(s, kTile, [&](int64_t, int64_t, int64_t at, int64_t n) {
      alignas(64) float buffer[kBuffer], decoded[kTile], unpacked[kTile];
      alignas(64) uint16_t noise[kTile + 2 * kBlock];
      const float* x = fetch_(s, at, n, buffer);
      const int64_t place = at - s.piece->start;
      void* const out = lossless ? static_cast<void*>(unpacked) : t_.chunk(s) + plain_at(t_.layout, s, place);
      if (stored)
        k_.store(dtype, x, n, out);
      else
        cast(x, n, codec_.stochastic ? noise_of(s, at, n, noise) : nullptr, out);
      if (lossless) pack_elements(t_.layout, *s.piece, place, n, out, t_.chunk(s));
      if (keeps_) {
        k_.load(dtype, out, n, decoded);
        keep_(s, at, n, x, decoded);
      }
    });
  }

  const Target t_;
  const Codec codec_;
  const Fetch& fetch_;
  const Keep& keep_;
  const bool keeps_, needs_sums_;
  const Kernels& k_;
  const EncodeFn encode_;
  const DecodeFn decode_;
};

}  // namespace jaxcgx::cpu
