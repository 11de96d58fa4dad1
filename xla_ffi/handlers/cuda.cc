// Handlers only launch kernels, so that XLA can capture them into CUDA graphs. Before, they load these kernels.
#include "handlers/cuda.h"

#include <mutex>
#include <unordered_set>
#include <utility>

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

// What the kernels of a call depend on, as bytes: the handler, the GPU, and the attributes, none of which is a string.
// Calls without attributes depend on the types of their buffers. XLA calls the initialize stage in each run of a
// program, and a handler can have no state (layout_of).
class Key {
 public:
  Key(XLA_FFI_Handler* handler, const XLA_FFI_CallFrame& frame) {
    int device = 0;
    cudaGetDevice(&device);  // the error of a machine without a driver is that of the first load
    add(&handler, sizeof handler);
    add(&device, sizeof device);
    add_attributes(frame.attrs);
    if (frame.attrs.size > 0) return;
    for (int64_t i = 0; i < frame.args.size; ++i) add_buffer(frame.args.args[i]);
    for (int64_t i = 0; i < frame.rets.size; ++i) add_buffer(frame.rets.rets[i]);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void add(const void* at, size_t size) {
    bytes_.append(reinterpret_cast<const char*>(&size), sizeof size);
    bytes_.append(static_cast<const char*>(at), size);
  }
  void add_numbers(XLA_FFI_DataType type, const void* at, size_t count) {
    add(at, count * ffi::ByteWidth(static_cast<ffi::DataType>(type)));
  }
  void add_attributes(const XLA_FFI_Attrs& all) {
    for (int64_t i = 0; i < all.size; ++i) {
      const void* const at = all.attrs[i];
      if (all.types[i] == XLA_FFI_AttrType_DICTIONARY) {
        add_attributes(*static_cast<const XLA_FFI_Attrs*>(at));
      } else if (all.types[i] == XLA_FFI_AttrType_ARRAY) {
        const auto& array = *static_cast<const XLA_FFI_Array*>(at);
        add_numbers(array.dtype, array.data, array.size);
      } else if (all.types[i] == XLA_FFI_AttrType_SCALAR) {
        const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(at);
        add_numbers(scalar.dtype, scalar.value, 1);
      }
    }
  }
  void add_buffer(const void* at) {
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(at);
    add(&buffer.dtype, sizeof buffer.dtype);
    add(buffer.dims, static_cast<size_t>(buffer.rank) * sizeof(int64_t));
  }

  std::string bytes_;
};

// Patches of words. A word has the size of an element.

template <class Buffer>
ffi::Error expect_size(const char* op, const char* name, const Buffer& buffer, int64_t count) {
  return expect_count(op, name, buffer.element_count(), static_cast<size_t>(count));
}

ffi::ErrorOr<int64_t> blocks_of(const char* op, const ffi::AnyBuffer& old, const ffi::AnyBuffer& now) {
  const auto width = ffi::ByteWidth(old.element_type());
  if (width == 0 || width > 8 || (width & (width - 1)) != 0)
    return refused(op, "words of " + std::to_string(width) + " bytes");
  if (old.element_type() != now.element_type() || old.element_count() != now.element_count())
    return refused(op, "old and new words differ in their number or size");
  return div_up(static_cast<int64_t>(old.element_count()), kPatchBlock);
}

using Heads = ffi::Buffer<ffi::U16>;
using Bytes = ffi::Buffer<ffi::U8>;

ffi::Error encode_patch(cudaStream_t stream, ffi::AnyBuffer old, ffi::AnyBuffer now, ffi::Result<Heads> heads,
                        ffi::Result<Bytes> slots) {
  const char* const op = "patch_encode";
  const auto blocks = blocks_of(op, old, now);
  if (blocks.has_error()) return blocks.error();
  const auto width = static_cast<int64_t>(ffi::ByteWidth(old.element_type()));
  CGX_RETURN_IF_ERROR(expect_size(op, "heads", *heads, 3 * *blocks));
  CGX_RETURN_IF_ERROR(expect_size(op, "slots", *slots, *blocks * kPatchBlock * width));
  if (*blocks == 0) return error_of(op, cuda::launch_nothing(stream));
  const cuda::PatchEncode args{static_cast<int64_t>(old.element_count()),
                               width,
                               old.untyped_data(),
                               now.untyped_data(),
                               reinterpret_cast<PatchHead*>(heads->typed_data()),
                               slots->typed_data()};
  return error_of(op, cuda::encode_patch(args, stream));
}

ffi::Error apply_patch(cudaStream_t stream, ffi::AnyBuffer old, Heads heads, ffi::Buffer<ffi::S64> begins, Bytes data,
                       ffi::Result<ffi::AnyBuffer> now, ffi::Result<Bytes> fits) {
  const char* const op = "patch_apply";
  const auto blocks = blocks_of(op, old, *now);
  if (blocks.has_error()) return blocks.error();
  CGX_RETURN_IF_ERROR(expect_size(op, "heads", heads, 3 * *blocks));
  CGX_RETURN_IF_ERROR(expect_size(op, "begins", begins, *blocks));
  CGX_RETURN_IF_ERROR(expect_size(op, "fits", *fits, *blocks));
  if (*blocks == 0) return error_of(op, cuda::launch_nothing(stream));
  const cuda::PatchApply args{static_cast<int64_t>(old.element_count()),
                              static_cast<int64_t>(ffi::ByteWidth(old.element_type())),
                              old.untyped_data(),
                              reinterpret_cast<const PatchHead*>(heads.typed_data()),
                              begins.typed_data(),
                              data.typed_data(),
                              static_cast<int64_t>(data.element_count()),
                              now->untyped_data(),
                              fits->typed_data()};
  return error_of(op, cuda::apply_patch(args, stream));
}

}  // namespace

XLA_FFI_Error* load(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Extension_Base* const extension = frame->extension_start;
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) return handler(frame);  // asks for traits
  static std::mutex mutex;
  static auto& loaded = *new std::unordered_set<std::string>;  // a program may still run when the process ends
  const Key key(handler, *frame);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (loaded.count(key.bytes()) > 0) return nullptr;
  }
  const cuda::Loading loading;
  const auto stage = std::exchange(frame->stage, XLA_FFI_ExecutionStage_EXECUTE);
  XLA_FFI_Error* const error = handler(frame);
  frame->stage = stage;
  const std::lock_guard<std::mutex> lock(mutex);
  make_room(loaded);
  if (error == nullptr) loaded.insert(key.bytes());
  return error;
}

ffi::Error error_of(const std::string& op, const cuda::Status& status) {
  if (status.error == cudaSuccess) return ffi::Error::Success();
  const std::string prefix = "jaxcgx_" + op + ": ";
  switch (status.error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        prefix + "this build has code for " + JAXCGX_CUDA_ARCHITECTURES + "; this GPU is " +
                            this_gpu() +
                            ": build jaxcgx with a CUDA compiler that knows that GPU, or name its architecture in "
                            "CMAKE_CUDA_ARCHITECTURES");
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion: {
      // To run machine code, a driver must support the major version of the CUDA release that the build was made with.
      // To compile PTX, it must support that release itself.
      const auto release = [](int version) {
        return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
      };
      int driver = 0;  // stays 0 without a driver; the call works without a GPU, too
      cudaDriverGetVersion(&driver);
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        prefix + "this build is of CUDA " + release(CUDART_VERSION) +
                            "; this machine's driver is for CUDA " + release(driver) +
                            " at most: update the driver, or build jaxcgx with nvcc " + release(driver) +
                            " or earlier");
    }
    default:
      return ffi::Error::Internal(prefix + status.call + " failed with " + cudaGetErrorName(status.error) + " (" +
                                  cudaGetErrorString(status.error) + ")");
  }
}

ffi::Error engine_error_of(const std::string& op, const cuda::Status& status) {
  const std::string failed = "jaxcgx_" + op + ": " + (status.call == nullptr ? "" : status.call);
  if (status.error == cudaErrorMemoryAllocation) {
    return ffi::Error(
        ffi::ErrorCode::kResourceExhausted,
        failed +
            ": no memory; leave more of the GPU's to jaxcgx (XLA_PYTHON_CLIENT_MEM_FRACTION), and let the "
            "host pin more (ulimit -l)");
  }
  if (status.error == cudaErrorNotSupported) {
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        failed + ": this GPU and its driver have no memory pools; update the driver, or give the axis's name alone");
  }
  return error_of(op, status);
}

#define CGX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
#define CGX_MESSAGE CGX_ON_STREAM.RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_encode_cuda, encode<Cuda>, CGX_MESSAGE, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_decode_cuda, decode<Cuda>, CGX_MESSAGE, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_reduce_cuda, reduce<Cuda>, CGX_MESSAGE, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_clear_cuda, clear<Cuda>, CGX_MESSAGE, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_patch_encode_cuda, encode_patch,
                              CGX_ON_STREAM.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<Heads>().Ret<Bytes>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_patch_apply_cuda, apply_patch,
                              CGX_ON_STREAM.Arg<ffi::AnyBuffer>()
                                  .Arg<Heads>()
                                  .Arg<ffi::Buffer<ffi::S64>>()
                                  .Arg<Bytes>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Bytes>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxcgx
