// The rotation of a bucket: its elements are multiplied by random signs, then by a Hadamard matrix. After the rotation
// their distribution is almost normal, whatever it was before. The bucket is padded with zeros to a power of two.
//
// First the bucket is multiplied by a power of two, so that its largest magnitude is at least 1 and below 2. Elements
// below kDropped become 0, so that no sum is denormal. The transform is not normalized: with size = 2^k elements it
// multiplies the norm of a bucket by 2^(k/2). The unit and the base that are sent are divided by 2^ceil(k/2).
//
// The order of the additions: elements size/2 apart, then size/4, and so on. The inverse transform adds multiples of
// 2^-10 up to 3, of 2^-9 below 4, or integers below 256. Their sums are exact in any order.
//
// The sign of element e, with row = e / 16 and lane = e % 16, is bit 31 - row % 32 of word row / 32 % 4 of philox at
// the counter (16 * (row / 128) + lane, 0, 0, 0), with the key (seed, 0).
#pragma once

#include "codec/grid.h"
#include "codec/pack.h"

namespace jaxcgx {

constexpr float kDropped = 0x1p-30f;
constexpr int kSignRows = 128;  // one call of philox gives the signs of this many rows of a lane

CGX_HD int log_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}
CGX_HD float power_of_two(int n) { return float_of(static_cast<uint32_t>(127 + n) << 23); }

// The factors of a bucket before it is rotated.
struct Rotation {
  // An element x becomes x * scale * power. inverse is 1 / power, or 0 for a bucket of zeros.
  float scale, power, inverse;

  CGX_HD explicit Rotation(float largest) : scale(scale_of(largest)) {
    const uint32_t exponent = bits_of(largest * scale) >> 23;
    power = float_of((254u - exponent) << 23);
    inverse = float_of(exponent << 23);
  }
  // Returns the number that is sent for a metadata number x of the rotated bucket.
  CGX_HD float as_sent(float x, int log_size) const {
    return x * power_of_two(log_size / 2 - log_size) * inverse * (1.0f / scale) + 0.0f;
  }
};

// The metadata for the inverse rotation. The transform of the decoded codes gives a sum for each element. value(sum) is
// an element before its random sign is applied, except of element 0, which is first(sum): the base is added to it.
struct RotatedMeta {
  float unit, down;  // a tiny unit is scaled up by kUp; `down` scales the product back
  float factor;      // multiplies each sum
  // Both terms of element 0 may be many times its size, with opposite signs. A large base and the product are scaled
  // down by `room` before they are added, so that neither overflows.
  float base, room;
  uint32_t seed;

  CGX_HD RotatedMeta(float sent_unit, float sent_base, uint32_t seed, int log_size) : seed(seed) {
    const bool tiny = abs(sent_unit) < kTiny;
    unit = tiny ? sent_unit * kUp : sent_unit;
    down = tiny ? kDown : 1.0f;
    factor = power_of_two(-(log_size / 2));
    room = abs(sent_base) >= 0x1p100f ? 0x1p-40f : 1.0f;
    base = sent_base * room * power_of_two(log_size - log_size / 2);
  }
  CGX_HD float value(float sum) const { return unit * (sum * factor) * down; }
  CGX_HD float first(float sum) const { return (unit * room * (sum * factor) * down + base) * (1.0f / room); }
};

// Returns a * b without its last eight bits. The masking keeps the compiler from fusing the product with an addition.
template <class V>
CGX_HD typename V::F short_product(typename V::F a, typename V::F b) {
  return as_float(bits(a * b) & V::splat(~0xff));
}

}  // namespace jaxcgx
