// Exchanges over TCP: the connections of this process, and the handlers.
#pragma once

#include <string>
#include <vector>

#include "tcp/net.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

// The port at which this process waits for the others, once.
tcp::Or<int> tcp_listen();
// Returns when all processes are connected.
std::optional<tcp::Failure> tcp_connect(int64_t process, std::vector<tcp::Address> addresses, const std::string& token, double timeout);

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_cpu);

}  // namespace jaxcgx
