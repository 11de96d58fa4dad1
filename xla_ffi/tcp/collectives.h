// Exchanges of raw bytes: all_to_all, all_gather and permute.
#pragma once

#include "tcp/completion.h"
#include "tcp/net.h"

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
  int64_t digest;  // a hash of everything else that must be the same on all ranks
};

// Starts a collective. Returns when all of its messages are queued. `in` and `out` are in use until `done` is called.
void run(const std::shared_ptr<Net>& net, Group group, const Collective& collective, Done done);

}  // namespace jaxcgx::tcp
