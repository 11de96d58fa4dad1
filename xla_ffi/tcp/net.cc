#include "tcp/net.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "tcp/peer.h"
#include "tcp/slice.h"

namespace jaxcgx::tcp {
namespace {

constexpr uint64_t kMessage = 0x6a61786367781012;  // "jaxcgx", and the version of what follows
constexpr uint64_t kGaveUp = 0x6a61786367781013;
constexpr int64_t kStep = 256 << 10;            // bytes that one connection moves before the next one's turn
constexpr std::chrono::milliseconds kNap{100};  // deadlines are checked this often
constexpr int kBeats = 6;                       // silent ones, after which a process has vanished

const char* const kEnded = "has ended or left";

std::string ended_or(int error) {
  return error == ECONNRESET || error == EPIPE ? kEnded : std::string("can't be reached: ") + std::strerror(error);
}

bool nonblocking(int socket) { return fcntl(socket, F_SETFL, O_NONBLOCK) == 0; }

}  // namespace

Socket::~Socket() {
  if (number_ >= 0) close(number_);
}

Net::Net(int64_t process, Socket events, Socket alarm, std::chrono::milliseconds silence)
    : process_(process), silence_(silence), events_(std::move(events)), alarm_(std::move(alarm)) {}

Net::~Net() {
  if (!thread_.joinable()) return;
  post([this] { stopping_ = true; });
  thread_.join();
}

Or<std::shared_ptr<Net>> Net::make(int64_t process, std::vector<Connection> connections,
                                   std::chrono::milliseconds silence) {
  const auto n = static_cast<int64_t>(connections.size());
  const auto failed = [](const std::string& what) { return Failure{what + ": " + reason()}; };
  if (n < 1 || n > kMostProcesses || process < 0 || process >= n) {
    return Failure{"expected a process of 1 to " + std::to_string(kMostProcesses) + ", got process " +
                   std::to_string(process) + " of " + std::to_string(n)};
  }
  Socket events(epoll_create1(EPOLL_CLOEXEC)), alarm(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (events.number() < 0) return failed("epoll_create1");
  if (alarm.number() < 0) return failed("eventfd");
  const std::shared_ptr<Net> net(new Net(process, std::move(events), std::move(alarm), silence));
  const auto watch = [&](int socket, uint32_t what, Peer* peer) {
    epoll_event event{};
    event.events = what;
    event.data.ptr = peer;
    return epoll_ctl(net->events_.number(), EPOLL_CTL_ADD, socket, &event) == 0;
  };
  for (int64_t i = 0; i < n; ++i) {
    Connection& c = connections[static_cast<size_t>(i)];
    net->peers_.push_back(i == process ? nullptr : std::make_unique<Peer>());
    if (i == process) continue;
    Peer& peer = *net->peers_.back();
    peer.process = i, peer.host = std::move(c.host), peer.socket = std::move(c.data), peer.beats = std::move(c.beats);
    if (!nonblocking(peer.socket.number()) || !nonblocking(peer.beats.number()) ||
        !watch(peer.socket.number(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, &peer))
      return failed("a connection");
  }
  if (!watch(net->alarm_.number(), EPOLLIN, nullptr)) return failed("epoll_ctl");
  net->next_beat_ = Clock::now() + silence / kBeats;
  net->thread_ = std::thread([self = net.get()] { self->run(); });
  return net;
}

void Net::forget() {
  process_ = -1;
  for (const auto& peer : peers_) {
    if (peer) peer->socket = Socket(), peer->beats = Socket();
  }
  events_ = Socket(), alarm_ = Socket();
}

// From any thread

void Net::leave() {
  post([this] { fail({Error::Kind::kGone, process_, "ends"}); });
}

void Net::post(std::function<void()> command) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    commands_.push_back(std::move(command));
  }
  const uint64_t one = 1;
  if (write(alarm_.number(), &one, sizeof one) < 0) {  // fails only if the alarm is already set
  }
}

std::shared_ptr<Net::Running> Net::begin(Exchange exchange) {
  auto running = std::make_shared<Running>();
  running->deadline = Clock::now() + exchange.group.timeout;
  running->steps = static_cast<int64_t>(exchange.receives.size()) + exchange.sends;
  running->taken.resize(exchange.receives.size());
  running->coming.resize(exchange.group.processes.size());
  running->numbers.resize(exchange.group.processes.size());
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
    const Exchange& e = running->exchange;
    Peer& peer = *peers_[static_cast<size_t>(e.group.processes[r])];
    if (!peer.gone.empty()) return fail({Error::Kind::kGone, peer.process, peer.gone});
    peer.outs.push_back({{kMessage, running->numbers[r], e.kind, e.digest, slot, bytes}, data, running});
  });
}

// In the thread that moves the bytes

void Net::run() {
  run_soon();
  epoll_event events[64];
  while (true) {
    const auto nap = running_.empty() ? silence_ / kBeats : std::min(kNap, silence_ / kBeats);
    const int n = epoll_wait(events_.number(), events, 64, static_cast<int>(nap.count()));
    for (int i = 0; i < n; ++i) {
      auto* peer = static_cast<Peer*>(events[i].data.ptr);
      if (peer == nullptr) {
        uint64_t rung;
        if (read(alarm_.number(), &rung, sizeof rung) < 0) {  // only the event counts
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
      if (Clock::now() >= next_beat_) beat();
    }
    look_at_the_clock();
  }
}

void Net::start(const std::shared_ptr<Running>& running) {
  const Exchange& e = running->exchange;
  if (!trouble_) running_.push_back(running);
  for (size_t rank = 0; rank < e.group.processes.size() && !trouble_; ++rank) {
    if (e.group.processes[rank] == process_) continue;
    Peer& peer = *peers_[static_cast<size_t>(e.group.processes[rank])];
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
    peer.heard = true;
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

// Whether the coming message can be received. If not, it waits for an exchange that has not begun, or is an error.
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
      if (r.bytes == h.bytes && e.digest == h.digest) {
        running->taken[i] = true;
        peer.of = running;
        peer.receive = i;
        return true;
      }
      what = r.bytes == h.bytes
                 ? "has other arrays, or another codec, schedule or divisor, of the same length"
                 : "sent " + std::to_string(h.bytes) + " bytes where " + std::to_string(r.bytes) + " are expected";
    }
    if (e.kind != h.kind) what = "has another exchange";
    what += "; every process must run the same exchanges, in the same order";
  }
  fail({Error::Kind::kDifferent, peer.process, what});
  return false;
}

// Exchanges that still need a process that is gone fail. Others may complete without it.
void Net::lose(Peer& peer, const std::string& how) {
  peer.gone = how;
  if (!peer.open.empty() || !peer.outs.empty()) fail({Error::Kind::kGone, peer.process, how});
}

// Counts its own beats, not the time: a process that was stopped itself knows nothing of the others.
void Net::beat() {
  next_beat_ = Clock::now() + silence_ / kBeats;
  for (const auto& peer : peers_) {
    if (!peer || !peer->gone.empty()) continue;
    uint8_t beats[4096] = {};                                     // more than may have come while the processes met
    (void)!::send(peer->beats.number(), beats, 1, MSG_NOSIGNAL);  // one that finds no room is not missed
    // A process that has closed this connection has closed the other one, too; that end is behind its data.
    if (recv(peer->beats.number(), beats, sizeof beats, 0) >= 0) peer->heard = true;
    peer->silent = peer->heard ? 0 : peer->silent + 1;
    peer->heard = false;
    if (peer->silent >= kBeats) lose(*peer, "can't be reached: silent for " + std::to_string(silence_.count()) + " ms");
  }
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
    for (size_t rank = 0; rank < e.group.processes.size(); ++rank) {
      const int64_t process = e.group.processes[rank];
      if (process != process_ && late < 0 &&
          (running->coming[rank] > 0 || !peers_[static_cast<size_t>(process)]->outs.empty()))
        late = process;
    }
    if (late < 0) continue;  // this process itself is late
    fail({Error::Kind::kLate, late, "has not come within " + std::to_string(e.group.timeout.count()) + " ms"});
    return;
  }
}

// Connections are closed in one direction only, so that what was sent arrives.
void Net::fail(Trouble trouble) {
  if (trouble_) return;
  trouble_ = std::move(trouble);
  for (const auto& peer : peers_) {
    if (!peer) continue;
    const bool between = peer->outs.empty() || peer->outs.front().sent == 0;  // not in the middle of a message
    if (between && trouble_->process != process_) {
      const Header header{kGaveUp, 0, 0, 0, trouble_->process, 0};
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
  if (process == process_) return {kind, e.name + ": this process " + what};
  const std::string who = "process " + std::to_string(process) + " at " + peers_[static_cast<size_t>(process)]->host;
  const auto rank = std::find(e.group.processes.begin(), e.group.processes.end(), process);
  if (rank == e.group.processes.end()) return {kind, e.name + ": " + who + " " + what};
  const std::string which = "rank " + std::to_string(rank - e.group.processes.begin()) + " (" + who + ")";
  return {kind, e.name + ": rank " + std::to_string(e.group.rank) + " waits for " + which + ", which " + what};
}

}  // namespace jaxcgx::tcp
