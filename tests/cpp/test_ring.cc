// Ranks are threads of one process, so that ThreadSanitizer sees all of them.
#include "check.h"
#include "exchanges.h"

using namespace jaxcgx;

int main() {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (const std::string& message :
         test::on_ranks(ranks, [](auto& ring, int64_t rank) { return test::run_all(ring, rank); }))
      CHECK_NO_ERROR(message);
  }
  const auto many = [](shm::Ring& ring, int64_t rank) {
    std::string message;
    for (int64_t i = 0; i < 3000 && message.empty(); ++i) {
      message = test::run(ring, rank, static_cast<shm::Operation>(i % shm::kOperations), i % ring.ranks(), i % 97, i);
    }
    return message;
  };
  for (const std::string& message : test::on_ranks(3, many)) CHECK_NO_ERROR(message);
  // Exchanges in two threads of a rank run one after the other.
  const auto twice = [](shm::Ring& ring, int64_t rank) {
    std::string first, second;
    std::thread other([&] { first = test::run(ring, rank, shm::Operation::kAllGather, 0, 300000); });
    second = test::run(ring, rank, shm::Operation::kAllGather, 0, 300000);
    other.join();
    return first + second;
  };
  for (const std::string& message : test::on_ranks(2, twice)) CHECK_NO_ERROR(message);
  return test::finish();
}
