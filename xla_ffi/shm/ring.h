// Exchanges among processes that share memory. Each process is a rank.
//
// Every rank has a ring of slots. Only this rank writes to it, and the other ranks read it. An exchange is a number of
// rounds, the same on every rank. In a round, a rank fills its next slot and copies its part of the other ranks' slots.
// So a byte is written once, and read once by each receiver. There are few slots, so they stay in the caches. The
// rounds of the next exchange follow without a barrier.
//
// The contents of shared memory are never trusted: they are compared with the values that this rank expects, and
// determine neither a size nor an address. Every wait ends: if a rank died, left, gave up or is late, the exchange
// returns an error that names the rank.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "status.h"

namespace jaxcgx::shm {

// all_to_all: [ranks, bytes] -> [ranks, bytes]; row r of the input goes to rank r, row r of the output comes from rank
// r. all_gather: [bytes] -> [ranks, bytes]. shift: [bytes] -> [bytes], from the rank that is `argument` lower, modulo
// ranks. broadcast: [bytes] -> [bytes], from rank `argument`.
enum class Operation : int64_t { kAllToAll, kAllGather, kShift, kBroadcast };
constexpr int64_t kOperations = 4;
// Whether a rank gives a row to each rank, and whether it gets one from each.
constexpr bool scatters(Operation operation) { return operation == Operation::kAllToAll; }
constexpr bool gathers(Operation operation) { return scatters(operation) || operation == Operation::kAllGather; }

struct Exchange {
  Operation operation;
  int64_t argument, bytes;
  const uint8_t* in;
  uint8_t* out;
  int64_t digest = 0;  // a hash of everything else that must be the same on all ranks
};

constexpr int64_t kMostRanks = 1024;

class Ring {
 public:
  // Returns the bytes of shared memory that `ranks` ranks need.
  static int64_t bytes(int64_t ranks);

  // memory: bytes(ranks) bytes that all ranks share. They must be zero before the first rank joins.
  Ring(void* memory, int64_t rank, int64_t ranks, std::chrono::milliseconds timeout);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Joins the other ranks. Call it before the first exchange. Returns when every rank has joined. processes: the
  // process ids of the ranks, used to notice a process that ends.
  Status join(const std::vector<int64_t>& processes);

  // Ends every exchange of other ranks that needs this rank, as the destructor does. It may be called while an exchange
  // is running here.
  void leave();

  // Runs an exchange. After an error, every later exchange returns the same error, because the ranks may be in
  // different rounds.
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
  uint32_t written_ = 0, read_ = 0;  // numbers of rounds; they wrap around
  std::vector<int> processes_;       // pidfds
  Status failure_;
  std::mutex mutex_;
};

}  // namespace jaxcgx::shm
