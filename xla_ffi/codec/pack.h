// How the codes of a bucket become bytes.
//
// A bucket is cut into blocks of 128 elements: 8 rows of 16 lanes, element = 16 * row + lane. A lane's eight codes are
// packed together: a code is split into fields of 8, 4, 2 and 1 bits (7 = 4 + 2 + 1, low bits first), and field k of
// the lane's row r goes to bits k * r of a word of 8 * k bits. So packing shifts and ors whole rows, without a
// transposition, on any vector unit and in a warp. A block holds, for each field in the order 8 or 4, 2, 1, the words
// of its lanes in order (8-bit fields: rows 0..3, then rows 4..7, as 32-bit words): 16 * bits bytes.
//
// The last block of a bucket, of n < 128 elements, has ceil(n / 8) lanes instead of 16, and fields of elements
// past the end are 0.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

constexpr int kRows = 8, kLanes = 16, kBlock = kRows * kLanes;

// The size of a rotated bucket of n elements (codec/rotation.h): the next power of two, at least a block.
constexpr int64_t kMostRotated = 4096;
CGX_HD int64_t padded(int64_t n) {
  int64_t size = n > 0 ? kBlock : 0;
  while (size < n) size *= 2;
  return size;
}

CGX_HD int64_t packed_bytes(int64_t n, int bits) { return div_up(n, kRows) * bits; }

// The words of a block, one per lane. The compiler removes fields that kBits does not have.
template <class V, int kBits>
struct Words {
  typename V::I a, b, c, d;  // a: 8-bit fields, rows 0..3, or 4-bit fields; b: 8-bit fields, rows 4..7; c: 2; d: 1

  CGX_HD void clear() { a = b = c = d = V::splat(0); }

  // Call this once for each row: it adds the fields, because a GPU shifts and adds in one instruction.
  CGX_HD void put(int row, typename V::I code) {
    if constexpr (kBits == 8) {
      if (row < 4)
        a = a + shl(code, 8 * row);
      else
        b = b + shl(code, 8 * (row - 4));
      return;
    }
    if constexpr (kBits & 4) a = a + shl(kBits == 4 ? code : code & V::splat(15), 4 * row);
    if constexpr (kBits & 2) {
      const auto field = kBits & 4 ? shr(code, 4) : code;
      c = c + shl(kBits & 1 ? field & V::splat(3) : field, 2 * row);
    }
    if constexpr (kBits & 1) d = d + shl(shr(code, kBits - 1), row);
  }

  CGX_HD typename V::I get(int row) const {
    if constexpr (kBits == 8) {
      return (row < 4 ? shr(a, 8 * row) : shr(b, 8 * (row - 4))) & V::splat(255);
    }
    auto code = V::splat(0);
    if constexpr (kBits & 4) code = shr(a, 4 * row) & V::splat(15);
    if constexpr (kBits & 2) code = code | shl(shr(c, 2 * row) & V::splat(3), kBits & 4);
    if constexpr (kBits & 1) code = code | shl(shr(d, row) & V::splat(1), kBits - 1);
    return code;
  }
};

}  // namespace jaxcgx
