// TopK: the elements of the largest magnitude, and their indices. A piece is a list of indices (codec/indices.h), then,
// aligned to 16 bytes, a message of one float32 leaf with the values. The message is encoded with TopK's codec of
// values. Value j draws the noise of element j of the piece.
//
// Magnitudes are compared as integers: the bits of an element without its sign. Among equal magnitudes the lower index
// comes first. A missing value (index n) is 0.
//
// Sampled selection takes the largest elements among those at or above a threshold. It tries a decreasing sequence of
// thresholds, the ladder. It uses the first threshold that enough elements reach, or else the last one.
#pragma once

#include <cmath>

#include "codec/grid.h"
#include "codec/indices.h"
#include "codec/traits.h"

namespace jaxcgx {

constexpr int64_t kMostIndices = (int64_t{1} << 31) - 1;  // the most elements of a piece
constexpr int32_t kMostRefinements = 100;
constexpr uint32_t kMagnitude = 0x7fffffffu, kLargest = 0x7f7fffffu;  // the mask; the largest finite magnitude
constexpr uint32_t kAnyNaN = 0x7f800001u;  // the magnitude of every NaN: processors differ in the NaN of a sum

CGX_HD uint32_t magnitude_of(float x) {
  const uint32_t m = bits_of(x) & kMagnitude;
  return m < kAnyNaN ? m : kAnyNaN;
}
// Returns the value that is sent for an element: the element, or the canonical NaN.
CGX_HD float sent_as(float x) { return magnitude_of(x) == kAnyNaN ? float_of(kNaNBits) : x; }

// Returns the smallest integer that is at least x, for x >= 0.
CGX_HD int64_t ceil_of(double x) {
  const auto below = static_cast<int64_t>(x);
  return below + (static_cast<double>(below) < x);
}

// Returns the number of values that are sent for a piece of n elements. Some of them may be missing.
CGX_HD int64_t capacity(const Sparse& s, int64_t n) {
  const int64_t one = ceil_of(s.ratio * static_cast<double>(n));
  return one > 0 && s.lists >= div_up(n, one) ? n : s.lists * one;
}

// Returns the codec of the values.
CGX_HD Codec values_of(const Codec& c) { return {c.sparse.values}; }

// Returns the codec of a sum over `ranks` messages. TopK.of_sum in jaxcgx/codecs/topk.py returns the same.
CGX_HD Codec of_sum(const Codec& c, int64_t ranks) {
  if (!is_sparse(c.kind) || c.sparse.top) return c;
  Codec sum{};
  sum.kind = c.kind;
  sum.sparse.ratio = c.sparse.ratio;
  sum.sparse.lists = c.sparse.lists * ranks;
  return sum;
}

// The sample of a piece that sends k of n elements: `count` elements, every stride-th one from first() on.
struct Sample {
  int64_t count, stride;

  CGX_HD Sample(const Sparse& s, int64_t n, int64_t k) {
    const int64_t share = ceil_of(s.share * static_cast<double>(n)), least = div_up(2 * n, k);
    count = share > least ? share : least;
    if (count > n) count = n;
    stride = n / count;
  }
  // Returns the index of the first element. `random`: the 16 random bits of the piece's last element.
  CGX_HD int64_t first(int32_t random) const { return random * stride >> 16; }
  // Returns a position in the descending order of the sample's magnitudes; 1 is the largest. For Select::kQuantile, the
  // magnitude at this position, at most kLargest, is the first threshold.
  CGX_HD int64_t rank(int64_t n, int64_t k) const { return div_up(k * count, n); }
};

// Returns the number of elements that must reach a threshold.
CGX_HD int64_t enough(const Sparse& s, int64_t k) { return ceil_of(s.lower * static_cast<double>(k)); }
// Returns the threshold after t in the ladder, which has the first threshold and `refinements` next ones. A small t is
// scaled by a power of two, like all numbers that may be denormal.
CGX_HD float next_threshold(const Sparse& s, float t) {
  const float up = t < kTiny ? kUp : 1.0f;
  return t * up * static_cast<float>(s.lower) / up;
}

// The first threshold of Select::kExponential, which fits exponential distributions to the sample. `largest` is the
// sample's largest magnitude, at most kLargest. x is a magnitude times scale_of(largest), or 0 if this product is
// denormal. t begins at 0. Each of `rounds` rounds adds sum(x - t) * factor / max(number, 1) to t. The sum and the
// number are over all x in the first round, and over all x > t in later rounds. The sum has the order of codec/grid.h,
// where an x that is not in the sum counts as 0. The threshold is t / scale_of(largest).
struct Exponential {
  int rounds = 1;
  float last;  // factor of the last round

  // Host only: computes the logarithm in float64 with the C library, as jaxcgx/codecs/topk.py does.
  Exponential(int64_t n, int64_t k) {
    int64_t wanted = k;
    for (; 4 * wanted < n; wanted *= 4) ++rounds;
    last = static_cast<float>(std::log(static_cast<double>(n) / static_cast<double>(wanted)));
  }
  CGX_HD Exponential(int rounds, float last) : rounds(rounds), last(last) {}
  CGX_HD float factor(int round) const { return round + 1 == rounds ? last : 1.38629436f; }  // log(4)

  CGX_HD static float scaled(float magnitude, float scale) {
    const float x = magnitude * scale;
    return x < 0x1p-126f ? 0.0f : x;
  }
  CGX_HD float next(int round, float t, float sum, int64_t number) const {
    return t + sum * factor(round) / static_cast<float>(number > 1 ? number : 1);
  }
  // Returns the bits of the threshold.
  CGX_HD static uint32_t threshold(float t, float scale) {
    const uint32_t found = bits_of(t * (1.0f / scale));
    return found < kLargest ? found : kLargest;
  }
};

}  // namespace jaxcgx
