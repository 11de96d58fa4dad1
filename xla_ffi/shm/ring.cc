#include "shm/ring.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jaxcgx::shm {
namespace {

using Clock = std::chrono::steady_clock;

// With four slots, readers need not acknowledge what they have read. A rank writes at most one round ahead of what it
// reads. So when it fills its slot for round r + 1, it has read the other ranks' slots for round r - 1. The other ranks
// filled those slots after they had read round r - 3, which used the same slot as r + 1.
constexpr int64_t kSlots = 4;
// Large enough that a round spends more time on copying than on waiting, small enough for the caches
// (benchmarks/notes/shm.md).
constexpr int64_t kSlotBytes = 256 << 10;
constexpr int64_t kLine = 128;                 // two cache lines, against false sharing: prefetchers fetch pairs
constexpr int kSpins = 2000;                   // about 20 us, the cost of a sleep and a wake
constexpr std::chrono::milliseconds kNap{50};  // a waiting rank checks this often whether the other rank is alive

enum State : uint32_t { kAbsent, kHere, kLeft, kFailed };

const char* const kNames[kOperations] = {"all_to_all", "all_gather", "shift", "broadcast"};

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Returns whether round number `value` is at or past `target`. Round numbers wrap around, but two ranks are always less
// than 2^31 rounds apart.
bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));  // a pointer to 0 bytes may be null
}

}  // namespace

// The terms on which ranks must agree. Every slot has them, so that a rank detects a difference before it copies a
// byte.
struct Ring::Terms {
  int64_t operation, argument, bytes, digest;

  bool operator==(const Terms& o) const {
    return operation == o.operation && argument == o.argument && bytes == o.bytes && digest == o.digest;
  }

  std::string words() const {
    const bool known = operation >= 0 && operation < kOperations;
    std::string s = known ? kNames[operation] : "unknown operation";
    if (operation == static_cast<int64_t>(Operation::kShift)) s += " by " + std::to_string(argument);
    if (operation == static_cast<int64_t>(Operation::kBroadcast)) s += " from rank " + std::to_string(argument);
    return s + " of " + std::to_string(bytes) + " bytes";
  }
};

struct Ring::Control {
  alignas(kLine) Word state;
  Word process;
  alignas(kLine) Word written;  // number of rounds that this rank has written
  Word sleepers;                // number of ranks that sleep until `written` changes
};

struct Ring::Slot {
  alignas(kLine) Terms terms;
  alignas(kLine) uint8_t data[kSlotBytes];
};

int64_t Ring::bytes(int64_t ranks) { return ranks * static_cast<int64_t>(sizeof(Control) + kSlots * sizeof(Slot)); }

Ring::Ring(void* memory, int64_t rank, int64_t ranks, std::chrono::milliseconds timeout)
    : memory_(static_cast<uint8_t*>(memory)), rank_(rank), ranks_(ranks), timeout_(timeout), processes_(ranks, -1) {}

void Ring::leave() {
  uint32_t here = kHere;
  // The child of a fork has the mapping, too, but is not a rank.
  if (control(rank_).process.load() != static_cast<uint32_t>(getpid())) return;
  control(rank_).state.compare_exchange_strong(here, kLeft);
  wake(control(rank_).written);
}

Ring::~Ring() {
  leave();
  for (int process : processes_) {
    if (process >= 0) close(process);
  }
}

bool Ring::died(int64_t rank) const {
  pollfd process{processes_[rank], POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}

Ring::Control& Ring::control(int64_t rank) const { return reinterpret_cast<Control*>(memory_)[rank]; }

Ring::Slot& Ring::slot(int64_t rank, uint32_t round) const {
  return reinterpret_cast<Slot*>(memory_ + ranks_ * sizeof(Control))[rank * kSlots + round % kSlots];
}

// Returns the reason why another rank gave up: a rank that died, if there is one.
std::string Ring::why() const {
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    if (died(rank)) return ": " + name(rank) + " has ended";
  }
  return ": it has the reason";
}

std::string Ring::name(int64_t rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(control(rank).process.load()) + ")";
}

Status Ring::join(const std::vector<int64_t>& processes) {
  uint32_t nobody = 0;
  if (!control(rank_).process.compare_exchange_strong(nobody, static_cast<uint32_t>(getpid()))) {
    return Error{Error::Kind::kDifferent, "there already is a " + name(rank_)};
  }
  const auto gone = [&](int64_t rank, const std::string& how) {
    return Error{Error::Kind::kGone, "rank " + std::to_string(rank) + " (process " +
                                         std::to_string(processes[static_cast<size_t>(rank)]) + ") " + how};
  };
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    processes_[rank] = static_cast<int>(syscall(SYS_pidfd_open, processes[static_cast<size_t>(rank)], 0));
    if (processes_[rank] >= 0) continue;
    return gone(rank,
                errno == ESRCH ? "has ended" : std::string("can't be watched: pidfd_open: ") + std::strerror(errno));
  }
  control(rank_).state.store(kHere);
  const auto deadline = Clock::now() + timeout_;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    while (control(rank).state.load() == kAbsent) {
      if (died(rank)) return gone(rank, "has ended");
      if (Clock::now() >= deadline) {
        return Error{Error::Kind::kLate, "rank " + std::to_string(rank) + " has not come within " +
                                             std::to_string(timeout_.count()) + " ms"};
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return std::nullopt;
}

Status Ring::run(const Exchange& e) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Terms terms{static_cast<int64_t>(e.operation), e.argument, e.bytes, e.digest};
  if (!failure_ && (failure_ = exchange(e, terms))) {
    control(rank_).state.store(kFailed);
    wake(control(rank_).written);
  }
  return failure_;
}

namespace {

bool comes_from(const Exchange& e, int64_t rank, int64_t to, int64_t ranks) {
  switch (e.operation) {
    case Operation::kShift:
      return (rank + e.argument) % ranks == to;
    case Operation::kBroadcast:
      return rank == e.argument;
    default:
      return true;
  }
}

const uint8_t* source(const Exchange& e, int64_t rank) { return e.in + (scatters(e.operation) ? rank * e.bytes : 0); }

uint8_t* target(const Exchange& e, int64_t rank) { return e.out + (gathers(e.operation) ? rank * e.bytes : 0); }

// Returns the most bytes of a row that fit in a slot. With all_to_all, the other ranks' rows share the slot.
int64_t step_of(const Exchange& e, int64_t ranks) {
  return e.operation == Operation::kAllToAll ? kSlotBytes / std::max<int64_t>(ranks - 1, 1) / 64 * 64 : kSlotBytes;
}

}  // namespace

Status Ring::exchange(const Exchange& e, const Terms& terms) {
  const int64_t step = step_of(e, ranks_);
  int64_t ahead = 0;
  // Writing is one round ahead of reading: while the other ranks read the last slot, this rank fills the next one. An
  // exchange of 0 bytes has one round, too, in which the ranks compare terms.
  for (int64_t offset = 0; offset == 0 || offset < e.bytes; offset += step) {
    for (; ahead <= offset + step && (ahead == 0 || ahead < e.bytes); ahead += step) write(e, terms, ahead);
    if (Status error = read(e, terms, offset)) return error;
  }
  return std::nullopt;
}

void Ring::write(const Exchange& e, const Terms& terms, int64_t offset) {
  const int64_t step = step_of(e, ranks_), bytes = std::min(step, e.bytes - offset);
  Slot& s = slot(rank_, written_);
  s.terms = terms;
  if (e.operation == Operation::kAllToAll) {
    for (int64_t i = 1; i < ranks_; ++i) copy(s.data + (i - 1) * step, source(e, (rank_ + i) % ranks_) + offset, bytes);
  } else if (e.operation != Operation::kBroadcast || e.argument == rank_) {
    copy(s.data, e.in + offset, bytes);
  }
  Control& mine = control(rank_);
  // The store releases the slot. It is sequentially consistent, like the load of `sleepers`, and in wait() the
  // increment of `sleepers` and the load of `written`. So either this rank sees the sleeper, or the sleeper sees the
  // new value: no wakeup is lost.
  mine.written.store(++written_);
  if (mine.sleepers.load() > 0) wake(mine.written);
  // Copy the rank's own part now, while it may still be in the caches.
  if (comes_from(e, rank_, rank_, ranks_)) copy(target(e, rank_) + offset, source(e, rank_) + offset, bytes);
}

Status Ring::read(const Exchange& e, const Terms& terms, int64_t offset) {
  const int64_t step = step_of(e, ranks_), bytes = std::min(step, e.bytes - offset);
  for (int64_t i = 1; i < ranks_; ++i) {
    const int64_t rank = (rank_ + ranks_ - i) % ranks_;  // row i - 1 of its slots is for this rank
    if (Status error = wait(rank, terms)) return error;
    const Slot& s = slot(rank, read_);
    if (const Terms found = s.terms; !(found == terms)) {
      const bool other = found.words() == terms.words();
      return Error{Error::Kind::kDifferent,
                   "rank " + std::to_string(rank_) + " has " + terms.words() + ", " + name(rank) + " has " +
                       found.words() + (other ? " of other arrays, or of another codec, schedule or divisor" : "") +
                       "; every rank must run the same exchanges, in the same order"};
    }
    if (!comes_from(e, rank, rank_, ranks_)) continue;
    copy(target(e, rank) + offset, s.data + (e.operation == Operation::kAllToAll ? (i - 1) * step : 0), bytes);
  }
  ++read_;
  return std::nullopt;
}

Status Ring::wait(int64_t rank, const Terms& terms) {
  Word& w = control(rank).written;
  const uint32_t target = read_ + 1;
  for (int i = 0; i < kSpins; ++i) {
    if (reached(w.load(std::memory_order_acquire), target)) return std::nullopt;
    pause();
  }
  const auto deadline = Clock::now() + timeout_;
  const auto error_of = [&](Error::Kind kind, const std::string& what) {
    return Error{kind,
                 terms.words() + ": rank " + std::to_string(rank_) + " waits for " + name(rank) + ", which " + what};
  };
  Status error;
  control(rank).sleepers.fetch_add(1);
  for (uint32_t value; !error && !reached(value = w.load(), target);) {
    const uint32_t state = control(rank).state.load();
    Status gone;
    if (died(rank))
      gone = error_of(Error::Kind::kGone, "has ended");
    else if (state == kLeft)
      gone = error_of(Error::Kind::kGone, "has left");
    else if (state == kFailed)
      gone = error_of(Error::Kind::kGone, "gave up" + why());
    else if (Clock::now() >= deadline)
      gone = error_of(Error::Kind::kLate, "has not come within " + std::to_string(timeout_.count()) + " ms");
    // A rank may have finished this round before it left. That is not an error.
    if (gone && !reached(w.load(), target)) error = gone;
    if (!gone) sleep_on(w, value);
  }
  control(rank).sleepers.fetch_sub(1);
  return error;
}

}  // namespace jaxcgx::shm
