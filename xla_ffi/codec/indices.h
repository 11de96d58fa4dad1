// How a list of k ascending indices below n is encoded in bytes. The index n marks a missing index. Missing indices
// come last.
//
// There are two forms, and the shorter one is used. So n and k determine the form. The Elias-Fano form stores the low
// bits of each index directly. Its high bits are in a bitmap, where index j sets bit j + high. The other form is a
// bitmap with one bit for each of the n elements. A bitmap is made of 32-bit words, low bits first, and bits past its
// end are zero. In the Elias-Fano form the low bits follow the bitmap: the lowest byte of all indices, then the next
// byte, then the remaining bits as a bucket of codes (codec/pack.h).
//
// In bytes that no encoder wrote, an index counts as missing if it is not greater than all indices before it, or not
// below n.
#pragma once

#include "codec/pack.h"

namespace jaxcgx {

CGX_HD int64_t bitmap_bytes(int64_t bits) { return div_up(bits, 32) * 4; }

struct IndexList {
  int64_t n, k;
  int low = 0;         // low bits of an index
  bool split = false;  // the Elias-Fano form
  int64_t bits = 0;    // bits of the bitmap
  int64_t bytes = 0;   // bytes of the whole list; 0 if k is 0 or n

  CGX_HD IndexList(int64_t n, int64_t k) : n(n), k(k) {
    if (is_implied()) return;
    while (n / k >> (low + 1) > 0) ++low;
    const int64_t high_bits = (n >> low) + k;
    const int64_t split_bytes = bitmap_bytes(high_bits) + low / 8 * k + packed_bytes(k, low % 8);
    split = split_bytes < bitmap_bytes(n);
    bits = split ? high_bits : n;
    bytes = split ? split_bytes : bitmap_bytes(n);
  }

  // Returns whether the list needs no bytes.
  CGX_HD bool is_implied() const { return k == 0 || k == n; }
  // These functions are for the Elias-Fano form. one_of returns the bit that index j sets, byte_at the offset of byte i
  // of its low bits, packed_at the offset of the packed codes, and packed_of the packed code of an index.
  CGX_HD int64_t one_of(int64_t j, int64_t index) const { return (index >> low) + j; }
  CGX_HD int64_t byte_at(int i, int64_t j) const { return bitmap_bytes(bits) + i * k + j; }
  CGX_HD int64_t packed_at() const { return byte_at(low / 8, 0); }
  CGX_HD int packed_bits() const { return low % 8; }
  CGX_HD int32_t packed_of(int64_t index) const {
    return static_cast<int32_t>(index >> (low - packed_bits()) & ((1 << packed_bits()) - 1));
  }
};

}  // namespace jaxcgx
