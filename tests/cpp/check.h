// CHECK and checks of errors, which count the checks and print where one failed. And threads as ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace jaxcgx::test {

inline std::atomic<int64_t> passed = 0, failed = 0;

// The context is a std::string that is made only if the condition fails.
#define CHECK(condition, context)                                                                            \
  do {                                                                                                       \
    if (condition) {                                                                                         \
      ++jaxcgx::test::passed;                                                                                \
    } else if (++jaxcgx::test::failed <= 40) { /* a broken kernel fails everywhere: the first few will do */ \
      std::printf("%s:%d: %s [%s]\n", __FILE__, __LINE__, #condition, std::string(context).c_str());         \
    }                                                                                                        \
  } while (0)

// Whether a message has any of these words.
template <class... Words>
bool has(const std::string& message, const Words&... words) {
  return ((message.find(words) != std::string::npos) || ...);
}
// Check that the message of an error is empty, or has any of these words.
#define CHECK_NO_ERROR(error)              \
  do {                                     \
    const std::string the_error = (error); \
    CHECK(the_error.empty(), the_error);   \
  } while (0)
#define CHECK_ERROR(error, ...)                                  \
  do {                                                           \
    const std::string the_error = (error);                       \
    CHECK(jaxcgx::test::has(the_error, __VA_ARGS__), the_error); \
  } while (0)

inline int finish() {
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(passed.load()),
              static_cast<long long>(failed.load()));
  return failed > 0 ? 1 : 0;
}

// Runs body(rank) in a thread for each of several ranks.
inline void each_rank(int64_t ranks, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jaxcgx::test
