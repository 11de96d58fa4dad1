#include "handlers/tcp.h"

#include <cstring>
#include <functional>
#include <limits>

#include "cpu/pages.h"
#include "handlers/cpu.h"
#include "handlers/engine_error.h"
#include "handlers/tcp_arguments.h"
#include "tcp/process.h"
#include "tcp/threads.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxcgx {
namespace {

// Makes this thread flush denormals, as XLA's threads do. XLA continues a program in the thread that completes a
// result, and the program's results must not depend on the thread.
void flush_denormals() {
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  __asm__ volatile("msr fpcr, %0" ::"r"(mode | uint64_t{1} << 24));
#endif
}

// Returns a function that completes a result, after `last`. It does so in a thread without other work, because XLA
// continues the program in that thread.
tcp::Done completes(ffi::Promise promise, std::function<void()> last = nullptr) {
  return [promise, last = std::move(last)](const Status& status) {
    static auto& threads = *new tcp::Threads(std::numeric_limits<int64_t>::max());
    threads.run([promise, status, last]() mutable {
      flush_denormals();
      if (status) return promise.SetError(error_of("tcp", *status));
      if (last) last();
      promise.SetAvailable();
    });
  };
}

ffi::Future failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

ffi::Future available() {
  ffi::Promise promise;
  promise.SetAvailable();
  return ffi::Future(promise);
}

ffi::Future exchange(int32_t device, ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::Token>, ffi::Dictionary dictionary) {
  auto asked = read_exchange(device, x, dictionary);
  if (asked.has_error()) return failed(asked.error());
  if (ffi::Error error = check_result(*asked, x, *y); error.failure()) return failed(error);
  asked->collective.out = static_cast<uint8_t*>(y->untyped_data());
  cpu::ask_for_large_pages(asked->collective.out, static_cast<int64_t>(y->size_bytes()));
  ffi::Promise promise;
  ffi::Future future(promise);
  tcp::run(tcp::the_net(), asked->group, asked->collective, completes(promise));
  return future;
}

ffi::Future exchange_begin(int32_t device, ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> ticket,
                           ffi::Result<ffi::Token>, ffi::Dictionary dictionary) {
  const auto asked = read_transfer(device, x, *ticket, dictionary, tcp::the_workspaces());
  if (asked.has_error()) return failed(asked.error());
  std::memcpy(asked->transfer->in(), x.untyped_data(), static_cast<size_t>(asked->bytes));
  asked->transfer->begin(tcp::the_net(), asked->group);
  tcp::write_ticket(tcp::keep(asked->transfer, device), 1, asked->words);
  return available();
}

ffi::Future exchange_end(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary dictionary) {
  const auto asked = read_transfer_end(args, rets, dictionary);
  if (asked.has_error()) return failed(asked.error());
  const uint64_t ticket = tcp::ticket_of(asked->words);
  if (ticket == 0) {
    std::memset(asked->out, 0, static_cast<size_t>(asked->bytes));
    return available();
  }
  const auto transfer = transfer_of(*asked, ticket, device);
  if (transfer.has_error()) return failed(transfer.error());
  ffi::Promise promise;
  ffi::Future future(promise);
  (*transfer)->end(completes(promise, [transfer = *transfer, out = asked->out] {
    std::memcpy(out, transfer->out(), static_cast<size_t>(transfer->bytes()));
  }));
  return future;
}

ffi::Future begin(int32_t device, ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary dictionary) {
  auto asked = read_begin(device, args, rets, dictionary, tcp::the_workspaces());
  if (asked.has_error()) return failed(asked.error());
  const int64_t batch = asked->sum.batch;
  if (batch == 0) return available();
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto& net = tcp::the_net();
  std::shared_ptr<tcp::Running> running;
  if (asked->inside) {
    running = tcp::begin_inside(net, asked->group, *asked->inside, std::move(asked->sum), std::move(asked->first),
                                completes(promise));
  } else {
    running = tcp::begin(net, asked->group, std::move(asked->sum), std::move(asked->first), pool_of(threads));
    promise.SetAvailable();
  }
  tcp::write_ticket(tcp::keep(std::move(running), device), batch, asked->words);
  return future;
}

ffi::Future end(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary dictionary) {
  auto asked = read_end(args, rets, dictionary);
  if (asked.has_error()) return failed(asked.error());
  const uint64_t ticket = asked->message.batch == 0 ? 0 : tcp::ticket_of(asked->words);
  if (ticket == 0) {
    each_output(*asked, [](void* out, int64_t bytes) { std::memset(out, 0, static_cast<size_t>(bytes)); });
    return available();
  }
  const auto running = sum_of(*asked, ticket, device);
  if (running.has_error()) return failed(running.error());
  ffi::Promise promise;
  ffi::Future future(promise);
  tcp::end(*running, std::move(asked->first), completes(promise));
  return future;
}

}  // namespace

#define CGX_ON_DEVICE ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_tcp_exchange_cpu, exchange,
    CGX_ON_DEVICE.Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_tcp_exchange_begin_cpu, exchange_begin,
    CGX_ON_DEVICE.Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_end_cpu, exchange_end,
                              CGX_ON_DEVICE.RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_cpu, begin,
                              CGX_ON_DEVICE.Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_end_cpu, end, CGX_ON_DEVICE.RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxcgx
