#include "tcp/process.h"

#include <pthread.h>

namespace jaxcgx::tcp {

std::shared_ptr<Net>& the_net() {
  static auto& net = *new std::shared_ptr<Net>;
  return net;
}

Workspaces& the_workspaces() {
  static auto& all = *new std::shared_ptr<Workspaces>(std::make_shared<Workspaces>());
  return *all;
}

std::optional<Failure> start(int64_t process, std::vector<Connection> connections, std::chrono::milliseconds silence) {
  if (the_net()) return Failure{"this process has connected already"};
  auto made = Net::make(process, std::move(connections), silence);
  if (const auto* failure = std::get_if<Failure>(&made)) return *failure;
  the_net() = std::get<0>(made);
  pthread_atfork(nullptr, nullptr, [] { the_net()->forget(); });
  return std::nullopt;
}

void leave() {
  if (the_net() && the_net()->process() >= 0) the_net()->leave();
}

}  // namespace jaxcgx::tcp
