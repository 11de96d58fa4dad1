// The bytes of exchanges whose results each rank can check alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jaxcgx::test {

// Makes what rank `from` sends to rank `to` in exchange number `number`, from offset `at` on. Sanitizers don't check
// this function, because that would take most of a test's time. They check the allocation before and the reads after.
[[gnu::no_sanitize("address"), gnu::no_sanitize("thread"), gnu::no_sanitize("undefined")]] inline void sent(
    int64_t number, int64_t from, int64_t to, int64_t at, uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i, ++at)
    bytes[i] = static_cast<uint8_t>(number * 31 + from * 7 + to * 3 + at + (at >> 8) * 5 + (at >> 16) * 11);
}

inline bool are_sent(int64_t number, int64_t from, int64_t to, const uint8_t* bytes, int64_t count) {
  uint8_t part[4096];
  for (int64_t at = 0; at < count; at += sizeof part) {
    const int64_t some = std::min<int64_t>(count - at, sizeof part);
    sent(number, from, to, at, part, some);
    if (std::memcmp(bytes + at, part, static_cast<size_t>(some)) != 0) return false;
  }
  return true;
}

}  // namespace jaxcgx::test
