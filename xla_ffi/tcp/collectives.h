// Exchanges of bytes as they are: all_to_all, all_gather and permute.
#pragma once

#include "tcp/completion.h"
#include "tcp/net.h"

namespace jaxcgx::tcp {

// jaxcgx/native/tcp.py numbers them likewise.
enum class Operation : int64_t { kAllToAll, kAllGather, kPermute };
constexpr int64_t kOperations = 3;

// all_to_all: [ranks, bytes] -> [ranks, bytes]; row r goes to and comes from rank r. all_gather: [bytes] -> [ranks,
// bytes]. permute: [bytes] -> [bytes], from rank r to targets[r], or to nobody if that is -1; a rank that nobody sends
// to gets zeros.
struct Collective {
  Operation operation;
  int64_t bytes;
  std::vector<int64_t> targets;  // of permute, by rank
  const uint8_t* in;
  uint8_t* out;
  int64_t digest;  // of what all ranks must have in common
};

// Returns when all is under way. `in` and `out` are in use until `done` is called.
void run(const std::shared_ptr<Net>& net, Group group, const Collective& collective, Done done);

}  // namespace jaxcgx::tcp
