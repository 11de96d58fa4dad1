#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_encode_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_decode_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_reduce_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_clear_cpu);

}  // namespace jaxcgx
