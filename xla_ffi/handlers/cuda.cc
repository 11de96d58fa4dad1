// Handlers only launch kernels, so that XLA can capture them into CUDA graphs.
#include "handlers/cuda.h"

#include "handlers/cuda_error.h"
#include "handlers/operations.h"

namespace jaxcgx {
namespace {

// Returns the GPU's name and architecture, such as "NVIDIA H200 (sm_90)".
std::string this_gpu() {
  int device = 0;
  cudaDeviceProp gpu;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&gpu, device) != cudaSuccess) return "unknown";
  return std::string(gpu.name) + " (sm_" + std::to_string(gpu.major) + std::to_string(gpu.minor) + ")";
}

struct Cuda {
  using Context = cudaStream_t;

  static int64_t workspace_bytes(const Layout& layout, int64_t batch, int64_t payloads, bool encodes) {
    return cuda::workspace_bytes(layout, batch, payloads, encodes);
  }

  // `where` is in device memory, so the kernel checks it. If it is out of range, the result is NaNs.
  static ffi::Error check_where(const int32_t*, const Message&, int64_t, bool) { return ffi::Error::Success(); }

  static ffi::Error encode(Context stream, const Encode& args) {
    return error_of("encode", cuda::run(cuda::encode, args, stream));
  }
  static ffi::Error decode(Context stream, const Decode& args) {
    return error_of("decode", cuda::run(cuda::decode, args, stream));
  }
  static ffi::Error reduce(Context stream, const Reduce& args) {
    return error_of("reduce", cuda::run(cuda::reduce, args, stream));
  }
  static ffi::Error clear(Context stream, const Clear& args) {
    return error_of("clear", cuda::run(cuda::clear, args, stream));
  }
};

}  // namespace

ffi::Error error_of(const std::string& op, const cuda::Status& status) {
  switch (status.error) {
    case cudaSuccess:
      return ffi::Error::Success();
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        no_code_message(op, JAXCGX_CUDA_ARCHITECTURES, this_gpu()));
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion: {
      int driver = 0;  // stays 0 without a driver; the call works without a GPU, too
      cudaDriverGetVersion(&driver);
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, old_driver_message(op, CUDART_VERSION, driver));
    }
    default:
      return ffi::Error::Internal(
          failed_call_message(op, status.call, cudaGetErrorName(status.error), cudaGetErrorString(status.error)));
  }
}

#define CGX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_encode_cuda, encode<Cuda>, CGX_ON_STREAM, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_decode_cuda, decode<Cuda>, CGX_ON_STREAM, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_reduce_cuda, reduce<Cuda>, CGX_ON_STREAM, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_clear_cuda, clear<Cuda>, CGX_ON_STREAM, {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxcgx
