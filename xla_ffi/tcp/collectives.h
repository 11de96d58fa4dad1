// Exchanges of bytes as they are: all_to_all, all_gather and permute.
#pragma once

#include "tcp/completion.h"
#include "tcp/net.h"

namespace jaxcgx::tcp {

// jaxcgx/native/tcp.py has the same numbers.
enum class Operation : int64_t { kAllToAll, kAllGather, kPermute };
constexpr int64_t kOperations = 3;

// all_to_all: [ranks, bytes] -> [ranks, bytes]; row r goes to and comes from rank r. all_gather: [bytes] -> [ranks,
// bytes]. permute: [bytes] -> [bytes], from rank r to targets[r], or to no rank if that is -1; a rank to which no rank
// sends gets zeros.
struct Collective {
  Operation operation;
  int64_t bytes;
  std::vector<int64_t> targets;  // of permute, by rank
  const uint8_t* in;
  uint8_t* out;
  int64_t digest;  // of everything else that must be the same on all ranks
};

// Returns when everything is under way. `in` and `out` are in use until `done` is called.
void run(const std::shared_ptr<Net>& net, Group group, const Collective& collective, Done done);

}  // namespace jaxcgx::tcp
