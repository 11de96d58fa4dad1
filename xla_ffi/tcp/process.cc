#include "tcp/process.h"

#include <pthread.h>

#include <map>
#include <mutex>

namespace jaxcgx::tcp {

std::shared_ptr<Net>& the_net() {
  static auto& net = *new std::shared_ptr<Net>;
  return net;
}

Workspaces& the_workspaces() {
  static auto& all = *new std::shared_ptr<Workspaces>(std::make_shared<Workspaces>());
  return *all;
}

namespace {

struct Begun {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Running>> sums;
  int64_t last = 0;
};
Begun& begun() {
  static auto& all = *new Begun;
  return all;
}

}  // namespace

int64_t keep(std::shared_ptr<Running> running) {
  std::lock_guard<std::mutex> lock(begun().mutex);
  begun().sums.emplace(++begun().last, std::move(running));
  return begun().last;
}

std::shared_ptr<Running> take(int64_t ticket) {
  std::lock_guard<std::mutex> lock(begun().mutex);
  const auto found = begun().sums.extract(ticket);
  return found ? found.mapped() : nullptr;
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
