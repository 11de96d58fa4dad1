// The operations on platform CUDA.
#pragma once

#include "cuda/cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

// Returns the error of a call of CUDA, if it failed.
xla::ffi::Error error_of(const std::string& op, const cuda::Status& status);

// The same for exchanges, which allocate memory that isn't XLA's. The message says what limits it.
xla::ffi::Error engine_error_of(const std::string& op, const cuda::Status& status);

// Loads the kernels that a handler launches in a call, unless those of such a call were loaded before. XLA has made the
// program's GPU the current one.
XLA_FFI_Error* load(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);
// The handler of the initialize stage: XLA calls it before it runs any kernel of the program, or captures one.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* load(XLA_FFI_CallFrame* frame) {
  return load(kHandler, frame);
}

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_encode_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_decode_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_reduce_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_clear_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_patch_encode_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_patch_apply_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_exchange_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_begin_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_end_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_end_cuda);
// Takes the calls of both: only loads the kernels of the sum.
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_load);

}  // namespace jaxcgx
