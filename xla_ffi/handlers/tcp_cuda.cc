// The exchanges over TCP of arrays in a GPU's memory. They are not for CUDA graphs: a handler reads its ticket, and
// waits for other processes.
#include <future>

#include "handlers/cuda.h"
#include "handlers/engine_error.h"
#include "handlers/tcp_arguments.h"
#include "tcp/gpu.h"
#include "tcp/process.h"

namespace jaxcgx {
namespace {

// Returns an error. The other processes learn that this one leaves, because they may wait for it.
ffi::Error leaving(ffi::Error error) {
  tcp::leave();
  return error;
}

ffi::Error as_error(const std::string& op, const tcp::Gpu::Trouble& trouble) {
  if (trouble.status) return error_of("tcp", *trouble.status);
  return trouble ? engine_error_of(op, trouble.cuda) : ffi::Error::Success();
}

// Copies bytes, and waits for the stream.
ffi::Error copy_now(const std::string& op, void* to, const void* from, size_t bytes, cudaStream_t stream) {
  cuda::Status s{"cudaMemcpyAsync", cudaSuccess};
  if (bytes > 0) s.error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  if (s.error == cudaSuccess) s = {"cudaStreamSynchronize", cudaStreamSynchronize(stream)};
  return s.error == cudaSuccess ? ffi::Error::Success() : leaving(engine_error_of(op, s));
}

// The bytes go through pinned memory, and the stream waits for them.
ffi::Error exchange(int32_t device, cudaStream_t stream, ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<ffi::Token>, ffi::Dictionary dictionary) {
  const std::string op = "tcp_exchange";
  auto asked = read_exchange(device, x, dictionary);
  if (asked.has_error()) return asked.error();
  CGX_RETURN_IF_ERROR(check_result(*asked, x, *y));
  auto& memory = tcp::pinned_workspaces();
  const auto in = memory.take(static_cast<int64_t>(x.size_bytes()));
  const auto out = memory.take(static_cast<int64_t>(y->size_bytes()));
  if (in == nullptr || out == nullptr)
    return leaving(engine_error_of(op, cuda::Status{"cudaHostAlloc", cudaErrorMemoryAllocation}));
  CGX_RETURN_IF_ERROR(copy_now(op, in.get(), asked->collective.in, x.size_bytes(), stream));
  std::promise<Status> done;
  auto* const to = static_cast<uint8_t*>(y->untyped_data());
  asked->collective.in = in.get(), asked->collective.out = out.get();
  tcp::run(tcp::the_net(), asked->group, asked->collective, [&](const Status& status) { done.set_value(status); });
  if (const Status status = done.get_future().get()) return error_of("tcp", *status);
  return copy_now(op, to, out.get(), y->size_bytes(), stream);
}

// Reads a ticket from the GPU's memory.
ffi::Error read_ticket(const std::string& op, const uint32_t* words, cudaStream_t stream, uint64_t* ticket) {
  const auto here = tcp::pinned_workspaces().take(tcp::kTicketBytes);
  if (here == nullptr) return leaving(engine_error_of(op, cuda::Status{"cudaHostAlloc", cudaErrorMemoryAllocation}));
  CGX_RETURN_IF_ERROR(copy_now(op, here.get(), words, tcp::kTicketBytes, stream));
  *ticket = tcp::ticket_of(reinterpret_cast<const uint32_t*>(here.get()));
  return ffi::Error::Success();
}

ffi::Error exchange_begin(int32_t device, cudaStream_t stream, ffi::AnyBuffer x, ffi::Token,
                          ffi::Result<ffi::AnyBuffer> ticket, ffi::Result<ffi::Token>, ffi::Dictionary dictionary) {
  const std::string op = "tcp_exchange_begin";
  auto& memory = tcp::pinned_workspaces();
  const auto asked = read_transfer(device, x, *ticket, dictionary, memory, "; let the host pin more (ulimit -l)");
  if (asked.has_error()) return leaving(asked.error());
  const auto words = memory.take(tcp::kTicketBytes);
  if (words == nullptr) return leaving(engine_error_of(op, cuda::Status{"cudaHostAlloc", cudaErrorMemoryAllocation}));
  CGX_RETURN_IF_ERROR(copy_now(op, asked->transfer->in(), x.untyped_data(), x.size_bytes(), stream));
  asked->transfer->begin(tcp::the_net(), asked->group);
  tcp::write_ticket(tcp::keep(asked->transfer, device), 1, reinterpret_cast<uint32_t*>(words.get()));
  return copy_now(op, asked->words, words.get(), tcp::kTicketBytes, stream);
}

ffi::Error exchange_end(int32_t device, cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary dictionary) {
  const std::string op = "tcp_exchange_end";
  const auto asked = read_transfer_end(args, rets, dictionary);
  if (asked.has_error()) return asked.error();
  const auto bytes = static_cast<size_t>(asked->bytes);
  uint64_t ticket = 0;
  CGX_RETURN_IF_ERROR(read_ticket(op, asked->words, stream, &ticket));
  if (ticket == 0) {
    const cudaError_t error = bytes > 0 ? cudaMemsetAsync(asked->out, 0, bytes, stream) : cudaSuccess;
    return error == cudaSuccess ? ffi::Error::Success() : engine_error_of(op, cuda::Status{"cudaMemsetAsync", error});
  }
  const auto transfer = transfer_of(*asked, ticket, device);
  if (transfer.has_error()) return transfer.error();
  std::promise<Status> done;
  (*transfer)->end([&](const Status& status) { done.set_value(status); });
  if (const Status status = done.get_future().get()) return error_of("tcp", *status);
  return copy_now(op, asked->out, (*transfer)->out(), bytes, stream);
}

ffi::Error begin(int32_t device, cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary dictionary) {
  const std::string op = "tcp_allreduce";
  auto asked =
      read_begin(device, args, rets, dictionary, tcp::pinned_workspaces(), "; let the host pin more (ulimit -l)");
  if (asked.has_error()) return leaving(asked.error());
  const int64_t batch = asked->sum.batch;
  if (batch == 0) return ffi::Error::Success();
  if (asked->inside) return invalid(op, "devices add their leaves in memory only on CPUs");
  const auto gpu = std::make_shared<tcp::Gpu>(device, stream);
  asked->sum.device = gpu;
  auto [running, trouble] = tcp::Gpu::begin(tcp::the_net(), asked->group, std::move(asked->sum), asked->first);
  if (trouble) return as_error(op, trouble);
  const cuda::Status written = gpu->write(tcp::keep(std::move(running), device), batch, asked->words);
  return written.call == nullptr ? ffi::Error::Success() : leaving(engine_error_of(op, written));
}

ffi::Error end(int32_t device, cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary dictionary) {
  const std::string op = "tcp_allreduce_end";
  auto asked = read_end(args, rets, dictionary);
  if (asked.has_error()) return asked.error();
  uint64_t ticket = 0;
  if (asked->message.batch > 0) CGX_RETURN_IF_ERROR(read_ticket(op, asked->words, stream, &ticket));
  if (ticket == 0) {
    cudaError_t error = cudaSuccess;
    each_output(*asked, [&](void* out, int64_t bytes) {
      if (error == cudaSuccess && bytes > 0) error = cudaMemsetAsync(out, 0, static_cast<size_t>(bytes), stream);
    });
    return error == cudaSuccess ? ffi::Error::Success() : engine_error_of(op, cuda::Status{"cudaMemsetAsync", error});
  }
  auto running = sum_of(*asked, ticket, device);
  if (running.has_error()) return running.error();
  return as_error(op, tcp::Gpu::end(tcp::the_net(), *running, asked->first, stream));
}

ffi::Error load_sum(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary dictionary) {
  const std::string op = "tcp_allreduce";
  Attributes attributes(op, dictionary);
  const bool two_shot = attributes.get<bool>("two_shot"), feedback = attributes.get<bool>("feedback");
  const auto message = attributes.message();
  if (message.has_error()) return leaving(message.error());
  const cuda::Status status = tcp::Gpu::load(*message->layout, message->batch, two_shot, feedback);
  return status.call == nullptr ? ffi::Error::Success() : leaving(engine_error_of(op, status));
}

}  // namespace

#define CGX_ON_GPU ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_tcp_exchange_cuda, exchange,
    CGX_ON_GPU.Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_tcp_exchange_begin_cuda, exchange_begin,
    CGX_ON_GPU.Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_end_cuda, exchange_end,
                              CGX_ON_GPU.RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_cuda, begin, CGX_ON_GPU.RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_end_cuda, end, CGX_ON_GPU.RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_load, load_sum,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxcgx
