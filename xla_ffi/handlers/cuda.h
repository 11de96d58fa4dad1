// The operations on platform CUDA.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_encode_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_decode_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_reduce_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_clear_cuda);

}  // namespace jaxcgx
