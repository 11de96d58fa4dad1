// Converts errors of the engines in shm/ and tcp/ to XLA's errors.
#pragma once

#include <string>

#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

inline xla::ffi::Error error_of(const std::string& op, const Error& error) {
  const auto code = error.kind == Error::Kind::kGone   ? xla::ffi::ErrorCode::kUnavailable
                    : error.kind == Error::Kind::kLate ? xla::ffi::ErrorCode::kDeadlineExceeded
                                                       : xla::ffi::ErrorCode::kInvalidArgument;
  return xla::ffi::Error(code, "jaxcgx_" + op + ": " + error.message);
}

}  // namespace jaxcgx
