// The operations on platform CPU.
#pragma once

#include "cpu/cpu.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

inline cpu::Pool pool_of(xla::ffi::ThreadPool& threads) {
  return {threads.num_threads(), [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); }};
}

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_encode_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_decode_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_reduce_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_clear_cpu);

}  // namespace jaxcgx
