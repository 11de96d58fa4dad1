// Decoding of rotated buckets (codec/rotation.h).
#pragma once

#include "codec/eden.h"
#include "codec/micro.h"
#include "codec/traits.h"
#include "cpu/kernels.h"

namespace jaxcgx::cpu {

// Decodes a bucket of n elements from its codes and metadata.
inline void decode_rotated(const Kernels& k, const Codec& c, const uint8_t* codes, const float* meta, int64_t n,
                           float* out, Write write) {
  const int64_t size = padded(n);
  alignas(64) float values[kMostRotated];
  const bool seeded = is_seeded(c);
  if (traits_of(c.kind).table) {
    k.normal_values(codes, size, c.bits, values);
  } else {
    Terms terms;
    terms.add(codes, 1.0f);
    k.decoder(c)(terms, size, 0.0f, values, Write::kOver);
    if (seeded) {
      for (int64_t i = 0; i < size; ++i) values[i] = max(min(values[i], kMostValue), -kMostValue);
    }
  }
  const RotatedMeta m(meta[0], seeded || meta_floats(c) < 2 ? 0.0f : meta[1], seeded ? seed_sent_as(meta[1]) : 0,
                      log_of(size));
  k.rotate_back(values, n, m, out, write);
}

}  // namespace jaxcgx::cpu
