// Ranks are threads of one process, so that ThreadSanitizer sees all of them.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "check.h"
#include "exchanges.h"

using namespace jaxcgx;

namespace {

// One message for each rank.
template <class Body>
std::vector<std::string> on_ranks(int64_t ranks, const Body& body) {
  const auto bytes = static_cast<size_t>(shm::Ring::bytes(ranks));
  void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(memory, 0, bytes);
  std::vector<std::string> messages(ranks);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      shm::Ring ring(memory, rank, ranks, std::chrono::seconds(60));
      const Status error = ring.join(std::vector<int64_t>(ranks, getpid()));
      messages[rank] = error ? error->message : body(ring, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::free(memory);
  return messages;
}

}  // namespace

int main() {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (const std::string& message : on_ranks(ranks, test::run_all)) CHECK(message.empty(), message);
  }
  const auto many = [](shm::Ring& ring, int64_t rank) {
    std::string message;
    for (int64_t i = 0; i < 3000 && message.empty(); ++i) {
      message = test::run(ring, rank, static_cast<shm::Operation>(i % shm::kOperations), i % ring.ranks(), i % 97, i);
    }
    return message;
  };
  for (const std::string& message : on_ranks(3, many)) CHECK(message.empty(), message);
  // Exchanges in two threads of a rank run one after the other.
  const auto twice = [](shm::Ring& ring, int64_t rank) {
    std::string first, second;
    std::thread other([&] { first = test::run(ring, rank, shm::Operation::kAllGather, 0, 300000); });
    second = test::run(ring, rank, shm::Operation::kAllGather, 0, 300000);
    other.join();
    return first + second;
  };
  for (const std::string& message : on_ranks(2, twice)) CHECK(message.empty(), message);
  return test::finish();
}
