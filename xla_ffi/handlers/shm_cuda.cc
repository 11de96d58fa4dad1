// The exchanges over shared memory of arrays in a GPU's memory. They are not for CUDA graphs, because they wait for
// other processes.
#include "shm/gpu.h"

#include "handlers/cuda.h"
#include "handlers/engine_error.h"
#include "handlers/shm.h"
#include "tcp/gpu.h"

namespace jaxcgx {
namespace {

namespace ffi = xla::ffi;

ffi::Error exchange(cudaStream_t stream, ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<ffi::Token>, ffi::Dictionary dictionary) {
  const auto asked = read_shared(x, *y, dictionary);
  if (asked.has_error()) return asked.error();
  const auto [status, cuda] = shm::run(asked->segment->ring(), asked->exchange, tcp::pinned_workspaces(), stream);
  return status ? error_of("exchange", *status) : engine_error_of("exchange", cuda);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_exchange_cuda, exchange,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Token>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Token>()
                                  .Attrs());

}  // namespace jaxcgx
