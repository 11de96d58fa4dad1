#include "tcp/net.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

namespace jaxcgx::tcp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kHello = 0x6a61786367781001;  // "jaxcgx", and the version of what follows
constexpr uint64_t kMessage = 0x6a61786367781002;
constexpr uint64_t kGaveUp = 0x6a61786367781003;
constexpr int64_t kStep = 256 << 10;            // bytes that one connection moves before it is another one's turn
constexpr std::chrono::milliseconds kNap{100};  // after which a deadline is looked at
constexpr size_t kMostStrangers = 256;          // connections that have not said yet who they are
constexpr int kSilence = 30;                    // seconds after which a host that answers nothing has vanished

const char* const kEnded = "has ended or left";

struct Hello {
  uint64_t magic = kHello;
  char token[kTokenBytes] = {};
  int64_t process = -1;
};

std::string reason() { return std::strerror(errno); }

std::string ended_or(int error) {
  return error == ECONNRESET || error == EPIPE ? kEnded : std::string("can't be reached: ") + std::strerror(error);
}

int64_t left(Clock::time_point deadline) {
  return std::max<int64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count(), 0);
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

// Whether a socket could be read or written before the deadline.
bool ready(int socket, short events, Clock::time_point deadline) {
  pollfd p{socket, events, 0};
  int n;
  do n = poll(&p, 1, static_cast<int>(std::min<int64_t>(left(deadline), 1 << 30)));
  while (n < 0 && errno == EINTR);
  return n > 0;
}

// One message of the size of Hello each way, before a connection has any other.
bool write_hello(int socket, const Hello& hello) {
  return ::send(socket, &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello;  // there is room in a new connection
}

void prepare(int socket) {
  const auto set = [&](int level, int option, int value) { setsockopt(socket, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kSilence / 3);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kSilence / 6);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kSilence * 1000);
}

}  // namespace

Socket::~Socket() {
  if (number_ >= 0) close(number_);
}

// In front of every message; both ends are of one byte order.
struct Net::Header {
  uint64_t magic;
  int64_t number, kind, slot, bytes;  // of a process that gave up the slot is the process because of which
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
    exchange.received = nullptr;  // what the two hold on to may hold on to this
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
  Address address;
  Socket socket;
  bool readable = true, writable = true;
  std::string gone;              // how, once it is
  int64_t begun = 0;             // exchanges with this process
  std::map<int64_t, Open> open;  // by number: those of which something is to come
  std::deque<Out> outs;
  Header header{};              // of what is coming
  int64_t header_bytes = 0;     // of it that are there
  std::shared_ptr<Running> of;  // whose it is, once that is known
  size_t receive = 0;
  int64_t received = 0;
};

// Before the first exchange

Net::Net(Socket listener, Socket events, Socket alarm, int port)
    : listener_(std::move(listener)), events_(std::move(events)), alarm_(std::move(alarm)), port_(port) {}

Net::~Net() {
  if (!thread_.joinable()) return;
  post([this] { stopping_ = true; });
  thread_.join();
}

Or<std::shared_ptr<Net>> Net::listen() {
  const auto failed = [](const std::string& what) { return Failure{what + ": " + reason()}; };
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  // Of both families where there are both.
  Socket socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int no = 0;
  if (socket.number() < 0 || setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) != 0 ||
      bind(socket.number(), reinterpret_cast<sockaddr*>(&any6), sizeof any6) != 0) {
    socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket.number() < 0 || bind(socket.number(), reinterpret_cast<sockaddr*>(&any4), sizeof any4) != 0)
      return failed("bind");
  }
  if (::listen(socket.number(), kMostProcesses) != 0) return failed("listen");
  sockaddr_in6 bound{};
  socklen_t length = sizeof bound;
  if (getsockname(socket.number(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) return failed("getsockname");
  Socket events(epoll_create1(EPOLL_CLOEXEC)), alarm(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (events.number() < 0) return failed("epoll_create1");
  if (alarm.number() < 0) return failed("eventfd");
  const int port = ntohs(bound.sin6_port);  // where an IPv4 address has it, too
  return std::shared_ptr<Net>(new Net(std::move(socket), std::move(events), std::move(alarm), port));
}

std::optional<Failure> Net::connect(int64_t process, std::vector<Address> addresses, const std::string& token,
                                    std::chrono::milliseconds timeout) {
  const auto n = static_cast<int64_t>(addresses.size());
  if (n < 1 || n > kMostProcesses || process < 0 || process >= n) {
    return Failure{"expected a process of 1 to " + std::to_string(kMostProcesses) + ", got process " +
                   std::to_string(process) + " of " + std::to_string(n)};
  }
  if (token.size() != kTokenBytes)
    return Failure{"expected a token of " + std::to_string(kTokenBytes) + " bytes, got " +
                   std::to_string(token.size())};
  if (process_ >= 0) return Failure{"this process has connected already"};
  const auto deadline = Clock::now() + timeout;
  process_ = process;
  for (int64_t i = 0; i < n; ++i) {
    peers_.push_back(i == process ? nullptr : std::make_unique<Peer>());
    if (i != process) peers_.back()->process = i, peers_.back()->address = addresses[i];
  }
  // A process reaches out to those before it, which wait for nobody but those before them, and then waits for those
  // behind it.
  for (int64_t i = 0; i < process; ++i) {
    if (auto failure = reach(*peers_[i], token, deadline)) return failure;
  }
  if (auto failure = admit(token, deadline)) return failure;
  listener_ = Socket();
  for (const auto& peer : peers_) {
    if (!peer) continue;
    const int socket = peer->socket.number();
    prepare(socket);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.ptr = peer.get();
    if (fcntl(socket, F_SETFL, O_NONBLOCK) != 0 || epoll_ctl(events_.number(), EPOLL_CTL_ADD, socket, &event) != 0)
      return Failure{"epoll_ctl: " + reason()};
  }
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ctl(events_.number(), EPOLL_CTL_ADD, alarm_.number(), &event) != 0)
    return Failure{"epoll_ctl: " + reason()};
  thread_ = std::thread([this] { run(); });
  return std::nullopt;
}

std::optional<Failure> Net::reach(Peer& peer, const std::string& token, Clock::time_point deadline) {
  const std::string port = std::to_string(peer.address.port),
                    name = "process " + std::to_string(peer.process) + " at " + peer.address.host + ", port " + port;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(peer.address.host.c_str(), port.c_str(), &hints, &found))
    return Failure{name + ": " + gai_strerror(error)};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  std::string why = "no address";
  for (const addrinfo* a = found; a != nullptr && peer.socket.number() < 0; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket.number() < 0 || (::connect(socket.number(), a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS)) {
      why = reason();
    } else if (!ready(socket.number(), POLLOUT, deadline)) {
      why = "no answer";
    } else {
      socklen_t length = sizeof errno;
      getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &errno, &length);
      if (errno == 0)
        peer.socket = std::move(socket);
      else
        why = reason();
    }
  }
  if (peer.socket.number() < 0) return Failure{name + " can't be reached: " + why};
  Hello hello, answer;
  std::memcpy(hello.token, token.data(), kTokenBytes);
  hello.process = process_;
  if (!write_hello(peer.socket.number(), hello)) return Failure{name + ": " + reason()};
  for (size_t got = 0; got < sizeof answer;) {
    if (!ready(peer.socket.number(), POLLIN, deadline)) return Failure{name + " has not answered in time"};
    const ssize_t n = recv(peer.socket.number(), reinterpret_cast<char*>(&answer) + got, sizeof answer - got, 0);
    if (n == 0) return Failure{name + " turned this process away: another job, or another version of jaxcgx"};
    if (n < 0 && !would_block() && errno != EINTR) return Failure{name + ": " + reason()};
    got += static_cast<size_t>(std::max<ssize_t>(n, 0));
  }
  if (answer.magic != kHello || answer.process != peer.process ||
      std::memcmp(answer.token, token.data(), kTokenBytes) != 0) {
    return Failure{name + " is not that process: another one listens there"};
  }
  return std::nullopt;
}

std::optional<Failure> Net::admit(const std::string& token, Clock::time_point deadline) {
  struct Stranger {
    Socket socket;
    Hello hello;
    size_t got = 0;
  };
  std::deque<Stranger> strangers;
  const auto missing = [&] {
    std::string names;
    for (const auto& peer : peers_) {
      if (peer && peer->socket.number() < 0) names += (names.empty() ? "" : ", ") + std::to_string(peer->process);
    }
    return names;
  };
  // False: to be turned away. A process comes only once.
  const auto welcome = [&](Stranger& s) {
    const int64_t other = s.hello.process;
    bool same = true;
    for (int64_t i = 0; i < kTokenBytes; ++i) same &= s.hello.token[i] == token[i];
    if (s.hello.magic != kHello || !same || other <= process_ || other >= processes() ||
        peers_[other]->socket.number() >= 0)
      return;
    s.hello.process = process_;
    if (write_hello(s.socket.number(), s.hello)) peers_[other]->socket = std::move(s.socket);
  };
  while (!missing().empty()) {
    std::vector<pollfd> polled{{listener_.number(), POLLIN, 0}};
    for (const Stranger& s : strangers) polled.push_back({s.socket.number(), POLLIN, 0});
    if (left(deadline) == 0) return Failure{"process " + missing() + " has not come in time"};
    if (poll(polled.data(), polled.size(), static_cast<int>(std::min<int64_t>(left(deadline), 1 << 30))) < 0 &&
        errno != EINTR)
      return Failure{"poll: " + reason()};
    std::deque<Stranger> undecided;
    for (size_t i = 0; i < strangers.size(); ++i) {
      Stranger& s = strangers[i];
      const ssize_t n = polled[i + 1].revents == 0 ? -1
                                                   : recv(s.socket.number(), reinterpret_cast<char*>(&s.hello) + s.got,
                                                          sizeof s.hello - s.got, 0);
      if (polled[i + 1].revents != 0 && (n == 0 || (n < 0 && !would_block()))) continue;
      s.got += static_cast<size_t>(std::max<ssize_t>(n, 0));
      if (s.got < sizeof s.hello)
        undecided.push_back(std::move(s));
      else
        welcome(s);
    }
    strangers = std::move(undecided);
    if (polled[0].revents != 0) {
      Socket socket(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.number() >= 0) strangers.push_back({std::move(socket), {}});
      if (strangers.size() > kMostStrangers) strangers.pop_front();
    }
  }
  return std::nullopt;
}

// From any thread

void Net::post(std::function<void()> command) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    commands_.push_back(std::move(command));
  }
  const uint64_t one = 1;
  if (write(alarm_.number(), &one, sizeof one) < 0) {  // can't but succeed, or find it rung already
  }
}

std::shared_ptr<Net::Running> Net::begin(Exchange exchange) {
  auto running = std::make_shared<Running>();
  running->deadline = Clock::now() + exchange.timeout;
  running->steps = static_cast<int64_t>(exchange.receives.size()) + exchange.sends;
  running->taken.resize(exchange.receives.size());
  running->coming.resize(exchange.processes.size());
  running->numbers.resize(exchange.processes.size());
  for (const Exchange::Receive& r : exchange.receives) ++running->coming[static_cast<size_t>(r.rank)];
  running->exchange = std::move(exchange);
  post([this, running] { start(running); });
  return running;
}

void Net::send(const std::shared_ptr<Running>& running, int64_t rank, int64_t slot, const uint8_t* data,
               int64_t bytes) {
  post([=] {
    if (running->over) return;
    const auto r = static_cast<size_t>(rank);
    Peer& peer = *peers_[static_cast<size_t>(running->exchange.processes[r])];
    if (!peer.gone.empty()) return fail({Error::Kind::kGone, peer.process, peer.gone});
    peer.outs.push_back({{kMessage, running->numbers[r], running->exchange.kind, slot, bytes}, data, running});
  });
}

// In the thread that moves the bytes

void Net::run() {
  epoll_event events[64];
  while (true) {
    const int nap = running_.empty() ? -1 : static_cast<int>(kNap.count());
    const int n = epoll_wait(events_.number(), events, 64, nap);
    for (int i = 0; i < n; ++i) {
      auto* peer = static_cast<Peer*>(events[i].data.ptr);
      if (peer == nullptr) {
        uint64_t rung;
        if (read(alarm_.number(), &rung, sizeof rung) < 0) {  // only the ringing counts
        }
        continue;
      }
      peer->readable |= (events[i].events & ~EPOLLOUT) != 0;
      peer->writable |= (events[i].events & ~(EPOLLIN | EPOLLRDHUP)) != 0;
    }
    for (bool moved = true; moved;) {
      std::vector<std::function<void()>> commands;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        commands.swap(commands_);
      }
      for (const auto& command : commands) command();
      if (stopping_) return;
      moved = !commands.empty();
      for (const auto& peer : peers_) {
        if (peer) moved |= push(*peer);
        if (peer) moved |= pull(*peer);
      }
    }
    look_at_the_clock();
  }
}

void Net::start(const std::shared_ptr<Running>& running) {
  const Exchange& e = running->exchange;
  if (!trouble_) running_.push_back(running);
  for (size_t rank = 0; rank < e.processes.size() && !trouble_; ++rank) {
    if (e.processes[rank] == process_) continue;
    Peer& peer = *peers_[static_cast<size_t>(e.processes[rank])];
    running->numbers[rank] = peer.begun++;
    if (running->coming[rank] == 0) continue;
    peer.open[running->numbers[rank]] = {running, static_cast<int64_t>(rank)};
    if (!peer.gone.empty()) fail({Error::Kind::kGone, peer.process, peer.gone});
  }
  if (trouble_ && !running->over) {
    running->finish(error_of(e));
  } else if (running->steps == 0 && !running->over) {
    running->steps = 1;
    step(running);
  }
}

bool Net::push(Peer& peer) {
  if (!peer.writable || peer.outs.empty() || !peer.gone.empty()) return false;
  Peer::Out& out = peer.outs.front();
  const int64_t header = sizeof(Header), all = header + out.header.bytes, at = std::max(out.sent - header, int64_t{0});
  iovec parts[2] = {{reinterpret_cast<char*>(&out.header) + std::min(out.sent, header),
                     static_cast<size_t>(header - std::min(out.sent, header))},
                    {const_cast<uint8_t*>(out.data) + at, static_cast<size_t>(std::min(out.header.bytes - at, kStep))}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t n = sendmsg(peer.socket.number(), &message, MSG_NOSIGNAL);
  if (n < 0) {
    if (errno == EINTR) return true;
    if (would_block())
      peer.writable = false;
    else
      lose(peer, ended_or(errno));
    return false;
  }
  out.sent += n;
  if (out.sent == all) {
    const auto running = out.of;
    peer.outs.pop_front();
    step(running);
  }
  return true;
}

bool Net::pull(Peer& peer) {
  if (!peer.readable || !peer.gone.empty() || trouble_) return false;
  const bool header = peer.header_bytes < static_cast<int64_t>(sizeof(Header));
  if (!header && !peer.of && !expect(peer)) return false;
  uint8_t* to;
  int64_t most;
  if (header) {
    to = reinterpret_cast<uint8_t*>(&peer.header) + peer.header_bytes;
    most = static_cast<int64_t>(sizeof(Header)) - peer.header_bytes;
  } else {
    to = peer.of->exchange.receives[peer.receive].data + peer.received;
    most = std::min(peer.header.bytes - peer.received, kStep);
  }
  if (most > 0) {
    const ssize_t n = recv(peer.socket.number(), to, static_cast<size_t>(most), 0);
    if (n < 0) {
      if (errno == EINTR) return true;
      if (would_block())
        peer.readable = false;
      else
        lose(peer, ended_or(errno));
      return false;
    }
    if (n == 0) {
      lose(peer, kEnded);
      return false;
    }
    (header ? peer.header_bytes : peer.received) += n;
  }
  if (!header && peer.received == peer.header.bytes) {
    const auto running = std::move(peer.of);
    peer.of = nullptr;
    peer.header_bytes = peer.received = 0;
    const auto rank = static_cast<size_t>(running->exchange.receives[peer.receive].rank);
    if (--running->coming[rank] == 0) peer.open.erase(running->numbers[rank]);
    if (running->exchange.received) running->exchange.received(peer.receive);
    step(running);
  }
  return true;
}

// Whether what is coming can be taken. If not, it waits for an exchange that has not begun, or is an error.
bool Net::expect(Peer& peer) {
  const Header& h = peer.header;
  if (h.magic == kGaveUp) {
    const bool known = h.slot >= 0 && h.slot < processes() && h.slot != peer.process;
    lose(peer,
         "gave up" + (known ? ", because of process " + std::to_string(h.slot) : std::string(": it has the reason")));
    return false;
  }
  if (h.magic == kMessage && h.number >= peer.begun) return false;
  const auto open = peer.open.find(h.number);
  std::string what = "sent what nobody expects";
  if (h.magic == kMessage && open != peer.open.end()) {
    const auto& running = open->second.running;
    const Exchange& e = running->exchange;
    for (size_t i = 0; i < e.receives.size() && e.kind == h.kind; ++i) {
      const Exchange::Receive& r = e.receives[i];
      if (r.rank != open->second.rank || r.slot != h.slot || running->taken[i]) continue;
      if (r.bytes == h.bytes) {
        running->taken[i] = true;
        peer.of = running;
        peer.receive = i;
        return true;
      }
      what = "sent " + std::to_string(h.bytes) + " bytes where " + std::to_string(r.bytes) + " are expected";
    }
    if (e.kind != h.kind) what = "has another exchange";
    what += "; every process must run the same exchanges, in the same order";
  }
  fail({Error::Kind::kDifferent, peer.process, what});
  return false;
}

// What still needs a process that is gone fails. Another exchange may be complete without it.
void Net::lose(Peer& peer, const std::string& how) {
  peer.gone = how;
  if (!peer.open.empty() || !peer.outs.empty()) fail({Error::Kind::kGone, peer.process, how});
}

void Net::step(const std::shared_ptr<Running>& running) {
  if (--running->steps > 0) return;
  running_.erase(std::find(running_.begin(), running_.end(), running));
  running->finish(std::nullopt);
}

void Net::look_at_the_clock() {
  for (const auto& running : running_) {
    if (Clock::now() < running->deadline) continue;
    const Exchange& e = running->exchange;
    int64_t late = -1;
    for (size_t rank = 0; rank < e.processes.size(); ++rank) {
      const int64_t process = e.processes[rank];
      if (process != process_ && late < 0 &&
          (running->coming[rank] > 0 || !peers_[static_cast<size_t>(process)]->outs.empty()))
        late = process;
    }
    if (late < 0) continue;  // this process itself is
    fail({Error::Kind::kLate, late, "has not come within " + std::to_string(e.timeout.count()) + " ms"});
    return;
  }
}

// The connections stay, closed in one direction, so that what was sent arrives.
void Net::fail(Trouble trouble) {
  if (trouble_) return;
  trouble_ = std::move(trouble);
  for (const auto& peer : peers_) {
    if (!peer) continue;
    if (peer->outs.empty() || peer->outs.front().sent == 0) {  // not in the middle of a message
      const Header header{kGaveUp, 0, 0, trouble_->process, 0};
      ::send(peer->socket.number(), &header, sizeof header, MSG_NOSIGNAL);
    }
    shutdown(peer->socket.number(), SHUT_WR);
    peer->outs.clear();
    peer->open.clear();
    peer->of = nullptr;
  }
  for (const auto& running : running_) running->finish(error_of(running->exchange));
  running_.clear();
}

Error Net::error_of(const Exchange& e) const {
  const auto& [kind, process, what] = *trouble_;
  std::string who = "process " + std::to_string(process);
  if (process >= 0) who += " at " + peers_[static_cast<size_t>(process)]->address.host;
  const auto rank = std::find(e.processes.begin(), e.processes.end(), process);
  if (rank == e.processes.end()) return {kind, e.name + ": " + who + " " + what};
  const std::string which = "rank " + std::to_string(rank - e.processes.begin()) + " (" + who + ")";
  return {kind, e.name + ": rank " + std::to_string(e.rank) + " waits for " + which + ", which " + what};
}

}  // namespace jaxcgx::tcp
