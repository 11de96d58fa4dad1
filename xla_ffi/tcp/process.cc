#include "tcp/process.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>

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

struct AllBegun {
  std::mutex mutex;
  std::map<std::pair<uint64_t, int32_t>, Begun> all;  // by ticket and device
  uint64_t last = uint64_t{std::random_device()()} << 32;
};
AllBegun& the_begun() {
  static auto& all = *new AllBegun;
  return all;
}

}  // namespace

int64_t begun() {
  std::lock_guard<std::mutex> lock(the_begun().mutex);
  return static_cast<int64_t>(the_begun().all.size());
}

uint64_t keep(Begun begun, int32_t device) {
  std::lock_guard<std::mutex> lock(the_begun().mutex);
  const uint64_t ticket = ++the_begun().last;
  the_begun().all.emplace(std::pair{ticket, device}, std::move(begun));
  return ticket;
}

Begun take(uint64_t ticket, int32_t device) {
  std::lock_guard<std::mutex> lock(the_begun().mutex);
  const auto found = the_begun().all.extract({ticket, device});
  return found ? found.mapped() : Begun();
}

std::optional<Failure> start(int64_t process, std::vector<Connection> connections, int64_t devices,
                             std::chrono::milliseconds silence, double pace) {
  if (the_net()) return Failure{"this process has connected already"};
  auto made = Net::make(process, std::move(connections), devices, silence, pace);
  if (const auto* failure = std::get_if<Failure>(&made)) return *failure;
  the_net() = std::get<0>(made);
  pthread_atfork(nullptr, nullptr, [] { the_net()->forget(); });
  return std::nullopt;
}

namespace {

std::mutex names_mutex;
std::vector<int64_t>& names() {
  static auto& all = *new std::vector<int64_t>;
  return all;
}

}  // namespace

void name_devices(std::vector<int64_t> ordinals) {
  std::lock_guard<std::mutex> lock(names_mutex);
  names() = std::move(ordinals);
}

int64_t number_of(int64_t ordinal) {
  std::lock_guard<std::mutex> lock(names_mutex);
  const auto found = std::find(names().begin(), names().end(), ordinal);
  return found == names().end() ? -1 : found - names().begin();
}

void leave() {
  if (the_net() && the_net()->process() >= 0) the_net()->leave();
}

void interrupt() {
  if (the_net() && the_net()->process() >= 0) the_net()->interrupt();
}

}  // namespace jaxcgx::tcp
