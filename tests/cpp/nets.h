// Processes that exchange over TCP in one test: each is a Net.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <functional>

#include "check.h"
#include "tcp/net.h"

namespace jaxcgx::test {

using namespace std::chrono_literals;
using tcp::Net;

class Waiter {
 public:
  std::function<void(const Status&)> done() {
    return [this](const Status& status) {
      std::lock_guard<std::mutex> lock(mutex_);
      result_ = status ? status->message : "";
      turn_ = ++ended;
      changed_.notify_all();
    };
  }
  // Returns the error, or nothing.
  std::string wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, 60s, [&] { return result_.has_value(); });
    return result_.value_or("hangs");
  }
  // Returns how many had ended by then.
  int64_t turn() {
    std::lock_guard<std::mutex> lock(mutex_);
    return turn_;
  }

 private:
  static inline std::atomic<int64_t> ended = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> result_;
  int64_t turn_ = 0;
};

// The two ends of a connection over loopback.
inline std::pair<tcp::Socket, tcp::Socket> connection() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* to = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  const tcp::Socket listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  tcp::Socket first(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(bind(listener.number(), to, length) == 0 && listen(listener.number(), 1) == 0 &&
            getsockname(listener.number(), to, &length) == 0 && connect(first.number(), to, length) == 0,
        "connect");
  return {std::move(first), tcp::Socket(accept(listener.number(), nullptr, nullptr))};
}

inline int64_t lanes = 1;  // connections for the data that a device sends to a process
inline double pace = 0;    // bytes per second

inline std::shared_ptr<Net> made(int64_t process, std::vector<tcp::Connection> connections,
                                 std::chrono::milliseconds silence, int64_t devices = 1) {
  auto net = Net::make(process, std::move(connections), devices, silence, pace);
  CHECK(std::holds_alternative<std::shared_ptr<Net>>(net), "make");
  return std::get<0>(net);
}

// Processes with so many devices each, connected to every other one.
inline std::vector<std::shared_ptr<Net>> connected(int64_t processes, std::chrono::milliseconds silence = 30s,
                                                   int64_t devices = 1) {
  std::vector<std::vector<tcp::Connection>> all(processes);
  for (auto& one : all) one.resize(processes);
  for (int64_t i = 0; i < processes; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      auto beats = connection();
      all[i][j] = {"127.0.0.1", {}, std::move(beats.first)};
      all[j][i] = {"127.0.0.1", {}, std::move(beats.second)};
      for (int64_t lane = 0; lane < lanes * devices; ++lane) {
        auto data = connection();
        all[i][j].data.push_back(std::move(data.first));
        all[j][i].data.push_back(std::move(data.second));
      }
    }
  }
  std::vector<std::shared_ptr<Net>> nets;
  for (int64_t i = 0; i < processes; ++i) nets.push_back(made(i, std::move(all[i]), silence, devices));
  return nets;
}

// The group of the first devices of processes.
inline tcp::Group group(std::vector<int64_t> processes, int64_t rank, std::chrono::milliseconds timeout = 30s) {
  std::vector<int64_t> devices(processes.size());
  return {std::move(processes), std::move(devices), rank, timeout};
}

inline std::vector<int64_t> first(int64_t n) {
  std::vector<int64_t> all(n);
  for (int64_t i = 0; i < n; ++i) all[i] = i;
  return all;
}

}  // namespace jaxcgx::test
