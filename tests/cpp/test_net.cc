// Exchanges over TCP. Each process is a Net in a thread. Tests check the results, and the errors if one fails or lies.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <random>

#include "check.h"
#include "nets.h"
#include "sent.h"
#include "tcp/net.h"
#include "tcp/threads.h"
#include "tcp/workspaces.h"

using namespace jaxcgx;
using namespace jaxcgx::test;

namespace {

void wait_for(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(1ms);
}

// Runs body(net, rank) in a thread for each process, with all of them connected.
void together(int64_t processes, const std::function<void(Net&, int64_t)>& body,
              std::chrono::milliseconds silence = 30s) {
  auto nets = connected(processes, silence);
  each_rank(processes, [&](int64_t i) {
    body(*nets[i], i);
    nets[i].reset();
  });
}

// Sends from every rank to every other one, in slots that are sent in another order than they are received.
struct AllToAll {
  Waiter waiter;
  std::vector<std::vector<uint8_t>> in, out;
  int64_t number, rank, ranks, slots;

  AllToAll(Net& net, std::vector<int64_t> processes, int64_t rank, int64_t bytes, int64_t slots, int64_t number,
           std::chrono::milliseconds timeout = 30s, bool overtakes = false)
      : AllToAll(net, group(std::move(processes), rank, timeout), bytes, slots, number, overtakes) {}

  AllToAll(Net& net, tcp::Group group, int64_t bytes, int64_t slots, int64_t number, bool overtakes = false)
      : number(number), rank(group.rank), ranks(group.size()), slots(slots) {
    tcp::Exchange e{};
    e.name = "all_to_all of " + std::to_string(bytes) + " bytes";
    e.group = std::move(group);
    e.sends = (ranks - 1) * slots;
    e.done = waiter.done();
    e.overtakes = overtakes;
    for (int64_t i = 0; i < ranks * slots; ++i) {
      in.emplace_back(bytes), out.emplace_back(bytes, 0xee);
      test::sent(number + i % slots, rank, i / slots, 0, in.back().data(), bytes);
      if (i / slots != rank) e.receives.push_back({i / slots, i % slots, out.back().data(), bytes});
    }
    const auto running = net.begin(std::move(e));
    for (int64_t i = ranks * slots - 1; i >= 0; --i) {
      if (i / slots != rank) net.send(running, i / slots, i % slots, in[i].data(), bytes);
    }
  }
  std::string result() {
    if (std::string error = waiter.wait(); !error.empty()) return error;
    for (int64_t i = 0; i < ranks * slots; ++i) {
      const auto bytes = static_cast<int64_t>(out[i].size());
      if (i / slots != rank && !test::are_sent(number + i % slots, i / slots, rank, out[i].data(), bytes))
        return "wrong bytes";
    }
    return "";
  }
};

void test_exchanges() {
  for (const int64_t processes : {1, 2, 3, 5}) {
    together(processes, [&](Net& net, int64_t rank) {
      int64_t number = 0;
      for (const int64_t bytes : {0, 1, 1000, 300001}) {
        for (const int64_t slots : {1, 3}) {
          CHECK_NO_ERROR(AllToAll(net, first(processes), rank, bytes, slots, number += 7).result());
        }
      }
    });
  }
}

// The first exchange fills the sockets, so that the bytes of the second wait. The second has other ranks, in
// another order.
void test_several_in_flight_and_groups() {
  together(4, [](Net& net, int64_t process) {
    const std::vector<int64_t> row = process < 2 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{3, 2};
    const std::vector<int64_t> column = process % 2 ? std::vector<int64_t>{3, 1} : std::vector<int64_t>{0, 2};
    const auto rank_in = [&](const std::vector<int64_t>& group) { return static_cast<int64_t>(group[1] == process); };
    if (process == 2) std::this_thread::sleep_for(50ms);
    AllToAll a(net, row, rank_in(row), 3000000, 2, 1), b(net, column, rank_in(column), 2000000, 1, 2),
        c(net, first(4), process, 100000, 1, 3);
    CHECK(c.result() + b.result() + a.result() == "", "in flight");
  });
}

// Processes 0 and 1 with two devices each, process 2 with one. Every device runs in a thread of its own, so the order
// of the exchanges of two devices differs from process to process.
void test_devices() {
  const auto nets = connected(3, 30s, 2);
  const std::vector<int64_t> processes = {0, 1, 0, 1, 2}, devices_of_ranks = {0, 1, 1, 0, 0};
  each_rank(5, [&](int64_t rank) {
    const int64_t process = processes[rank], device = devices_of_ranks[rank];
    Net& net = *nets[process];
    std::mt19937 random(static_cast<uint32_t>(rank));
    for (int64_t number = 1; number < 40; ++number) {
      if (random() % 4 == 0) std::this_thread::sleep_for(1ms);
      AllToAll all(net, {processes, devices_of_ranks, rank, 30s}, number % 3 * 100'000, 1 + number % 2, number);
      if (rank < 4 && number % 2) {  // two devices of each process; in the second group the other device of process 1
        const std::vector<int64_t> pair = number % 4 == 1 ? std::vector<int64_t>{0, 0} : std::vector<int64_t>{1, 0};
        const int64_t at = pair[process] == device ? 0 : 1;
        const std::vector<int64_t> both = {at ? 1 - pair[0] : pair[0], at ? 1 - pair[1] : pair[1]};
        CHECK_NO_ERROR(AllToAll(net, {{0, 1}, both, process, 30s}, 50'000, 1, 1000 + 2 * number + at).result());
      }
      CHECK_NO_ERROR(all.result());
    }
  });
}

// A device of process 1 waits for the other, which waits for process 0. What process 0 has sent to the waiting device
// before must not stand in the way.
void test_a_device_that_waits_for_another() {
  const auto nets = connected(2, 30s, 2);
  std::atomic<bool> sent{false}, ended{false};
  each_rank(4, [&](int64_t rank) {
    const int64_t process = rank / 2, device = rank % 2;
    const tcp::Group pair{{0, 1}, {device, device}, process, 30s};
    if (rank == 0) wait_for(sent), std::this_thread::sleep_for(50ms);
    if (rank == 3) wait_for(ended);
    AllToAll exchange(*nets[process], pair, 16'000'000, 1, 1);  // more than the sockets can hold
    if (rank == 1) sent = true;
    CHECK_NO_ERROR(exchange.result());
    if (rank == 2) ended = true;
  });
}

// A device that doesn't begin an exchange is named, whether it is in this process or in another.
void test_a_late_device() {
  const auto nets = connected(2, 30s, 3);
  std::atomic<bool> late{false};
  each_rank(3, [&](int64_t rank) {
    if (rank < 2) {
      CHECK_ERROR(AllToAll(*nets[0], {{0, 0, 0}, {0, 1, 2}, rank, 200ms}, 100, 1, 1).result(),
                  "waits for rank 2 (device 2 of this process), which has not come within 200 ms");
      late = true;
    } else {
      wait_for(late);
      CHECK_ERROR(AllToAll(*nets[1], group(first(2), 1), 100, 1, 1).result(), "which gave up: it has the reason");
    }
  });
}

// Devices of one process that run different exchanges get an error.
void test_devices_that_differ() {
  const auto nets = connected(2, 30s, 2);
  each_rank(2, [&](int64_t rank) {
    CHECK_ERROR(AllToAll(*nets[0], {{0, 0}, {0, 1}, rank, 30s}, 100 + rank, 1, 1).result(), "this rank sent 10",
                "this process), which sent 10");
  });
}

// Zeros at the end of a message, and a message of zeros, arrive without being sent.
void test_trims() {
  together(2, [](Net& net, int64_t rank) {
    constexpr int64_t kBytes = 700'000;
    for (const int64_t used : {int64_t{0}, int64_t{1}, int64_t{300'000}, kBytes}) {
      std::vector<uint8_t> data(kBytes), got(kBytes, 0xee);
      for (int64_t i = 0; i < used; ++i) data[i] = static_cast<uint8_t>(i % 251 + 1);
      Waiter waiter;
      tcp::Exchange e{"a sum", 0, 0, group(first(2), rank), {{1 - rank, 0, got.data(), kBytes}}, 1, {}, waiter.done()};
      e.trims = true;
      net.send(net.begin(std::move(e)), 1 - rank, 0, data.data(), kBytes);
      CHECK(waiter.wait() == "" && got == data, "trimmed to " + std::to_string(used));
    }
  });
}

// Later exchanges overtake: they arrive in the reverse order, before most of the first one.
void test_overtaking() {
  pace = 8e6;  // takes a second, in which the others begin even on a busy machine
  together(2, [](Net& net, int64_t rank) {
    AllToAll a(net, first(2), rank, 4'000'000, 2, 1), b(net, first(2), rank, 600'000, 1, 2, 30s, true),
        c(net, first(2), rank, 600'000, 1, 3, 30s, true);
    CHECK(c.result() + b.result() + a.result() == "", "overtaking");
    CHECK(c.waiter.turn() < a.waiter.turn() && b.waiter.turn() < a.waiter.turn(), "overtaking");
  });
  pace = 0;
}

// Messages that may be late let a later exchange pass. Past the deadline, those that are left arrive as zeros, and
// their sender knows which.
void test_late_messages() {
  constexpr int64_t kMessages = 40, kBytes = 200'000;
  pace = 4e6;  // takes two seconds
  std::vector<bool> late[2], zeros[2];
  together(2, [&](Net& net, int64_t rank) {
    std::vector<bool>&mine = late[rank], &theirs = zeros[1 - rank];
    mine.resize(kMessages), theirs.resize(kMessages);
    std::vector<uint8_t> data(kBytes, 7), got(kMessages * kBytes, 0xee), nothing(kBytes);
    Waiter waiter;
    tcp::Exchange e{"late", 1, 0, group(first(2), rank), {}, kMessages, {}, waiter.done()};
    e.trims = true;
    e.deadline = 500ms;
    e.late = [&](int64_t slot) { mine[slot] = true; };
    for (int64_t i = 0; i < kMessages; ++i) e.receives.push_back({1 - rank, i, got.data() + i * kBytes, kBytes});
    const auto running = net.begin(std::move(e));
    for (int64_t i = 0; i < kMessages; ++i) net.send(running, 1 - rank, i, data.data(), kBytes, true);
    AllToAll passes(net, first(2), rank, 200'000, 1, 2);
    CHECK(passes.result() + waiter.wait() == "" && passes.waiter.turn() < waiter.turn(), "late");
    for (int64_t i = 0; i < kMessages; ++i) {
      const uint8_t* const message = got.data() + i * kBytes;
      theirs[i] = std::memcmp(message, nothing.data(), kBytes) == 0;
      CHECK(theirs[i] || std::memcmp(message, data.data(), kBytes) == 0, "a part of a late message");
    }
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto given_up = std::count(late[rank].begin(), late[rank].end(), true);
    CHECK(late[rank] == zeros[rank] && given_up > 0 && given_up < kMessages, std::to_string(given_up) + " are late");
  }
  pace = 0;
}

// Process 0 sends to process 1, and others do nothing. Returns the error.
std::string one_way(Net& net, int64_t processes, int64_t rank, int64_t bytes) {
  std::vector<uint8_t> data(bytes, 7), got(bytes);
  Waiter waiter;
  tcp::Exchange e{"one way", 1, 0, group(first(processes), rank), {}, rank == 0, {}, waiter.done()};
  if (rank == 1) e.receives.push_back({0, 0, got.data(), bytes});
  const auto running = net.begin(std::move(e));
  if (rank == 0) net.send(running, 1, 0, data.data(), bytes);
  const std::string error = waiter.wait();
  return error.empty() && rank == 1 && got != data ? "wrong bytes" : error;
}

// Several times, while the receiver is late.
void test_one_way() {
  together(3, [](Net& net, int64_t rank) {
    if (rank == 1) std::this_thread::sleep_for(50ms);
    for (int i = 0; i < 5; ++i) CHECK(one_way(net, 3, rank, 100000) == "", "one way");
    CHECK(AllToAll(net, first(3), rank, 100, 1, 1).result() == "", "after it");
  });
}

// A process sends its last message and leaves, long before the late receiver begins the exchange.
void test_one_leaves_before_another_begins() {
  together(
      2,
      [](Net& net, int64_t rank) {
        if (rank == 1) std::this_thread::sleep_for(500ms);  // several beats
        CHECK_NO_ERROR(one_way(net, 2, rank, 1000));
      },
      300ms);
}

void test_one_leaves() {
  together(3, [](Net& net, int64_t rank) {
    CHECK(AllToAll(net, first(3), rank, 1000, 1, 1).result() == "", "all are here");
    if (rank == 2) return;
    for (int i = 0; i < 2; ++i) {
      CHECK_ERROR(AllToAll(net, first(3), rank, 1000, 1, 2).result(),
                  "all_to_all of 1000 bytes: rank " + std::to_string(rank) +
                      " waits for rank 2 (process 2 at 127.0.0.1), which has ended or left",
                  "which gave up, because of process 2");
    }
  });
}

// A process that leaves counts as ended, and its own exchanges end, too.
void test_one_ends() {
  std::atomic<bool> left{false};
  together(2, [&](Net& net, int64_t rank) {
    if (rank == 1) {
      AllToAll last(net, first(2), rank, 1000, 1, 1);
      net.leave();
      CHECK_ERROR(last.result(), "all_to_all of 1000 bytes: this process ends");
      left = true;
      return;
    }
    wait_for(left);
    AllToAll(net, first(2), rank, 1000, 1, 1).result();  // its data may have arrived
    CHECK_ERROR(AllToAll(net, first(2), rank, 1000, 1, 2).result(), "which has ended or left");
  });
}

constexpr int64_t kMuch = 16'000'000;  // more than the sockets can hold

void test_one_is_late() {
  for (const int64_t bytes : {int64_t{1000}, kMuch}) {
    std::atomic<bool> noticed{false};
    together(2, [&](Net& net, int64_t rank) {
      if (rank == 1) return wait_for(noticed);
      CHECK_ERROR(AllToAll(net, first(2), rank, bytes, 1, 1, 200ms).result(),
                  "rank 0 waits for rank 1 (process 1 at 127.0.0.1), which has not come within 200 ms");
      noticed = true;
    });
  }
}

// A process fills the sockets to one that is late. Neither counts as silent, because both send heartbeats.
void test_one_is_late_for_much() {
  together(
      2,
      [](Net& net, int64_t rank) {
        if (rank == 1) std::this_thread::sleep_for(900ms);
        CHECK(AllToAll(net, first(2), rank, kMuch, 1, 1).result() == "", "much, and late");
      },
      300ms);
}

// A process is connected to sockets that the caller has, instead of another process: those for data, then the one for
// heartbeats.
std::pair<std::shared_ptr<Net>, std::vector<tcp::Socket>> with_strangers(const char* host,
                                                                         std::chrono::milliseconds silence = 30s) {
  std::vector<tcp::Connection> two(2);
  two[1].host = host;
  std::vector<tcp::Socket> others;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    auto data = connection();
    two[1].data.push_back(std::move(data.first));
    others.push_back(std::move(data.second));
  }
  auto beats = connection();
  two[1].beats = std::move(beats.first);
  others.push_back(std::move(beats.second));
  return {made(0, std::move(two), silence), std::move(others)};
}

// One of several connections ends, as if its link had failed. The process is alive and sends heartbeats.
void test_one_connection_ends() {
  for (const bool before : {false, true}) {
    auto [net, others] = with_strangers("10.0.0.3", 300ms);
    std::atomic<bool> over{false};
    std::thread beats([&over, socket = others.back().number()] {
      for (; !over; std::this_thread::sleep_for(20ms)) (void)!send(socket, "", 1, MSG_NOSIGNAL);
    });
    std::optional<AllToAll> exchange;
    if (!before) exchange.emplace(*net, first(2), 0, 1000, 1, 1);
    others.erase(others.begin());
    if (before) std::this_thread::sleep_for(200ms), exchange.emplace(*net, first(2), 0, 1000, 1, 1);
    CHECK_ERROR(exchange->result(), "process 1 at 10.0.0.3), which has ended or left");
    over = true;
    beats.join();
  }
}

// Sending is never faster than the pace, for any number of connections. A pause gives no credit.
void test_pace() {
  pace = 20e6;
  together(2, [](Net& net, int64_t rank) {
    for (int i = 0; i < 2; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      CHECK(AllToAll(net, first(2), rank, 500'000, 3, i).result() == "", "paced");
      // 75 ms in each direction at once.
      CHECK(std::chrono::steady_clock::now() - begin >= 70ms, "faster than the pace");
      std::this_thread::sleep_for(50ms);
    }
  });
  pace = 0;
}

// A host vanishes: its connections stay open, and nothing arrives. It doesn't matter whether bytes still wait to be
// sent to it.
void test_one_vanishes() {
  for (const int64_t bytes : {int64_t{1000}, kMuch}) {
    auto [net, others] = with_strangers("10.0.0.3", 300ms);
    CHECK_ERROR(AllToAll(*net, first(2), 0, bytes, 1, 1).result(),
                "process 1 at 10.0.0.3), which can't be reached: silent for 300 ms");
  }
}

// Processes that don't need the one that gave up continue.
void test_one_gives_up() {
  std::atomic<bool> gave_up{false}, learned{false};
  together(3, [&](Net& net, int64_t rank) {
    if (rank == 0) {
      CHECK_ERROR(AllToAll(net, {0, 2}, 0, 1000, 1, 1, 100ms).result(), "which has not come within 100 ms");
      gave_up = true;
      wait_for(learned);  // a connection that is closed with unread bytes may lose bytes that were sent on it
    } else {
      wait_for(gave_up);
      CHECK(AllToAll(net, {1, 2}, rank - 1, 1000, 1, 2).result() == "", "without it");
    }
    if (rank == 2) {
      AllToAll(net, {0, 2}, 1, 1000, 1, 1).result();  // its data may have arrived
      CHECK_ERROR(AllToAll(net, {0, 2}, 1, 1000, 1, 1).result(),
                  "rank 1 waits for rank 0 (process 0 at 127.0.0.1), which gave up, because of process 2");
      learned = true;
    }
  });
}

void test_they_differ() {
  together(2, [](Net& net, int64_t rank) {
    CHECK_ERROR(AllToAll(net, first(2), rank, 1000 + rank, 1, 1).result(),
                "sent 100" + std::to_string(1 - rank) + " bytes where 100" + std::to_string(rank) + " are expected",
                "gave up");
  });
}

constexpr int64_t kSlices = 300'000;  // bytes of several slices

// Anything that a peer sends soon ends in an error, and writes nothing outside of the buffers.
void fuzz() {
  std::mt19937_64 random(1);
  for (int64_t round = 0; round < 30; ++round) {
    auto [made, others] = with_strangers("127.0.0.1");
    auto net = std::move(made);
    std::thread liar([&others = others, seed = random()] {
      std::mt19937_64 of(seed);
      const auto choose = [&](std::vector<uint64_t> likely) { return of() % 8 ? likely[of() % likely.size()] : of(); };
      for (int64_t i = 0; i < 4; ++i) {
        const uint64_t bytes = choose({0, 100, 101, kSlices});
        const int s = others[of() % static_cast<uint64_t>(lanes)].number();
        const uint64_t header[8] = {of() % 16 ? 0x6a61786367781026ull : 0x6a61786367781027ull,
                                    choose({0, 0, 1, 7}),
                                    choose({0, 0, 0, 1}),
                                    choose({0, 0, 0, 1}),
                                    choose({0, 0, 1, ~0ull}),
                                    bytes,
                                    choose({0, 0, 0, kSlices - kSlices % (128 << 10)}),
                                    choose({0, 0, 0, 1, ~0ull})};
        const std::vector<uint8_t> data(bytes > 1000 && bytes != kSlices ? 1000 : bytes, 1);
        (void)!send(s, header, sizeof header, MSG_NOSIGNAL);
        (void)!send(s, data.data(), data.size(), MSG_NOSIGNAL);
      }
      for (int64_t lane = 0; lane < lanes; ++lane) shutdown(others[lane].number(), SHUT_WR);
      char rest[4096];
      for (int64_t lane = 0; lane < lanes; ++lane) {
        while (read(others[lane].number(), rest, sizeof rest) > 0) {
        }
      }
    });
    for (int64_t i = 0; i < 3; ++i) {
      Waiter waiter;
      std::vector<uint8_t> in(100), out(100 + kSlices);
      const auto running = net->begin({"an exchange",
                                       0,
                                       0,
                                       group(first(2), 0, 20ms),
                                       {{1, 0, out.data(), 100}, {1, 1, out.data() + 100, kSlices}},
                                       1,
                                       {},
                                       waiter.done()});
      net->send(running, 1, 0, in.data(), 100);
      CHECK(waiter.wait() != "hangs", std::to_string(round));
    }
    net.reset();
    liar.join();
  }
}

// Sets the size of the stacks of new threads. Returns the size before.
size_t stacks(size_t bytes) {
  pthread_attr_t attributes;
  pthread_getattr_default_np(&attributes);
  size_t before;
  pthread_attr_getstacksize(&attributes, &before);
  pthread_attr_setstacksize(&attributes, bytes);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
  return before;
}

// Tasks run, also if the system starts only one of the threads, because there is no memory for others.
void test_threads() {
  Waiter all;
  auto& threads = *new tcp::Threads(3);  // its threads end with the process
  std::mutex mutex;
  int left = 100;
  size_t before = 0;
  for (int i = 0; i < 100; ++i) {
    threads.run([&] {
      std::lock_guard<std::mutex> lock(mutex);
      if (--left == 0) all.done()(std::nullopt);
    });
    if (i == 0) before = stacks(size_t{1} << 46);
  }
  stacks(before);
  CHECK(all.wait() == "", "threads");
  std::lock_guard<std::mutex> lock(mutex);  // the last task has released it, so it may be destroyed
}

// Buffers that are given back are used again, and no more are kept than were in use at once.
void test_workspaces() {
  const auto all = std::make_shared<tcp::Workspaces>();
  auto a = all->take(1000), b = all->take(3000);
  uint8_t* const first = a.get();
  std::memset(a.get(), 1, 1000);
  std::memset(b.get(), 2, 3000);
  CHECK(all->kept_bytes() == 0, "in use");
  a.reset();
  CHECK(all->kept_bytes() == 1000, "kept");
  a = all->take(1000);
  CHECK(a.get() == first && all->kept_bytes() == 0, "the same memory");
  a.reset();
  b.reset();
  CHECK(all->kept_bytes() == 4000, "as much as was in use");
  all->take(2000).reset();
  CHECK(all->kept_bytes() == 2000, "the oldest go first");
  CHECK(all->take(0) != nullptr, "nothing");

  const auto get = [heap = tcp::memory_on_the_heap()](int64_t bytes) {
    return bytes > 5000 ? nullptr : heap.get(bytes);
  };
  const auto few = std::make_shared<tcp::Workspaces>(tcp::Memory{get, [](uint8_t* p) { std::free(p); }});
  CHECK(few->take(6000) == nullptr, "no memory");
  for (const int64_t bytes : {1000, 3000}) few->take(bytes).reset();
  CHECK(few->kept_bytes() == 3000, "what failed was never in use");
}

}  // namespace

int main() {
  alarm(240);
#ifdef __SANITIZE_THREAD__
  lanes = 4;  // with several connections, which race more than one; AddressSanitizer's test has one
#else
  lanes = 1;
#endif
  for (; lanes <= 4; lanes += 3) {
    test_exchanges();
    test_several_in_flight_and_groups();
    test_devices();
    test_a_device_that_waits_for_another();
    test_a_late_device();
    test_devices_that_differ();
    test_trims();
    test_overtaking();
    test_late_messages();
    test_one_way();
    test_one_leaves();
    test_one_leaves_before_another_begins();
    test_one_ends();
    test_one_is_late();
    test_one_is_late_for_much();
    test_one_vanishes();
    test_one_connection_ends();
    test_one_gives_up();
    test_they_differ();
    test_pace();
    fuzz();
  }
  test_threads();
  test_workspaces();
  return test::finish();
}
