// How the processes connect, before the first exchange.
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

#include "tcp/peer.h"

namespace jaxcgx::tcp {
namespace {

constexpr uint64_t kHello = 0x6a61786367781001;  // "jaxcgx", and the version of what follows
constexpr size_t kMostStrangers = 256;           // connections that have not yet said who they are
constexpr int kSilence = 30;                     // seconds after which a host that answers nothing has vanished

struct Hello {
  uint64_t magic = kHello;
  char token[kTokenBytes] = {};
  int64_t process = -1;
};

int64_t left(Clock::time_point deadline) {
  return std::max<int64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count(), 0);
}

// Whether a socket could be read or written before the deadline.
bool ready(int socket, short events, Clock::time_point deadline) {
  pollfd p{socket, events, 0};
  int n;
  do n = poll(&p, 1, static_cast<int>(std::min<int64_t>(left(deadline), 1 << 30)));
  while (n < 0 && errno == EINTR);
  return n > 0;
}

// The first message in each direction of a connection is a Hello.
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
  // IPv6 and IPv4 if the host has both.
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
  const int port = ntohs(bound.sin6_port);  // at the same place in an IPv4 address
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
  // A process connects to all processes before it, then waits for those behind it. So nobody waits in a circle.
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
  // Turns away strangers, and processes that have already connected.
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

}  // namespace jaxcgx::tcp
