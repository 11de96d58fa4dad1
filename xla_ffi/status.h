// Errors between processes, for the engines in shm/ and tcp/.
#pragma once

#include <optional>
#include <string>
#include <variant>

namespace jaxcgx {

// The result of a setup step: a T, or a Failure with the reason.
struct Failure {
  std::string what;
};
template <class T>
using Or = std::variant<T, Failure>;

// The error of an exchange. The other process has gone, is late, or runs a different exchange.
struct Error {
  enum class Kind { kGone, kLate, kDifferent } kind;
  std::string message;
};
using Status = std::optional<Error>;  // empty: no error

}  // namespace jaxcgx
