// Exchanges among processes over TCP. Each process has connections to every other process: one or more data
// connections, and one for heartbeats.
//
// A message is sent in slices. Each data connection takes the next slice when it has sent its last one, and the
// receiver writes each slice to its position in the message. On a link with a long round trip, a connection carries at
// most one window per round trip. So several connections carry several windows.
//
// One thread moves all bytes, on all connections at once, so links are full-duplex. It sends from and receives into the
// caller's memory, without copies.
//
// A rank is a device of a process, and a process may have several. Any two devices begin their common exchanges in the
// same order. So a received message belongs to an exchange that its device has begun here, too, or to a later exchange.
// A message for a later exchange waits in the socket, together with all bytes behind it. Nothing is buffered. No
// exchange needs a message that is behind a message of a later exchange: all devices run the same program, so a process
// sends what an exchange needs before any of its devices can begin an exchange that depends on it.
//
// Messages between two devices of this process are copied, when both have begun the exchange.
//
// So data waits in full sockets for a process that is late, and the sender can't see whether that process is alive.
// Heartbeats show it: every process sends a byte at intervals on the heartbeat connection, and always reads from there.
// On a data connection, a heartbeat would wait behind the data. A process has vanished if nothing arrives from it on
// any connection. If one data connection ends, the process is gone, after the bytes that still arrive on its other
// connections.
//
// A process may be paced. Then all bytes that it sends share one simulated link of a given rate.
//
// Received bytes are never trusted: they are compared with the expected values, and determine neither a size nor an
// address. Every wait ends: if a process ended, left, gave up, vanished or is late, the exchange returns an error that
// names the process.
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

// Owns a socket, and closes it.
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
  std::vector<Socket> data;  // the same number at both ends, in the same order
  Socket beats;
};

// The ranks that take part in an exchange.
struct Group {
  std::vector<int64_t> processes;  // by rank: the process
  std::vector<int64_t> devices;    // by rank: the device, a number of any kind that differs within a process
  int64_t rank;                    // the rank that begins the exchange, a device of this process
  std::chrono::milliseconds timeout;

  int64_t size() const { return static_cast<int64_t>(processes.size()); }
};

// An exchange among the processes of a group. A slot number identifies a message between two of them.
struct Exchange {
  struct Receive {
    int64_t rank, slot;
    uint8_t* data;
    int64_t bytes;
  };

  std::string name;  // for error messages
  int64_t kind;      // must be the same on all ranks
  int64_t digest;    // a hash of everything else that must be the same on all ranks
  Group group;
  std::vector<Receive> receives;
  int64_t sends;  // the number of calls of Net::send that will follow

  // The thread that moves the bytes calls these functions. They must not block it. `received` is called when
  // receives[i] is complete. `done` is called once, when everything is complete or the exchange has failed. It is the
  // last call, and no memory of the caller is used after it.
  std::function<void(size_t i)> received;
  std::function<void(const Status&)> done;

  // The messages of this exchange are sent before the unsent messages of earlier exchanges. So the other ranks must
  // begin this exchange without waiting for the end of the earlier ones.
  bool overtakes = false;

  // Zeros at the end of a message are not sent. The receiver writes them.
  bool trims = false;
};

constexpr int64_t kMostProcesses = 1024;

class Net {
 public:
  // Takes over connections, and starts the thread that moves the bytes.
  //
  // connections: by process; the entry of this process is not used. silence: a process that sends nothing for this long
  // has vanished. pace: this process sends at most this many bytes a second; 0: no limit.
  static Or<std::shared_ptr<Net>> make(int64_t process, std::vector<Connection> connections,
                                       std::chrono::milliseconds silence, double pace = 0);
  ~Net();

  // Ends every exchange with an error, and tells the other processes. Bytes that were sent still arrive.
  void leave();
  // Ends the exchanges that are under way, if any, like leave(). Otherwise it does nothing.
  void interrupt();
  // Closes the sockets of the child of a fork, which would keep the connections of a dead parent open. Call it in the
  // child.
  void forget();

  int64_t process() const { return process_; }  // -1 after forget()
  int64_t processes() const { return static_cast<int64_t>(peers_.size()); }

  class Running;
  // Begins an exchange. After the first error, every exchange fails with the same error, because the processes may be
  // at different exchanges.
  std::shared_ptr<Running> begin(Exchange exchange);
  // Sends a message to another rank. `data` is in use until the exchange is done.
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
  std::pair<std::shared_ptr<Running>, size_t> find(const Peer& peer, const Header& header);
  bool copy();
  void complete(const std::shared_ptr<Running>& running, size_t receive, int64_t bytes);
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
  std::vector<std::unique_ptr<Peer>> peers_;  // by process; this one has no connections

  // Commands from other threads, guarded by the mutex. All members after commands_ belong to the thread that moves the
  // bytes.
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  bool stopping_ = false;

  std::vector<std::shared_ptr<Running>> running_;
  Pace pace_;
  int64_t unsent_ = 0;  // number of messages that are not completely sent
  size_t turn_ = 0;     // the peer that is served first in the next pass
  std::chrono::steady_clock::time_point next_beat_;
  std::optional<Trouble> trouble_;
  std::thread thread_;
};

}  // namespace jaxcgx::tcp
