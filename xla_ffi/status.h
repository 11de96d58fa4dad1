// What can go wrong between processes, for the engines in shm/ and tcp/.
#pragma once

#include <optional>
#include <string>
#include <variant>

namespace jaxcgx {

// Setting up failed: a value of T, or the reason why there is none.
struct Failure {
  std::string what;
};
template <class T>
using Or = std::variant<T, Failure>;

// An exchange failed: a process has gone, is late, or runs another exchange.
struct Error {
  enum class Kind { kGone, kLate, kDifferent } kind;
  std::string message;
};
using Status = std::optional<Error>;  // empty: no error

}  // namespace jaxcgx
