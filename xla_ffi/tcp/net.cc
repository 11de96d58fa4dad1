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

constexpr uint64_t kMessage = 0x6a61786367781026;  // "jaxcgx", and the version of the protocol
constexpr uint64_t kGaveUp = 0x6a61786367781027;
constexpr std::chrono::milliseconds kNap{100};  // deadlines are checked this often
constexpr std::chrono::milliseconds kPaced{1};  // with a pace, sockets are tried this often
constexpr int kBeats = 6;                       // a process that is silent for this many beats has vanished

const char* const kEnded = "has ended or left";
const char* const kUnexpected = "sent what nobody expects";
const char* const kSame = "; every process must run the same exchanges, in the same order";

std::string ended_or(int error) {
  return error == ECONNRESET || error == EPIPE ? kEnded : std::string("can't be reached: ") + std::strerror(error);
}

// Returns the number of bytes up to the last nonzero byte.
int64_t without_zeros(const uint8_t* data, int64_t bytes) {
  constexpr int64_t kStep = 4096;
  static constexpr uint8_t kZeros[kStep] = {};
  while (bytes >= kStep && std::memcmp(data + bytes - kStep, kZeros, kStep) == 0) bytes -= kStep;
  while (bytes > 0 && data[bytes - 1] == 0) --bytes;
  return bytes;
}

bool nonblocking(int socket) { return fcntl(socket, F_SETFL, O_NONBLOCK) == 0; }

}  // namespace

Socket::~Socket() {
  if (number_ >= 0) close(number_);
}

Net::Net(int64_t process, int64_t devices, Socket events, Socket alarm, std::chrono::milliseconds silence, double pace)
    : process_(process),
      devices_(devices),
      silence_(silence),
      events_(std::move(events)),
      alarm_(std::move(alarm)),
      pace_(pace) {}

Net::~Net() {
  if (!thread_.joinable()) return;
  post([this] { stopping_ = true; });
  thread_.join();
}

Or<std::shared_ptr<Net>> Net::make(int64_t process, std::vector<Connection> connections, int64_t devices,
                                   std::chrono::milliseconds silence, double pace) {
  const auto n = static_cast<int64_t>(connections.size());
  const auto failed = [](const std::string& what) { return Failure{what + ": " + reason()}; };
  if (n < 1 || n > kMostProcesses || process < 0 || process >= n) {
    return Failure{"expected a process of 1 to " + std::to_string(kMostProcesses) + ", got process " +
                   std::to_string(process) + " of " + std::to_string(n)};
  }
  if (devices < 1) return Failure{"expected a device"};
  Socket events(epoll_create1(EPOLL_CLOEXEC)), alarm(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (events.number() < 0) return failed("epoll_create1");
  if (alarm.number() < 0) return failed("eventfd");
  const std::shared_ptr<Net> net(new Net(process, devices, std::move(events), std::move(alarm), silence, pace));
  const auto watch = [&](int socket, uint32_t what, Lane* lane) {
    epoll_event event{};
    event.events = what;
    event.data.ptr = lane;
    return epoll_ctl(net->events_.number(), EPOLL_CTL_ADD, socket, &event) == 0;
  };
  for (int64_t i = 0; i < n; ++i) {
    Connection& c = connections[static_cast<size_t>(i)];
    net->peers_.push_back(std::make_unique<Peer>());
    Peer& peer = *net->peers_.back();
    peer.process = i, peer.host = std::move(c.host), peer.beats = std::move(c.beats);
    peer.streams = std::vector<Stream>(static_cast<size_t>(devices));
    if (i == process) continue;
    const size_t lanes = c.data.size() / peer.streams.size();
    if (!nonblocking(peer.beats.number()) || lanes == 0 || c.data.size() % lanes != 0) return failed("a connection");
    for (int64_t device = 0; device < devices; ++device) {
      Stream& stream = peer.streams[static_cast<size_t>(device)];
      stream.lanes = std::vector<Lane>(lanes);
      for (size_t k = 0; k < lanes; ++k) {
        Lane& lane = stream.lanes[k];
        lane.device = device, lane.socket = std::move(c.data[static_cast<size_t>(device) * lanes + k]);
        // Without this limit, a socket accepts slices until its buffer is full, and on a slow connection these slices
        // would be late. With it, a socket accepts the next slice when it has sent most of the last one, so fast
        // connections take more slices.
        if (lanes > 1) limit_unsent(lane.socket, kSlice);
        if (!nonblocking(lane.socket.number()) ||
            !watch(lane.socket.number(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, &lane))
          return failed("a connection");
      }
    }
  }
  if (!watch(net->alarm_.number(), EPOLLIN, nullptr)) return failed("epoll_ctl");
  net->next_beat_ = Clock::now() + silence / kBeats;
  net->thread_ = std::thread([self = net.get()] { self->run(); });
  return net;
}

void Net::forget() {
  process_ = -1;
  for (const auto& peer : peers_) {
    for (Stream& stream : peer->streams) {
      for (Lane& lane : stream.lanes) lane.socket = Socket();
    }
    peer->beats = Socket();
  }
  events_ = Socket(), alarm_ = Socket();
}

// These functions may be called from any thread.

void Net::leave() {
  post([this] { fail({Error::Kind::kGone, process_, "ends"}); });
}

void Net::interrupt() {
  post([this] {
    if (!running_.empty()) fail({Error::Kind::kGone, process_, "was interrupted"});
  });
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
  running->late_from = Clock::now() + exchange.deadline;
  running->steps = static_cast<int64_t>(exchange.receives.size()) + exchange.sends;
  running->slices.resize(exchange.receives.size());
  running->coming.resize(exchange.group.processes.size());
  running->going.resize(exchange.group.processes.size());
  running->numbers.resize(exchange.group.processes.size());
  for (const Exchange::Receive& r : exchange.receives) ++running->coming[static_cast<size_t>(r.rank)];
  running->exchange = std::move(exchange);
  post([this, running] { start(running); });
  return running;
}

void Net::send(const std::shared_ptr<Running>& running, int64_t rank, int64_t slot, const uint8_t* data, int64_t bytes,
               bool may_be_late) {
  if (running->exchange.trims) bytes = without_zeros(data, bytes);
  post([=] {
    if (running->over) return;
    const auto r = static_cast<size_t>(rank);
    const Exchange& e = running->exchange;
    Peer& peer = *peers_[static_cast<size_t>(e.group.processes[r])];
    if (!peer.gone.empty()) return fail({Error::Kind::kGone, peer.process, peer.gone});
    const Header header{kMessage, running->numbers[r], e.kind, e.digest, slot, bytes, 0, e.group.devices[r]};
    if (peer.process != process_ && unsent_++ == 0) pace_.wake();
    ++running->going[r];
    auto& outs = peer.streams[static_cast<size_t>(e.group.devices[static_cast<size_t>(e.group.rank)])].outs;
    if (e.overtakes || may_be_late) peer.keep_little_in_sockets();
    auto place = outs.end();
    if (!may_be_late && (e.overtakes || (!outs.empty() && outs.back()->may_be_late))) {  // those are always the last
      place = std::find_if(outs.begin(), outs.end(), [&](const auto& out) {
        return out->may_be_late || (e.overtakes && out->of->order < running->order);
      });
    }
    outs.insert(place, std::make_shared<Out>(Out{header, data, running, rank, header.slices(), may_be_late}));
  });
}

// These functions are called only in the thread that moves the bytes.

void Net::run() {
  run_soon();
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  while (true) {
    auto nap = running_.empty() ? silence_ / kBeats : std::min(kNap, silence_ / kBeats);
    if (pace_.limits() && unsent_ > 0) nap = kPaced;
    for (const auto& running : running_) {
      if (running->exchange.deadline.count() == 0) continue;
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(running->late_from - Clock::now());
      if (left.count() > 0) nap = std::min(nap, left);
    }
    const int n = epoll_wait(events_.number(), events, kEvents, static_cast<int>(nap.count()));
    for (int i = 0; i < n; ++i) {
      auto* lane = static_cast<Lane*>(events[i].data.ptr);
      if (lane == nullptr) {
        uint64_t rung;
        if (read(alarm_.number(), &rung, sizeof rung) < 0) {  // clears the alarm; the value does not matter
        }
        continue;
      }
      lane->readable |= (events[i].events & ~EPOLLOUT) != 0;
      lane->writable |= (events[i].events & ~(EPOLLIN | EPOLLRDHUP)) != 0;
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
      for (size_t i = 0; i < peers_.size(); ++i) {
        Peer& peer = *peers_[(turn_ + i) % peers_.size()];
        for (size_t j = 0; j < peer.streams.size(); ++j) {
          Stream& stream = peer.streams[(turn_ + j) % peer.streams.size()];
          const size_t lanes = stream.lanes.size(), first = lanes == 0 ? 0 : stream.turn++ % lanes;
          for (size_t k = 0; k < lanes; ++k) {
            Lane& lane = stream.lanes[(first + k) % lanes];
            moved |= push(peer, stream, lane);
            moved |= pull(peer, lane);
          }
        }
      }
      ++turn_;
      moved |= copy();
      if (Clock::now() >= next_beat_) beat();
    }
    look_at_the_clock();
  }
}

void Net::start(const std::shared_ptr<Running>& running) {
  const Exchange& e = running->exchange;
  if (!trouble_) running_.push_back(running);
  running->order = begun_++;
  const int64_t device = e.group.devices[static_cast<size_t>(e.group.rank)];
  for (size_t rank = 0; rank < e.group.processes.size() && !trouble_; ++rank) {
    if (static_cast<int64_t>(rank) == e.group.rank) continue;
    Peer& peer = *peers_[static_cast<size_t>(e.group.processes[rank])];
    Peer::Channel& channel = peer.channels[{device, e.group.devices[rank]}];
    running->numbers[rank] = channel.begun++;
    if (running->coming[rank] == 0) continue;
    channel.open[running->numbers[rank]] = {running, static_cast<int64_t>(rank)};
    if (!peer.gone.empty()) fail({Error::Kind::kGone, peer.process, peer.gone});
  }
  if (trouble_ && !running->over) {
    running->finish(error_of(e));
  } else if (running->steps == 0 && !running->over) {
    running->steps = 1;
    step(running);
  }
}

// Gives a lane the next slice that no lane has taken. Returns whether there is one for this lane.
bool Net::take(Stream& stream, Lane& lane) {
  if (stream.outs.empty()) return false;
  lane.out = stream.outs.front();
  Out& out = *lane.out;
  if (out.may_be_late && out.header.at == 0 && Clock::now() >= out.of->late_from) {
    out.header.bytes = 0;
    out.unsent = 1;
    out.of->exchange.late(out.header.slot);
  } else if (out.may_be_late && stream.lanes.size() > 1 && &lane == &stream.lanes.front()) {
    lane.out = nullptr;
    return false;
  }
  lane.leaving = out.header;
  lane.sent = 0;
  if ((out.header.at += kSlice) >= lane.leaving.bytes) stream.outs.pop_front();
  return true;
}

// Sends bytes on a lane: the rest of its slice, or the next slice that no lane has taken. Returns whether to try again.
// A short write is normal, so a slice may take several calls.
bool Net::push(Peer& peer, Stream& stream, Lane& lane) {
  if (!lane.writable || !peer.gone.empty() || trouble_) return false;
  if (!lane.out && !take(stream, lane)) return false;
  const int64_t header = sizeof(Header), length = lane.leaving.length(), at = std::max(lane.sent - header, int64_t{0});
  const int64_t of_header = header - std::min(lane.sent, header);
  const int64_t most = pace_.allows(of_header + length - at);
  if (most == 0) return false;
  iovec parts[2] = {
      {reinterpret_cast<char*>(&lane.leaving) + (header - of_header), static_cast<size_t>(std::min(of_header, most))},
      {const_cast<uint8_t*>(lane.out->data) + lane.leaving.at + at,
       static_cast<size_t>(std::max(most - of_header, int64_t{0}))}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t n = sendmsg(lane.socket.number(), &message, MSG_NOSIGNAL);
  if (n < 0) {
    if (errno == EINTR) return true;
    if (would_block())
      lane.writable = false;
    else
      lose(peer, ended_or(errno));
    return false;
  }
  pace_.sent(n);
  lane.sent += n;
  if (lane.sent == header + length) {
    const auto out = std::move(lane.out);
    lane.out = nullptr;
    if (--out->unsent == 0) {
      --unsent_;
      complete(*out);
    }
  }
  return true;
}

// Receives bytes on a lane: a header, or the slice after it. Returns whether to try again. A short read is normal, so
// both may take several calls.
bool Net::pull(Peer& peer, Lane& lane) {
  if (!lane.readable || lane.ended || !peer.gone.empty() || trouble_) return false;
  const bool header = lane.header_bytes < static_cast<int64_t>(sizeof(Header));
  if (!header && !lane.of && !expect(peer, lane)) return false;
  uint8_t* to;
  int64_t most;
  if (header) {
    to = reinterpret_cast<uint8_t*>(&lane.header) + lane.header_bytes;
    most = static_cast<int64_t>(sizeof(Header)) - lane.header_bytes;
  } else {
    to = lane.of->exchange.receives[lane.receive].data + lane.header.at + lane.received;
    most = lane.header.length() - lane.received;
  }
  if (most > 0) {
    const ssize_t n = recv(lane.socket.number(), to, static_cast<size_t>(most), 0);
    if (n < 0) {
      if (errno == EINTR) return true;
      if (would_block())
        lane.readable = false;
      else
        end(peer, lane, ended_or(errno));
      return false;
    }
    if (n == 0) {
      end(peer, lane, kEnded);
      return false;
    }
    peer.heard = true;
    (header ? lane.header_bytes : lane.received) += n;
  }
  if (!header && lane.received == lane.header.length()) {
    const auto running = std::move(lane.of);
    lane.of = nullptr;
    lane.header_bytes = lane.received = 0;
    if (--running->slices[lane.receive].missing == 0) complete(running, lane.receive, lane.header.bytes);
  }
  return true;
}

// Ends a receive whose message has `bytes` bytes.
void Net::complete(const std::shared_ptr<Running>& running, size_t i, int64_t bytes) {
  const Exchange& e = running->exchange;
  const Exchange::Receive& receive = e.receives[i];
  if (bytes < receive.bytes) std::memset(receive.data + bytes, 0, static_cast<size_t>(receive.bytes - bytes));
  const auto rank = static_cast<size_t>(receive.rank);
  if (--running->coming[rank] == 0) {
    Peer& peer = *peers_[static_cast<size_t>(e.group.processes[rank])];
    const int64_t device = e.group.devices[static_cast<size_t>(e.group.rank)];
    peer.channels[{device, e.group.devices[rank]}].open.erase(running->numbers[rank]);
  }
  if (e.received) e.received(i);
  step(running);
}

// Ends the send of a message.
void Net::complete(const Out& out) {
  --out.of->going[static_cast<size_t>(out.rank)];
  step(out.of);
}

// Copies the messages between devices of this process whose exchanges have begun. Returns whether there were any.
bool Net::copy() {
  Peer& self = *peers_[static_cast<size_t>(process_)];
  bool any = false;
  for (int64_t from = 0; from < devices_; ++from) {
    auto& outs = self.streams[static_cast<size_t>(from)].outs;
    if (outs.empty()) continue;  // as always with one device; the loop over all connections passes here every time
    std::vector<std::shared_ptr<Out>> ready;
    const auto begun = [&](const auto& out) { return self.has_begun(from, out->header); };
    std::copy_if(outs.begin(), outs.end(), std::back_inserter(ready), begun);
    outs.erase(std::remove_if(outs.begin(), outs.end(), begun), outs.end());
    for (const auto& out : ready) {
      const auto [running, receive] = find(self, from, out->header);
      if (!running) return false;
      const int64_t bytes = out->header.bytes;
      if (bytes > 0) std::memcpy(running->exchange.receives[receive].data, out->data, static_cast<size_t>(bytes));
      complete(running, receive, bytes);
      complete(*out);
      any = true;
    }
  }
  return any;
}

// Returns whether the slice after a header can be received. If not, it waits for an exchange that has not begun, or it
// is an error.
bool Net::expect(Peer& peer, Lane& lane) {
  const Header& h = lane.header;
  if (h.magic == kGaveUp) {
    const bool known = h.slot >= 0 && h.slot < processes() && h.slot != peer.process;
    end(peer, lane,
        "gave up" + (known ? ", because of process " + std::to_string(h.slot) : std::string(": it has the reason")));
    return false;
  }
  if (h.magic == kMessage && h.to >= 0 && h.to < devices_ && !peer.has_begun(lane.device, h)) return false;
  const auto [running, receive] = find(peer, lane.device, h);
  if (!running) return false;
  if (!running->slices[receive].take(h)) {
    fail({Error::Kind::kDifferent, peer.process, std::string(kUnexpected) + kSame, lane.device});
    return false;
  }
  lane.of = running;
  lane.receive = receive;
  return true;
}

// Returns the exchange and the receive of a message from a device. If there are none, all exchanges fail, and it
// returns null.
std::pair<std::shared_ptr<Net::Running>, size_t> Net::find(const Peer& peer, int64_t from, const Header& h) {
  std::string what = kUnexpected;
  if (const auto channel = peer.channels.find({h.to, from}); h.magic == kMessage && channel != peer.channels.end()) {
    const auto& open = channel->second.open;
    if (const auto found = open.find(h.number); found != open.end()) {
      const auto& [running, rank] = found->second;
      const Exchange& e = running->exchange;
      for (size_t i = 0; i < e.receives.size() && e.kind == h.kind; ++i) {
        const Exchange::Receive& r = e.receives[i];
        if (r.rank != rank || r.slot != h.slot) continue;
        const bool fits = h.bytes == r.bytes || (e.trims && h.bytes >= 0 && h.bytes < r.bytes);
        if (fits && e.digest == h.digest) return {running, i};
        what = fits ? "has other arrays, or another codec, schedule or divisor, of the same length"
                    : "sent " + std::to_string(h.bytes) + " bytes where " + std::to_string(r.bytes) + " are expected";
      }
      if (e.kind != h.kind) what = "has another exchange";
      what += kSame;
    }
  }
  fail({Error::Kind::kDifferent, peer.process, what, from});
  return {};
}

// Handles the end of a connection. Bytes on the other connections may still arrive, and may give the reason. beat()
// waits for them for one to two beats, or longer while a slice waits for an exchange that has not begun here.
void Net::end(Peer& peer, Lane& lane, const std::string& how) {
  lane.ended = true;
  if (peer.ends.empty() || peer.ends == kEnded) peer.ends = how;
  if (!peer.any_lane([](const Lane& each) { return !each.ended; })) lose(peer, peer.ends);
}

// Marks a process as gone. If an exchange still needs this process, all exchanges fail. Otherwise they may complete
// without it.
void Net::lose(Peer& peer, const std::string& how) {
  peer.gone = how;
  if (peer.receives() || peer.sends()) fail({Error::Kind::kGone, peer.process, how});
}

// Sends heartbeats, and finds processes that have vanished. It counts beats of this process instead of measuring time:
// a process that was stopped must not conclude that the other processes were silent.
void Net::beat() {
  next_beat_ = Clock::now() + silence_ / kBeats;
  for (const auto& peer : peers_) {
    if (peer->process == process_ || !peer->gone.empty()) continue;
    uint8_t beats[4096] = {};  // more bytes than can have arrived while the processes connected
    (void)!::send(peer->beats.number(), beats, 1, MSG_NOSIGNAL);  // if the socket is full, no beat is needed
    // The end of this connection (recv returns 0) needs no handling: a process that closed it has closed its data
    // connections, too, and their ends arrive after their data.
    if (recv(peer->beats.number(), beats, sizeof beats, 0) >= 0) peer->heard = true;
    peer->silent = peer->heard ? 0 : peer->silent + 1;
    peer->heard = false;
    if (peer->ending && !peer->early()) {
      lose(*peer, peer->ends);
      continue;
    }
    peer->ending = !peer->ends.empty();
    if (peer->silent >= kBeats) lose(*peer, "can't be reached: silent for " + std::to_string(silence_.count()) + " ms");
  }
}

// Counts a completed receive or send. After the last one, the exchange is done.
void Net::step(const std::shared_ptr<Running>& running) {
  if (--running->steps > 0) return;
  running_.erase(std::find(running_.begin(), running_.end(), running));
  running->finish(std::nullopt);
}

// Fails if an exchange is past its deadline and waits for another process.
void Net::look_at_the_clock() {
  for (const auto& running : running_) {
    if (Clock::now() < running->deadline) continue;
    const Exchange& e = running->exchange;
    size_t late = 0;
    while (late < e.group.processes.size() && running->coming[late] == 0 && running->going[late] == 0) ++late;
    if (late == e.group.processes.size()) continue;  // this rank itself is late: it waits for none of the others
    fail({Error::Kind::kLate, e.group.processes[late],
          "has not come within " + std::to_string(e.group.timeout.count()) + " ms", e.group.devices[late]});
    return;
  }
}

// Fails all exchanges. It tells the other processes the reason, then shuts down only the sending direction of each
// connection: closing the socket could discard bytes that are still on the way.
void Net::fail(Trouble trouble) {
  if (trouble_) return;
  trouble_ = std::move(trouble);
  const bool leaves = trouble_->process == process_ && trouble_->kind == Error::Kind::kGone;
  for (const auto& peer : peers_) {
    for (Stream& stream : peer->streams) {
      for (Lane& lane : stream.lanes) {
        const bool between = !lane.out || lane.sent == 0;  // a header would be misread in the middle of a slice
        if (between && !leaves) {
          const Header header{kGaveUp, 0, 0, 0, trouble_->process, 0, 0, 0};
          ::send(lane.socket.number(), &header, sizeof header, MSG_NOSIGNAL);
        }
        shutdown(lane.socket.number(), SHUT_WR);
        lane.out = nullptr;
        lane.of = nullptr;
      }
      stream.outs.clear();
    }
    for (auto& each : peer->channels) each.second.open.clear();
  }
  unsent_ = 0;
  for (const auto& running : running_) running->finish(error_of(running->exchange));
  running_.clear();
}

Error Net::error_of(const Exchange& e) const {
  const auto& [kind, process, what, device] = *trouble_;
  if (process == process_ && device < 0) return {kind, e.name + ": this process " + what};
  const std::string at =
      process == process_ ? "this process"
                          : "process " + std::to_string(process) + " at " + peers_[static_cast<size_t>(process)]->host;
  const std::string who = device > 0 ? "device " + std::to_string(device) + " of " + at : at;
  for (int64_t rank = 0; rank < e.group.size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (e.group.processes[r] != process || (device >= 0 && e.group.devices[r] != device)) continue;
    if (rank == e.group.rank) return {kind, e.name + ": this rank " + what};
    const std::string which = "rank " + std::to_string(rank) + " (" + who + ")";
    return {kind, e.name + ": rank " + std::to_string(e.group.rank) + " waits for " + which + ", which " + what};
  }
  return {kind, e.name + ": " + who + " " + what};
}

}  // namespace jaxcgx::tcp
