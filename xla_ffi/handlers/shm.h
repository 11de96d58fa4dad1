// Exchanges over shared memory.
#pragma once

#include "shm/segments.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

// What a call of an exchange asks for.
struct SharedExchange {
  std::shared_ptr<shm::Segment> segment;
  shm::Exchange exchange;
};

// Reads and checks a call.
xla::ffi::ErrorOr<SharedExchange> read_shared(xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer y,
                                              xla::ffi::Dictionary dictionary);

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_exchange_cpu);

}  // namespace jaxcgx
