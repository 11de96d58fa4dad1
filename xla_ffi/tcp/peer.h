// What Net keeps of its peers and of the exchanges that are running.
#pragma once

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "tcp/net.h"

namespace jaxcgx::tcp {

using Clock = std::chrono::steady_clock;

inline std::string reason() { return std::strerror(errno); }
inline bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

// In front of every message. Both ends have the same byte order.
struct Net::Header {
  uint64_t magic;
  int64_t number, kind, digest, slot, bytes;  // kGaveUp: slot is the process that was the reason
};

class Net::Running {
 public:
  Exchange exchange;
  std::vector<bool> taken;       // of the receives
  std::vector<int64_t> numbers;  // by rank: of the exchanges with its process
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

struct Net::Peer {
  struct Out {
    Header header;
    const uint8_t* data;
    std::shared_ptr<Running> of;
    int64_t sent = 0;
  };
  struct Open {
    std::shared_ptr<Running> running;
    int64_t rank;
  };

  int64_t process;
  std::string host;
  Socket socket, beats;
  bool heard = true;  // data since the last beat
  int silent = 0;     // beats without a sign of life
  bool readable = true, writable = true;
  std::string gone;              // how, once it is
  int64_t begun = 0;             // exchanges with this process
  std::map<int64_t, Open> open;  // by number: exchanges with receives that are not complete
  std::deque<Out> outs;
  Header header{};              // of the message that is coming
  int64_t header_bytes = 0;     // that have come
  std::shared_ptr<Running> of;  // its exchange, once known
  size_t receive = 0;
  int64_t received = 0;
};

}  // namespace jaxcgx::tcp
