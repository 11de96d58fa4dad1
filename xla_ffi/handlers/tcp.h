// Exchanges over TCP: the connections of this process, and the handlers.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "tcp/net.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

namespace ffi = xla::ffi;

// The port at which this process waits for the others, once.
tcp::Or<int> tcp_listen();
// Returns when all processes are connected.
std::optional<tcp::Failure> tcp_connect(int64_t process, std::vector<tcp::Address> addresses, const std::string& token,
                                        double timeout);

// Handlers have no state of their own. It is never destroyed: a program may still run when the process ends.
std::shared_ptr<tcp::Net>& the_net();

// What all exchanges have. `who`: this process's rank, and then the process of every rank.
ffi::ErrorOr<tcp::Exchange> exchange_among(const std::string& op, const int32_t* who, int64_t ranks,
                                           int64_t timeout_ms);

ffi::Error error_of(const tcp::Error& error);
ffi::Future failed(const ffi::Error& error);

// Results that are complete when all parts of the work are. XLA goes on with the program in the thread that completes
// them, hence in one that nobody else needs.
class Completion {
 public:
  explicit Completion(int64_t parts) : left_(parts) {}

  // One more, while there are others.
  void add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++left_;
  }
  void part(const tcp::Status& status = std::nullopt);
  ffi::Future future() { return std::move(future_); }

 private:
  std::mutex mutex_;
  int64_t left_;
  std::optional<ffi::Error> error_;
  ffi::Promise promise_;
  ffi::Future future_{promise_};
};

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_cpu);

}  // namespace jaxcgx
