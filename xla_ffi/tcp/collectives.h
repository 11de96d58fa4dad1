// Exchanges of raw bytes: all_to_all, all_gather and permute.
#pragma once

#include <memory>
#include <utility>

#include "tcp/completion.h"
#include "tcp/net.h"
#include "tcp/workspaces.h"

namespace jaxcgx::tcp {

// jaxcgx/native/tcp.py has the same numbers.
enum class Operation : int64_t { kAllToAll, kAllGather, kPermute };
constexpr int64_t kOperations = 3;

// all_to_all: [ranks, bytes] -> [ranks, bytes]; row r of `in` goes to rank r, row r of `out` comes from rank r.
// all_gather: [bytes] -> [ranks, bytes]. permute: [bytes] -> [bytes]; rank r sends to targets[r], or to no rank if that
// is -1. A rank to which no rank sends gets zeros.
struct Collective {
  Operation operation;
  int64_t bytes;
  std::vector<int64_t> targets;  // permute only: by rank
  const uint8_t* in;
  uint8_t* out;
  int64_t digest;          // a hash of everything else that must be the same on all ranks
  bool overtakes = false;  // Exchange::overtakes

  int64_t in_bytes(int64_t ranks) const { return bytes * (operation == Operation::kAllToAll ? ranks : 1); }
  int64_t out_bytes(int64_t ranks) const { return bytes * (operation == Operation::kPermute ? 1 : ranks); }
};

// Starts a collective. Returns when all of its messages are queued. `in` and `out` are in use until `done` is called.
void run(const std::shared_ptr<Net>& net, Group group, const Collective& collective, Done done);

// A collective that takes two calls, begin and end. Between them it uses only memory that it owns.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  // Returns the bytes of `memory` that it needs.
  static int64_t memory_bytes(const Collective& c, int64_t ranks) {
    return whole_lines(c.in_bytes(ranks)) + c.out_bytes(ranks);
  }
  // `in` and `out` of the collective are in `memory`. The caller writes to `in` before begin.
  Transfer(Collective collective, int64_t ranks, std::shared_ptr<uint8_t> memory)
      : memory_(std::move(memory)),
        collective_(std::move(collective)),
        bytes_(collective_.out_bytes(ranks)),
        completion_(2, [this](const Status& status) { std::exchange(done_, nullptr)(status); }) {
    collective_.in = memory_.get();
    collective_.out = memory_.get() + whole_lines(collective_.in_bytes(ranks));
  }

  uint8_t* in() const { return memory_.get(); }
  const uint8_t* out() const { return collective_.out; }
  int64_t bytes() const { return bytes_; }  // of `out`

  void begin(const std::shared_ptr<Net>& net, Group group) {
    run(net, std::move(group), collective_,
        [self = shared_from_this()](const Status& status) { self->completion_.part(status); });
  }
  // Calls `done` when `out` is complete.
  void end(Done done) {
    done_ = std::move(done);
    completion_.part();
  }

 private:
  const std::shared_ptr<uint8_t> memory_;
  Collective collective_;
  const int64_t bytes_;
  Done done_;
  Completion completion_;  // its parts: the collective, and end
};

}  // namespace jaxcgx::tcp
