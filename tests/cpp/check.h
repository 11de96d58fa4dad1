// CHECK(condition, context): counts the checks, and prints where and in which context a condition failed. The context
// is a std::string that is made only then.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>

namespace jaxcgx::test {

inline std::atomic<int64_t> passed = 0, failed = 0;

#define CHECK(condition, context)                                                                            \
  do {                                                                                                       \
    if (condition) {                                                                                         \
      ++jaxcgx::test::passed;                                                                                \
    } else if (++jaxcgx::test::failed <= 40) { /* a broken kernel fails everywhere: the first few will do */ \
      std::printf("%s:%d: %s [%s]\n", __FILE__, __LINE__, #condition, std::string(context).c_str());         \
    }                                                                                                        \
  } while (0)

inline int finish() {
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(passed.load()),
              static_cast<long long>(failed.load()));
  return failed > 0 ? 1 : 0;
}

}  // namespace jaxcgx::test
