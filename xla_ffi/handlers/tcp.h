// Exchanges over TCP.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_begin_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_end_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_end_cpu);

}  // namespace jaxcgx
