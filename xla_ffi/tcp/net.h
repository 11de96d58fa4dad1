// Exchanges among processes, each of which has a TCP connection to every other.
//
// One thread, which nobody else waits for, moves what is to be sent and what is to come, on all connections at once: a
// link is used in both directions. Memory is the caller's, to send from and to receive into; nothing is copied in
// between.
//
// Two processes begin the exchanges that they share in the same order. So what comes on a connection belongs to an
// exchange that has begun here, too, or to one that will, and then it waits in the socket, and behind it what follows:
// nothing is kept that nobody has asked for, and what an exchange still lacks never stands behind what belongs to a
// later one.
//
// What comes is never trusted: it is compared with what is expected, and decides neither a size nor an address. No wait
// is without an end: a process that ended, left or gave up, and one that doesn't come, is an error that names it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "status.h"

namespace jaxcgx::tcp {

struct Address {
  std::string host;
  int port;
};

// A socket, closed with its owner.
class Socket {
 public:
  explicit Socket(int number = -1) : number_(number) {}
  Socket(Socket&& other) : number_(other.number_) { other.number_ = -1; }
  Socket& operator=(Socket&& other) {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Socket();

  int number() const { return number_; }

 private:
  int number_;
};

// The ranks that take part in an exchange.
struct Group {
  std::vector<int64_t> processes;  // of the ranks, this one among them
  int64_t rank;                    // of this process
  std::chrono::milliseconds timeout;

  int64_t size() const { return static_cast<int64_t>(processes.size()); }
};

// What a process takes part in together with others. Between two of them, slots tell messages apart.
struct Exchange {
  struct Receive {
    int64_t rank, slot;
    uint8_t* data;
    int64_t bytes;
  };

  std::string name;  // for errors
  int64_t kind;      // on which all must agree
  Group group;
  std::vector<Receive> receives;
  int64_t sends;  // how many there will be

  // By the thread that moves the bytes, which must not be kept waiting: that receives[i] is complete; and, once and
  // last, that everything is, or what went wrong. After it no memory is touched.
  std::function<void(size_t i)> received;
  std::function<void(const Status&)> done;
};

constexpr int64_t kTokenBytes = 16;
constexpr int64_t kMostProcesses = 1024;

class Net {
 public:
  // Waits for connections at a port that `port` tells.
  static Or<std::shared_ptr<Net>> listen();
  int port() const { return port_; }

  // Returns when every process has connected. Those that don't know the token are turned away.
  std::optional<Failure> connect(int64_t process, std::vector<Address> addresses, const std::string& token,
                                 std::chrono::milliseconds timeout);
  ~Net();

  int64_t process() const { return process_; }
  int64_t processes() const { return static_cast<int64_t>(peers_.size()); }

  class Running;
  // From the first error on every exchange is that error: the processes may stand at different places.
  std::shared_ptr<Running> begin(Exchange exchange);
  // To another rank. The memory stays the exchange's until it is done.
  void send(const std::shared_ptr<Running>& running, int64_t rank, int64_t slot, const uint8_t* data, int64_t bytes);

 private:
  struct Header;
  struct Peer;
  struct Trouble {
    Error::Kind kind;
    int64_t process;
    std::string what;
  };

  Net(Socket listener, Socket events, Socket alarm, int port);
  std::optional<Failure> reach(Peer& peer, const std::string& token, std::chrono::steady_clock::time_point deadline);
  std::optional<Failure> admit(const std::string& token, std::chrono::steady_clock::time_point deadline);
  void post(std::function<void()> command);
  void run();
  void start(const std::shared_ptr<Running>& running);
  bool push(Peer& peer);
  bool pull(Peer& peer);
  bool expect(Peer& peer);
  void lose(Peer& peer, const std::string& how);
  void step(const std::shared_ptr<Running>& running);
  void look_at_the_clock();
  void fail(Trouble trouble);
  Error error_of(const Exchange& exchange) const;

  Socket listener_, events_, alarm_;
  const int port_;
  int64_t process_ = -1;
  std::vector<std::unique_ptr<Peer>> peers_;  // by process; none for this one

  // What other threads leave for the one that moves the bytes, to which all that is below alone belongs.
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  bool stopping_ = false;

  std::vector<std::shared_ptr<Running>> running_;
  std::optional<Trouble> trouble_;
  std::thread thread_;
};

}  // namespace jaxcgx::tcp
