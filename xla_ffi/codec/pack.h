// How the codes of a bucket are packed into bytes.
//
// A bucket is cut into blocks of 128 elements: 8 rows of 16 lanes, element = 16 * row + lane. A code is split into
// fields of 8, 4, 2 and 1 bits (7 = 4 + 2 + 1, low bits first). The eight codes of a lane make one word for each field.
// A field of k bits has a word of 8 * k bits, and row r has bits k * r to k * r + k - 1. So packing only shifts and
// ORs whole rows: it needs no transposition on any vector unit or in a warp. A block stores its fields in the order
// 8 or 4, 2, 1. For each field it stores the words of the lanes in order. For 8-bit fields it stores 32-bit words:
// rows 0..3 of all lanes, then rows 4..7. A block has 16 * bits bytes.
//
// If the last block of a bucket has n < 128 elements, it has lanes = ceil(n / 8) instead of 16, and
// element = lanes * row + lane. Fields of elements past the end are 0.
#pragma once

#include "codec/base.h"

namespace jaxcgx {

constexpr int kRows = 8, kLanes = 16, kBlock = kRows * kLanes;

constexpr int64_t kMostRotated = 4096;  // the largest bucket size with a rotation

// Returns the size of a rotated bucket of n elements (codec/rotation.h): the next power of two, at least a block. 0 for
// n = 0.
CGX_HD int64_t padded(int64_t n) {
  int64_t size = n > 0 ? kBlock : 0;
  while (size < n) size *= 2;
  return size;
}

CGX_HD int64_t packed_bytes(int64_t n, int bits) { return div_up(n, kRows) * bits; }

// Returns the number of lanes of a block, if n codes are left.
template <class T>
CGX_HD int lanes_of(T n) {
  return n >= kBlock ? kLanes : static_cast<int>((n + kRows - 1) / kRows);
}

// The words of one lane of a block. The compiler removes the members that a code of kBits bits does not use.
template <class V, int kBits>
struct Words {
  typename V::I a, b, c, d;  // a: 8-bit fields, rows 0..3, or 4-bit fields; b: 8-bit fields, rows 4..7; c: 2; d: 1

  CGX_HD void clear() { a = b = c = d = V::splat(0); }

  // Packs the code of a row. Call it exactly once for each row after clear(): it adds the fields instead of ORing them,
  // because a GPU shifts and adds in one instruction.
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

  // Inverts the highest bit of all codes.
  CGX_HD void invert_highest() {
    if constexpr (kBits & 1)
      d = d ^ V::splat(0xff);
    else if constexpr (kBits & 2)
      c = c ^ V::splat(0xaaaa);
    else if constexpr (kBits == 4)
      a = a ^ V::splat(static_cast<int32_t>(0x88888888));
    else
      static_assert(kBits == 0, "not needed for 8 bits");
  }

  // Returns the code of a row.
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
