// Exchanges over shared memory.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_exchange_cpu);

}  // namespace jaxcgx
