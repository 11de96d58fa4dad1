#include "tcp/collectives.h"

#include <cstring>

namespace jaxcgx::tcp {
namespace {

const char* const kNames[kOperations] = {"all_to_all", "all_gather", "permute"};

}  // namespace

void run(const std::shared_ptr<Net>& net, Group group, const Collective& c, Done done) {
  const int64_t rank = group.rank, ranks = group.size();
  const bool permutes = c.operation == Operation::kPermute;
  const auto goes = [&](int64_t source, int64_t target) {
    return !permutes || c.targets[static_cast<size_t>(source)] == target;
  };
  const auto in = [&](int64_t other) { return c.in + (c.operation == Operation::kAllToAll ? other * c.bytes : 0); };
  const auto out = [&](int64_t other) { return permutes ? c.out : c.out + other * c.bytes; };

  Exchange e{};
  e.name = kNames[static_cast<int64_t>(c.operation)] + (" of " + std::to_string(c.bytes)) + " bytes";
  e.kind = static_cast<int64_t>(c.operation);
  e.digest = c.digest;
  e.overtakes = c.overtakes;
  e.trims = true;
  std::vector<int64_t> others;  // the next rank first, so that the ranks do not all send to the same rank at once
  for (int64_t i = 1; i < ranks; ++i) {
    const int64_t other = (rank + i) % ranks;
    if (goes(rank, other)) others.push_back(other);
    if (goes(other, rank)) e.receives.push_back({other, 0, out(other), c.bytes});
  }
  e.sends = static_cast<int64_t>(others.size());
  e.group = std::move(group);
  const bool waits = !e.receives.empty();
  const auto completion = std::make_shared<Completion>(2, std::move(done));
  e.done = [completion](const Status& status) { completion->part(status); };
  const auto running = net->begin(std::move(e));
  for (const int64_t other : others) net->send(running, other, 0, in(other), c.bytes);
  // The rank's own part is copied while the messages are on the wire.
  if (c.bytes > 0 && goes(rank, rank))
    std::memcpy(out(rank), in(rank), static_cast<size_t>(c.bytes));
  else if (c.bytes > 0 && !waits)
    std::memset(c.out, 0, static_cast<size_t>(c.bytes));
  completion->part();
}

}  // namespace jaxcgx::tcp
