// Exchanges among the devices of processes over TCP. A rank is a device of a process, and a process may have several.
// Each process has connections to every other process: for each device one or more data connections, and one connection
// for heartbeats.
//
// A message is sent in slices. Each data connection of the device takes the next slice when it has sent its last one,
// and the receiver writes each slice to its position in the message. On a link with a long round trip, a connection
// carries at most one window per round trip. So several connections carry several windows.
//
// One thread moves all bytes, on all connections at once, so links are full-duplex. It sends from and receives into the
// caller's memory, without copies.
//
// All devices begin their common exchanges in the same order. So a received message belongs to an exchange that its
// device has begun here, too, or to a later exchange. A message for a later exchange waits in the socket, together with
// all bytes behind it. Nothing is buffered.
//
// What is behind it is from the same device, which has begun the later exchange. So the device has sent all messages of
// the exchanges that it ended before, and no device waits for a message that is behind a message of an exchange which
// begins only after this wait. With connections that devices share, it would be otherwise: the devices of a process
// need not be at the same place of the program.
//
// Messages between two devices of this process are copied when both have begun the exchange.
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
  std::vector<Socket> data;  // for each device the same number, at both ends in the same order
  Socket beats;
};

// The ranks that take part in an exchange.
struct Group {
  std::vector<int64_t> processes;  // by rank: the process
  std::vector<int64_t> devices;    // by rank: the device's number in its process
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

  // The time from begin() until messages with `may_be_late` (Net::send) are given up: the receiver gets zeros in place
  // of those that have not begun to leave. It needs `trims`. The thread that moves the bytes calls `late` with their
  // slots.
  std::chrono::microseconds deadline{};
  std::function<void(int64_t slot)> late{};
};

constexpr int64_t kMostProcesses = 1024;

class Net {
 public:
  // Takes over connections, and starts the thread that moves the bytes.
  //
  // connections: by process; the entry of this process is not used. devices: the most devices of a process. silence: a
  // process that sends nothing for this long has vanished. pace: this process sends at most this many bytes a second;
  // 0: no limit.
  static Or<std::shared_ptr<Net>> make(int64_t process, std::vector<Connection> connections, int64_t devices,
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
  int64_t devices() const { return devices_; }

  class Running;
  // Begins an exchange. After the first error, every exchange fails with the same error, because the processes may be
  // at different exchanges.
  std::shared_ptr<Running> begin(Exchange exchange);
  // Sends a message to another rank. `data` is in use until the exchange is done. If it `may_be_late`, all messages
  // that may not be precede it, also those of later exchanges, and the first of several connections is left to them. So
  // the other ranks must begin later exchanges without waiting for the end of this one, as with `overtakes`.
  void send(const std::shared_ptr<Running>& running, int64_t rank, int64_t slot, const uint8_t* data, int64_t bytes,
            bool may_be_late = false);

 private:
  struct Header;
  struct Out;
  struct Lane;
  struct Stream;
  struct Peer;
  struct Trouble {
    Error::Kind kind;
    int64_t process;
    std::string what;
    int64_t device = -1;  // -1: the whole process
  };

  Net(int64_t process, int64_t devices, Socket events, Socket alarm, std::chrono::milliseconds silence, double pace);
  void post(std::function<void()> command);
  void run();
  void start(const std::shared_ptr<Running>& running);
  bool take(Stream& stream, Lane& lane);
  bool push(Peer& peer, Stream& stream, Lane& lane);
  bool pull(Peer& peer, Lane& lane);
  bool expect(Peer& peer, Lane& lane);
  std::pair<std::shared_ptr<Running>, size_t> find(const Peer& peer, int64_t from, const Header& header);
  bool copy();
  void complete(const std::shared_ptr<Running>& running, size_t receive, int64_t bytes);
  void complete(const Out& out);
  void end(Peer& peer, Lane& lane, const std::string& how);
  void lose(Peer& peer, const std::string& how);
  void step(const std::shared_ptr<Running>& running);
  void look_at_the_clock();
  void beat();
  void fail(Trouble trouble);
  Error error_of(const Exchange& exchange) const;

  int64_t process_;
  const int64_t devices_;
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
  int64_t begun_ = 0;   // number of exchanges that have begun
  int64_t unsent_ = 0;  // number of messages to other processes that are not completely sent
  size_t turn_ = 0;     // the peer that is served first in the next pass
  std::chrono::steady_clock::time_point next_beat_;
  std::optional<Trouble> trouble_;
  std::thread thread_;
};

}  // namespace jaxcgx::tcp
