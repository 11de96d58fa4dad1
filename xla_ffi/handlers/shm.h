// Exchanges over shared memory: the segments of this process, by number, and the handler.
#pragma once

#include <string>

#include "shm/segment.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

shm::Or<int64_t> shm_attach(const std::string& name, int64_t rank, int64_t ranks, double timeout);
void shm_detach(int64_t segment);

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_exchange_cpu);

}  // namespace jaxcgx
