// Exchanges whose results each rank can check alone. Ranks are threads of one process.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "check.h"
#include "sent.h"
#include "shm/ring.h"

namespace jaxcgx::test {

// Returns the message of each rank.
template <class Body>
std::vector<std::string> on_ranks(int64_t ranks, const Body& body) {
  const auto bytes = static_cast<size_t>(shm::Ring::bytes(ranks));
  void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(memory, 0, bytes);
  std::vector<std::string> messages(ranks);
  each_rank(ranks, [&](int64_t rank) {
    shm::Ring ring(memory, rank, ranks, std::chrono::seconds(60));
    const Status error = ring.join(std::vector<int64_t>(ranks, getpid()));
    messages[rank] = error ? error->message : body(ring, rank);
  });
  std::free(memory);
  return messages;
}

inline std::string run_here(shm::Ring& ring, const shm::Exchange& exchange) {
  const Status error = ring.run(exchange);
  return error ? error->message : "";
}
using Runner = std::function<std::string(shm::Ring&, const shm::Exchange&)>;

// Runs an exchange. Returns its error, or "wrong bytes", or "". Only in an all_to_all do the bytes depend on the
// receiver.
inline std::string run(shm::Ring& ring, int64_t rank, shm::Operation operation, int64_t argument, int64_t bytes,
                       int64_t number = 0, const Runner& runner = run_here) {
  const int64_t ranks = ring.ranks();
  const bool to_each = shm::scatters(operation), from_each = shm::gathers(operation);
  // Exact sizes, so that AddressSanitizer sees one byte too many.
  std::vector<uint8_t> in((to_each ? ranks : 1) * bytes), out((from_each ? ranks : 1) * bytes, 0xee);
  for (int64_t to = 0; to < (to_each ? ranks : 1); ++to) sent(number, rank, to, 0, in.data() + to * bytes, bytes);
  const std::string error = runner(ring, {operation, argument, bytes, in.data(), out.data()});
  if (!error.empty()) return error;
  for (int64_t row = 0; row < (from_each ? ranks : 1); ++row) {
    const int64_t from = from_each                             ? row
                         : operation == shm::Operation::kShift ? (rank + ranks - argument) % ranks
                                                               : argument;
    if (!are_sent(number, from, to_each ? rank : 0, out.data() + row * bytes, bytes)) return "wrong bytes";
  }
  return "";
}

// Runs every operation with every argument, with sizes around those of a slot and its parts.
inline std::string run_all(shm::Ring& ring, int64_t rank, const Runner& runner = run_here) {
  int64_t number = 0;
  for (const int64_t bytes : {0, 1, 17, 1000, 131071, 131072, 131073, 262144, 262145, 1000003}) {
    for (int64_t operation = 0; operation < shm::kOperations; ++operation) {
      const bool argued = operation >= static_cast<int64_t>(shm::Operation::kShift);
      for (int64_t argument = 0; argument < (argued ? ring.ranks() : 1); ++argument) {
        const std::string error =
            run(ring, rank, static_cast<shm::Operation>(operation), argument, bytes, ++number, runner);
        if (!error.empty())
          return error + " in operation " + std::to_string(operation) + " of " + std::to_string(bytes) + " bytes";
      }
    }
  }
  return "";
}

}  // namespace jaxcgx::test
