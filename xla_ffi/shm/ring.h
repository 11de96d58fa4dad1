// Exchanges among processes that share memory, each a rank.
//
// Every rank has a ring of slots that it alone writes and the others read. An exchange is a number of rounds, the same
// on every rank. In a round, a rank fills its next slot and takes its part of the others' slots. So a byte is written
// once, and read once by each receiver. The few slots stay in the caches. The rounds of the next exchange follow
// directly.
//
// The contents of shared memory are never trusted: they are compared with what this rank expects, and decide neither a
// size nor an address. Every wait ends: a rank that died, left, gave up or is late is an error that names it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "status.h"

namespace jaxcgx::shm {

// all_to_all: `bytes` for each rank, [ranks, bytes] -> [ranks, bytes]; row r goes to and comes from rank r.
// all_gather: [bytes] -> [ranks, bytes]. shift: from the rank that is `argument` lower. broadcast: from rank
// `argument`.
enum class Operation : int64_t { kAllToAll, kAllGather, kShift, kBroadcast };
constexpr int64_t kOperations = 4;

struct Exchange {
  Operation operation;
  int64_t argument, bytes;
  const uint8_t* in;
  uint8_t* out;
  int64_t digest = 0;  // of everything else that must be the same on all ranks
};

constexpr int64_t kMostRanks = 1024;

class Ring {
 public:
  static int64_t bytes(int64_t ranks);

  // memory: bytes(ranks) bytes, shared by all ranks, zero before the first one joins.
  Ring(void* memory, int64_t rank, int64_t ranks, std::chrono::milliseconds timeout);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Call before the first exchange. Returns when every rank has joined. processes: those of the ranks, to notice if one
  // ends before it joins.
  Status join(const std::vector<int64_t>& processes);

  // Ends every exchange of the others that needs this rank, as the destructor does. May be called while an exchange is
  // running here.
  void leave();

  // After an error, every further exchange returns it: the ranks may be in different rounds.
  Status run(const Exchange& exchange);

  int64_t ranks() const { return ranks_; }

 private:
  struct Control;
  struct Slot;
  struct Terms;
  using Word = std::atomic<uint32_t>;

  Control& control(int64_t rank) const;
  Slot& slot(int64_t rank, uint32_t round) const;
  Status exchange(const Exchange& e, const Terms& terms);
  void write(const Exchange& e, const Terms& terms, int64_t offset);
  Status read(const Exchange& e, const Terms& terms, int64_t offset);
  Status wait(int64_t rank, const Terms& terms);
  bool died(int64_t rank) const;
  std::string why() const;
  std::string name(int64_t rank) const;

  uint8_t* const memory_;
  const int64_t rank_, ranks_;
  const std::chrono::milliseconds timeout_;
  uint32_t written_ = 0, read_ = 0;  // rounds; they wrap around
  std::vector<int> processes_;       // pidfds
  Status failure_;
  std::mutex mutex_;
};

}  // namespace jaxcgx::shm
