#include "tcp/process.h"

namespace jaxcgx::tcp {

std::shared_ptr<Net>& the_net() {
  static auto& net = *new std::shared_ptr<Net>;
  return net;
}

Or<int> listen() {
  if (the_net()) return Failure{"this process listens already"};
  auto made = Net::listen();
  if (const auto* failure = std::get_if<Failure>(&made)) return *failure;
  the_net() = std::get<0>(made);
  return the_net()->port();
}

std::optional<Failure> connect(int64_t process, std::vector<Address> addresses, const std::string& token,
                               std::chrono::milliseconds timeout) {
  if (!the_net()) return Failure{"this process does not listen"};
  return the_net()->connect(process, std::move(addresses), token, timeout);
}

}  // namespace jaxcgx::tcp
