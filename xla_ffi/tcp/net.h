// Exchanges among processes. Each process has TCP connections to every other: one or more for data, one for heartbeats.
//
// A message is sent in slices. Every connection takes the next slice when it has sent its last one, and the receiver
// puts each slice in its place. On a long link, a connection carries at most one window per round trip, so several
// connections carry several windows.
//
// One thread moves all bytes, on all connections at once, so links are full-duplex. It sends from and receives into the
// caller's memory, without copies.
//
// Two processes begin the exchanges that they share in the same order. So a message belongs to an exchange that has
// begun here, too, or to a later one. A message for a later exchange waits in the socket, and so does everything behind
// it: nothing is buffered, and no message that an exchange still needs is behind one of a later exchange.
//
// So data waits in full sockets for a process that is late, and the sender can't see whether that process is alive.
// Heartbeats show it: every process sends a byte at intervals on the connection for heartbeats, and always reads there.
// On a connection for data, a heartbeat would wait behind the data. A process has vanished if nothing comes from it on
// any connection. If one connection for data ends, the process is gone, after the bytes that still come on the
// others.
//
// A process may be paced: all that it sends leaves as on one link of that rate.
//
// Received bytes are never trusted: they are compared with what is expected, and decide neither a size nor an address.
// Every wait ends: a process that ended, left, gave up, vanished or is late is an error that names it.
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
#include "tcp/pace.h"

namespace jaxcgx::tcp {

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

// The connections to another process.
struct Connection {
  std::string host;
  std::vector<Socket> data;  // as many at both ends, in the same order
  Socket beats;
};

// The ranks that take part in an exchange.
struct Group {
  std::vector<int64_t> processes;  // of the ranks, this one among them
  int64_t rank;                    // of this process
  std::chrono::milliseconds timeout;

  int64_t size() const { return static_cast<int64_t>(processes.size()); }
};

// An exchange that several processes take part in. Slots tell apart the messages between two of them.
struct Exchange {
  struct Receive {
    int64_t rank, slot;
    uint8_t* data;
    int64_t bytes;
  };

  std::string name;  // for errors
  int64_t kind;      // must be the same on all ranks
  int64_t digest;    // of everything else that must be the same on all ranks
  Group group;
  std::vector<Receive> receives;
  int64_t sends;  // how many there will be

  // Called by the thread that moves the bytes, and must not block it. `received`: receives[i] is complete. `done`:
  // everything is complete, or has failed. It is called once, as the last one, and no memory is used after it.
  std::function<void(size_t i)> received;
  std::function<void(const Status&)> done;

  // Its messages are sent before those that earlier exchanges have not sent yet. The other ranks must begin it without
  // having ended the earlier ones.
  bool overtakes = false;

  // Zeros at the end of a message are not sent. The receiver writes them.
  bool trims = false;
};

constexpr int64_t kMostProcesses = 1024;

class Net {
 public:
  // connections: by process; that of this process is not used. A process that sends nothing for `silence` has vanished.
  // This process sends at most `pace` bytes a second; 0: no limit.
  static Or<std::shared_ptr<Net>> make(int64_t process, std::vector<Connection> connections,
                                       std::chrono::milliseconds silence, double pace = 0);
  ~Net();

  // Ends every exchange, here with an error, and tells the others. Bytes that were sent still arrive.
  void leave();
  // In the child of a fork: closes its copies of the sockets, which would keep the connections of a dead process open.
  void forget();

  int64_t process() const { return process_; }  // -1 after forget()
  int64_t processes() const { return static_cast<int64_t>(peers_.size()); }

  class Running;
  // After the first error, every exchange fails with that error: the processes may be at different exchanges.
  std::shared_ptr<Running> begin(Exchange exchange);
  // Sends to another rank. The exchange uses `data` until it is done.
  void send(const std::shared_ptr<Running>& running, int64_t rank, int64_t slot, const uint8_t* data, int64_t bytes);

 private:
  struct Header;
  struct Lane;
  struct Peer;
  struct Trouble {
    Error::Kind kind;
    int64_t process;
    std::string what;
  };

  Net(int64_t process, Socket events, Socket alarm, std::chrono::milliseconds silence, double pace);
  void post(std::function<void()> command);
  void run();
  void start(const std::shared_ptr<Running>& running);
  bool push(Peer& peer, Lane& lane);
  bool pull(Peer& peer, Lane& lane);
  bool expect(Peer& peer, Lane& lane);
  void end(Peer& peer, Lane& lane, const std::string& how);
  void lose(Peer& peer, const std::string& how);
  void step(const std::shared_ptr<Running>& running);
  void look_at_the_clock();
  void beat();
  void fail(Trouble trouble);
  Error error_of(const Exchange& exchange) const;

  int64_t process_;
  const std::chrono::milliseconds silence_;
  Socket events_, alarm_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by process; none for this one

  // Commands from other threads. Everything below them belongs to the thread that moves the bytes.
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  bool stopping_ = false;

  std::vector<std::shared_ptr<Running>> running_;
  Pace pace_;
  int64_t unsent_ = 0;  // messages that are not completely sent
  size_t turn_ = 0;     // the peer that is first
  std::chrono::steady_clock::time_point next_beat_;
  std::optional<Trouble> trouble_;
  std::thread thread_;
};

}  // namespace jaxcgx::tcp
