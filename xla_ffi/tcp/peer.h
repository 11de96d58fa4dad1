// The state of Net's peers and of the running exchanges.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "tcp/net.h"

namespace jaxcgx::tcp {

using Clock = std::chrono::steady_clock;

inline std::string reason() { return std::strerror(errno); }
inline bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

// Limits the bytes in a socket that are not sent yet. A failure is no error, because the limit only affects speed.
inline void limit_unsent(const Socket& socket, int most) {
  setsockopt(socket.number(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most, sizeof most);
}

constexpr int64_t kSlice = 128 << 10;  // bytes of a message that one connection carries at a time
constexpr int kUnsent = 16 << 10;      // bytes that may wait in a socket when messages overtake: 2.6 ms at 50 Mbit/s

// The header before every slice. Both ends must have the same byte order.
struct Net::Header {
  uint64_t magic;
  int64_t number, kind, digest, slot, bytes;  // of the message. With kGaveUp, slot is the process that caused it
  int64_t at;                                 // offset of the slice in the message
  int64_t to;                                 // the receiver's device. The sender's is the lane's

  int64_t slices() const { return std::max(int64_t{1}, (bytes + kSlice - 1) / kSlice); }
  int64_t length() const { return std::min(kSlice, bytes - at); }
};

class Net::Running {
 public:
  // The slices of a receive.
  struct Slices {
    std::vector<bool> taken;  // whether each slice has begun to arrive; empty before the first slice
    int64_t missing = 0;      // slices that are not complete
    int64_t bytes = 0;        // bytes of the message

    // Marks the slice of a header as taken. Returns whether it can be: it is in the message, and comes once.
    bool take(const Header& h) {
      if (taken.empty()) taken.resize(static_cast<size_t>(missing = h.slices())), bytes = h.bytes;
      if (h.bytes != bytes || h.at < 0 || h.at % kSlice != 0 || h.at / kSlice >= h.slices()) return false;
      auto slice = taken[static_cast<size_t>(h.at / kSlice)];
      if (slice) return false;
      return slice = true;
    }
  };

  Exchange exchange;
  std::vector<Slices> slices;    // by receive
  std::vector<int64_t> numbers;  // by rank: this exchange's number among all exchanges of the two devices
  std::vector<int64_t> coming;   // by rank: number of receives that are not complete
  std::vector<int64_t> going;    // by rank: number of sends that have been asked for and are not complete
  int64_t order = 0;             // this exchange's number among all exchanges of this process
  int64_t steps = 0;             // number of receives and sends that are not complete
  Clock::time_point deadline, late_from;
  bool over = false;

  void finish(const Status& status) {
    over = true;
    std::exchange(exchange.done, nullptr)(status);
    exchange.received = nullptr, exchange.late = nullptr;  // breaks cycles: the functions may own this object
  }
};

// A message that is being sent, on one or more connections.
struct Net::Out {
  Header header;  // of the next slice
  const uint8_t* data;
  std::shared_ptr<Running> of;
  int64_t rank;    // to which it goes
  int64_t unsent;  // number of slices that are not completely sent
  bool may_be_late;
};

// A data connection, and the slices that it is sending and receiving.
struct Net::Lane {
  Socket socket;
  int64_t device;  // the device that sends on it, here and at the other end
  bool readable = true, writable = true;
  bool ended = false;

  std::shared_ptr<Out> out;  // the message of the slice that is being sent; null: none
  Header leaving{};          // the header of this slice
  int64_t sent = 0;          // sent bytes of the header and the slice

  Header header{};              // the header of the slice that is being received
  int64_t header_bytes = 0;     // received bytes of the header
  std::shared_ptr<Running> of;  // the exchange of the slice; null until it is known
  size_t receive = 0;           // index in the exchange's receives
  int64_t received = 0;         // received bytes of the slice
};

// The messages of a device of this process to a peer, and the connections for them.
struct Net::Stream {
  std::vector<Lane> lanes;                // none to this process itself
  size_t turn = 0;                        // the lane that is served first in the next pass
  std::deque<std::shared_ptr<Out>> outs;  // messages with slices that no lane has taken
};

struct Net::Peer {
  struct Open {
    std::shared_ptr<Running> running;
    int64_t rank;
  };
  // The exchanges of a device of this process with a device of the peer.
  struct Channel {
    int64_t begun = 0;             // number of exchanges that have begun here
    std::map<int64_t, Open> open;  // by number: exchanges with receives that are not complete
  };

  int64_t process;
  std::string host;
  std::vector<Stream> streams;  // by device of this process
  bool overtaken = false;       // messages to this peer may overtake others
  Socket beats;
  bool heard = true;                                        // bytes have arrived since the last beat
  int silent = 0;                                           // number of beats since bytes arrived
  std::string ends;                                         // the reason, once one lane has ended; empty before
  bool ending = false;                                      // `ends` was set before the last beat
  std::string gone;                                         // the reason, once the peer is gone; empty before
  std::map<std::pair<int64_t, int64_t>, Channel> channels;  // by device of this process and device of the peer

  template <class Predicate>
  bool any_lane(const Predicate& is) const {
    return std::any_of(streams.begin(), streams.end(),
                       [&](const Stream& s) { return std::any_of(s.lanes.begin(), s.lanes.end(), is); });
  }
  // Limits the unsent bytes in the sockets, because messages can't overtake bytes that are already in a socket.
  void keep_little_in_sockets() {
    if (std::exchange(overtaken, true)) return;
    for (const Stream& stream : streams) {
      for (const Lane& lane : stream.lanes) limit_unsent(lane.socket, kUnsent);
    }
  }
  // Returns whether the exchange of a message from a device of this peer has begun here.
  bool has_begun(int64_t from, const Header& h) const {
    const auto channel = channels.find({h.to, from});
    return channel != channels.end() && h.number < channel->second.begun;
  }
  // Returns whether a message from this peer is not completely received.
  bool receives() const {
    return std::any_of(channels.begin(), channels.end(), [](const auto& each) { return !each.second.open.empty(); });
  }
  // Returns whether a message to this peer is not completely sent.
  bool sends() const {
    return any_lane([](const Lane& lane) { return lane.out != nullptr; }) ||
           std::any_of(streams.begin(), streams.end(), [](const Stream& stream) { return !stream.outs.empty(); });
  }
  // Returns whether a slice waits for an exchange that has not begun here.
  bool early() const {
    return any_lane([](const Lane& lane) {
      return !lane.ended && !lane.of && lane.header_bytes == static_cast<int64_t>(sizeof(Header));
    });
  }
};

}  // namespace jaxcgx::tcp
