// The state that Net keeps of its peers and of the running exchanges.
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

constexpr int64_t kSlice = 128 << 10;  // bytes of a message that one connection carries at a time

// In front of every slice. Both ends have the same byte order.
struct Net::Header {
  uint64_t magic;
  int64_t number, kind, digest, slot, bytes;  // of the message. kGaveUp: slot is the process that is the reason
  int64_t at;                                 // where the slice begins

  int64_t slices() const { return std::max(int64_t{1}, (bytes + kSlice - 1) / kSlice); }
  int64_t length() const { return std::min(kSlice, bytes - at); }
};

class Net::Running {
 public:
  // The slices of a receive.
  struct Slices {
    std::vector<bool> taken;  // empty before the first
    int64_t missing = 0;
    int64_t bytes = 0;  // of the message
  };

  Exchange exchange;
  std::vector<Slices> slices;    // of the receives
  std::vector<int64_t> numbers;  // by rank: this exchange's number among those with the rank's process
  std::vector<int64_t> coming;   // by rank: receives that are not complete
  int64_t steps = 0;             // receives and sends that are not complete
  Clock::time_point deadline;
  bool over = false;

  void finish(const Status& status) {
    over = true;
    std::exchange(exchange.done, nullptr)(status);
    exchange.received = nullptr;  // the functions may own this
  }
};

// A connection for data, and the slices that it carries.
struct Net::Lane {
  // A message that is being sent, on one or more connections.
  struct Out {
    Header header;  // of the next slice
    const uint8_t* data;
    std::shared_ptr<Running> of;
    int64_t unsent;  // slices
  };

  Socket socket;
  bool readable = true, writable = true;
  bool ended = false;

  std::shared_ptr<Out> out;  // the message of the slice that leaves
  Header leaving{};
  int64_t sent = 0;  // bytes of it and its header

  Header header{};              // of the slice that is coming
  int64_t header_bytes = 0;     // that have come
  std::shared_ptr<Running> of;  // its exchange, once known
  size_t receive = 0;
  int64_t received = 0;
};

struct Net::Peer {
  struct Open {
    std::shared_ptr<Running> running;
    int64_t rank;
  };

  int64_t process;
  std::string host;
  std::vector<Lane> lanes;
  size_t turn = 0;         // the lane that is first
  bool overtaken = false;  // messages have overtaken others
  Socket beats;
  bool heard = true;                            // something has come since the last beat
  int silent = 0;                               // beats since something came
  std::string ends;                             // the reason, once one lane has ended
  bool ending = false;                          // `ends` was set before the last beat
  std::string gone;                             // the reason, once the peer is gone
  int64_t begun = 0;                            // exchanges with this process
  std::map<int64_t, Open> open;                 // by number: exchanges with receives that are not complete
  std::deque<std::shared_ptr<Lane::Out>> outs;  // with slices that no lane has taken

  // Messages can't overtake bytes that are in a socket already.
  void keep_little_in_sockets() {
    if (std::exchange(overtaken, true)) return;
    for (const Lane& lane : lanes) {
      const int bytes = kSlice;
      setsockopt(lane.socket.number(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
    }
  }
  bool sends() const {
    return !outs.empty() ||
           std::any_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.out != nullptr; });
  }
  // Whether a slice waits for an exchange that has not begun here.
  bool early() const {
    return std::any_of(lanes.begin(), lanes.end(), [](const Lane& lane) {
      return !lane.ended && !lane.of && lane.header_bytes == static_cast<int64_t>(sizeof(Header));
    });
  }
};

}  // namespace jaxcgx::tcp
