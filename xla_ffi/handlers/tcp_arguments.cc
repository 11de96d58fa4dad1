#include "handlers/tcp_arguments.h"

#include <algorithm>
#include <set>

#include "codec/rng.h"
#include "tcp/process.h"

namespace jaxcgx {
namespace {

// Returns the checked group of an exchange, that of this device. The attributes are the same on all devices:
//  - groups, or the attribute `name`: [number of groups, ranks]: places in the mesh.
//  - processes, devices: for each place the process, and the device's number in it.
ffi::ErrorOr<tcp::Group> make_group(const std::string& op, Attributes& attributes, int32_t ordinal, int64_t ranks,
                                    const std::string& name = "groups") {
  const auto timeout_ms = attributes.get<int64_t>("timeout_ms");
  const auto groups = attributes.get<Sizes>(name), processes = attributes.get<Sizes>("processes"),
             devices = attributes.get<Sizes>("devices");
  CGX_UNEXPECTED_IF_ERROR(attributes.error());
  const auto& net = tcp::the_net();
  if (!net || net->process() < 0) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxcgx_" + op + ": the processes have not connected"));
  }
  if (ranks < 1) return refused(op, "no ranks");
  if (timeout_ms < 1) return refused(op, "a timeout of " + std::to_string(timeout_ms) + " ms");
  const auto places = static_cast<int64_t>(groups.size());
  if (places % ranks != 0 || groups.size() != processes.size() || groups.size() != devices.size())
    return refused(op, "attributes of " + std::to_string(places) + " places in groups of " + std::to_string(ranks));
  std::set<int64_t> different;
  int64_t at = -1;
  for (int64_t i = 0; i < places; ++i) {
    const int64_t place = groups[i];
    if (place < 0 || place >= places || !different.insert(place).second)
      return refused(op, "place " + std::to_string(place) + " of " + std::to_string(places));
    if (processes[place] < 0 || processes[place] >= net->processes())
      return refused(op, "process " + std::to_string(processes[place]) + " of " + std::to_string(net->processes()));
    if (devices[place] < 0 || devices[place] >= net->devices())
      return refused(op, "device " + std::to_string(devices[place]) + " of " + std::to_string(net->devices()));
    if (processes[place] == net->process() && devices[place] == tcp::number_of(ordinal)) at = i;
  }
  if (at < 0) return refused(op, "device " + std::to_string(ordinal) + " of this process is no rank");
  tcp::Group group{{}, {}, at % ranks, std::chrono::milliseconds(timeout_ms)};
  for (int64_t i = at / ranks * ranks; static_cast<int64_t>(group.processes.size()) < ranks; ++i) {
    group.processes.push_back(processes[groups[i]]);
    group.devices.push_back(devices[groups[i]]);
  }
  return group;
}

// Returns the fault of trees; empty if they are valid. The trees are given as parents: [trees, ranks], -1 for a root.
std::string fault_of_trees(Sizes parents, int64_t ranks, int64_t chunks) {
  const auto n = static_cast<int64_t>(parents.size());
  if (n == 0 || n % ranks != 0 || chunks % (n / ranks) != 0)
    return std::to_string(n) + " parents and " + std::to_string(chunks) + " chunks for " + std::to_string(ranks) +
           " ranks";
  for (int64_t tree = 0; tree < n; tree += ranks) {
    const auto parent = [&](int64_t rank) { return parents[static_cast<size_t>(tree + rank)]; };
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (parent(rank) < -1 || parent(rank) >= ranks) return "parent " + std::to_string(parent(rank));
    }
    int64_t roots = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      roots += parent(rank) == -1;
      int64_t at = rank, steps = 0;
      while (at != -1 && steps <= ranks) at = parent(at), ++steps;
      if (at != -1) return "parents in a circle";
    }
    if (roots != 1) return "expected one root, got " + std::to_string(roots);
  }
  return "";
}

ffi::Error expect_buffers(const std::string& op, size_t args, size_t expected_args, size_t rets, size_t expected_rets) {
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args, expected_args));
  return expect_count(op, "results", rets, expected_rets);
}

ffi::Error check_ticket(const std::string& op, const ffi::AnyBuffer& ticket) {
  if (ticket.element_type() == ffi::DataType::U32 && ticket.element_count() == 2) return ffi::Error::Success();
  return invalid(op, "a ticket is two words");
}

std::string no_ticket(const std::string& what) {
  return "no " + what + " of this device is under way with this ticket; end a ticket once, on the device that began " +
         "the " + what;
}

// Returns memory for what begins now. `remedy`: for the error if there is none left.
ffi::ErrorOr<std::shared_ptr<uint8_t>> memory_for(const std::string& op, int64_t bytes, tcp::Workspaces& memory,
                                                  const std::string& remedy) {
  const auto exhausted = [&](const std::string& what) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxcgx_" + op + ": " + what));
  };
  if (tcp::begun() >= tcp::kMostBegun)
    return exhausted(std::to_string(tcp::kMostBegun) +
                     " sums or exchanges have begun and have not been ended; end each ticket once");
  auto taken = memory.take(bytes);
  if (taken == nullptr) return exhausted("no memory for " + std::to_string(bytes) + " bytes" + remedy);
  return taken;
}

// Checks that leaf i of a message is float32, and has 1 / `inside` of the elements of whole leaf i, rounded up.
ffi::Error check_shares(const std::string& op, const Message& message, const std::vector<Leaf>& whole, int64_t inside) {
  const std::vector<Leaf>& shares = message.layout->leaves;
  const auto is_share = [&](const Leaf& all, const Leaf& share) {
    return share.dtype == DType::kF32 && share.size == div_up(all.size, inside);
  };
  if (std::equal(whole.begin(), whole.end(), shares.begin(), shares.end(), is_share)) return ffi::Error::Success();
  return invalid(op, "the leaves are no shares of the whole leaves");
}

}  // namespace

ffi::ErrorOr<TcpExchange> read_exchange(int32_t device, ffi::AnyBuffer x, ffi::Dictionary dictionary) {
  const std::string op = "tcp_exchange";
  Attributes attributes(op, dictionary);
  const auto operation = attributes.get<int64_t>("operation"), digest = attributes.get<int64_t>("digest");
  const auto targets = attributes.get<Sizes>("targets");
  const bool overtakes = attributes.get<bool>("overtakes");
  const auto ranks = attributes.get<int64_t>("ranks");
  const auto group = make_group(op, attributes, device, ranks);
  if (group.has_error()) return ffi::Unexpected(group.error());
  CGX_UNEXPECTED_IF_ERROR(expect_operation(op, operation, tcp::kOperations));
  const auto kind = static_cast<tcp::Operation>(operation);
  const bool permutes = kind == tcp::Operation::kPermute;
  if (static_cast<int64_t>(targets.size()) != (permutes ? ranks : 0))
    return refused(op, "targets: not one for each rank");
  for (const int64_t target : targets) {
    if (target < -1 || target >= ranks)
      return refused(op, "target " + std::to_string(target) + " of " + std::to_string(ranks) + " ranks");
  }

  const auto bytes = static_cast<int64_t>(x.size_bytes()) / (kind == tcp::Operation::kAllToAll ? ranks : 1);
  const auto* in = static_cast<const uint8_t*>(x.untyped_data());
  return TcpExchange{*group,
                     tcp::Collective{kind, bytes, {targets.begin(), targets.end()}, in, nullptr, digest, overtakes}};
}

ffi::Error check_result(const TcpExchange& asked, const ffi::AnyBuffer& x, const ffi::AnyBuffer& y) {
  const int64_t ranks = asked.group.size();
  const bool splits = asked.collective.operation == tcp::Operation::kAllToAll,
             permutes = asked.collective.operation == tcp::Operation::kPermute;
  const auto bytes = check_rows("tcp_exchange", x, y, splits ? ranks : 1, permutes ? 1 : ranks);
  return bytes.has_error() ? bytes.error() : ffi::Error::Success();
}

ffi::ErrorOr<TcpTransfer> read_transfer(int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer ticket,
                                        ffi::Dictionary dictionary, tcp::Workspaces& memory,
                                        const std::string& remedy) {
  const std::string op = "tcp_exchange_begin";
  auto asked = read_exchange(device, x, dictionary);
  if (asked.has_error()) return ffi::Unexpected(asked.error());
  const int64_t ranks = asked->group.size(), bytes = static_cast<int64_t>(x.size_bytes());
  if (asked->collective.in_bytes(ranks) != bytes) return refused(op, "an operand that has no row for each rank");
  CGX_UNEXPECTED_IF_ERROR(check_ticket(op, ticket));
  const auto taken = memory_for(op, tcp::Transfer::memory_bytes(asked->collective, ranks), memory, remedy);
  if (taken.has_error()) return ffi::Unexpected(taken.error());
  auto transfer = std::make_shared<tcp::Transfer>(std::move(asked->collective), ranks, *taken);
  return TcpTransfer{std::move(transfer), std::move(asked->group), bytes,
                     static_cast<uint32_t*>(ticket.untyped_data())};
}

ffi::ErrorOr<TcpTransferEnd> read_transfer_end(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                               ffi::Dictionary dictionary) {
  const std::string op = "tcp_exchange_end";
  Attributes attributes(op, dictionary);
  const bool ordered = attributes.get<bool>("ordered");
  CGX_UNEXPECTED_IF_ERROR(attributes.error());
  CGX_UNEXPECTED_IF_ERROR(expect_buffers(op, args.size(), 1 + ordered, rets.size(), 1 + ordered));
  const auto ticket = args.get<ffi::AnyBuffer>(0);
  auto y = rets.get<ffi::AnyBuffer>(0);
  if (ticket.has_error()) return ffi::Unexpected(ticket.error());
  if (y.has_error()) return ffi::Unexpected(y.error());
  CGX_UNEXPECTED_IF_ERROR(check_ticket(op, *ticket));
  return TcpTransferEnd{static_cast<const uint32_t*>(ticket->untyped_data()),
                        static_cast<uint8_t*>((*y)->untyped_data()), static_cast<int64_t>((*y)->size_bytes())};
}

ffi::ErrorOr<std::shared_ptr<tcp::Transfer>> transfer_of(const TcpTransferEnd& end, uint64_t ticket, int32_t device) {
  const std::string op = "tcp_exchange_end";
  const auto begun = tcp::take(ticket, device);
  const auto* transfer = std::get_if<std::shared_ptr<tcp::Transfer>>(&begun);
  if (transfer == nullptr || *transfer == nullptr) return refused(op, no_ticket("exchange"));
  if ((*transfer)->bytes() != end.bytes)
    return refused(op, "a result of " + std::to_string(end.bytes) + " bytes does not belong to one of " +
                           std::to_string((*transfer)->bytes()));
  return *transfer;
}

ffi::ErrorOr<TcpBegin> read_begin(int32_t device, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                  ffi::Dictionary dictionary, tcp::Workspaces& memory, const std::string& remedy) {
  const std::string op = "tcp_allreduce";
  Attributes attributes(op, dictionary);
  const auto ranks = attributes.get<int64_t>("ranks"), digest = attributes.get<int64_t>("digest");
  const auto parents = attributes.get<Sizes>("parents");
  const bool two_shot = attributes.get<bool>("two_shot"), own = attributes.get<bool>("own"),
             feedback = attributes.get<bool>("feedback"), sum_feedback = attributes.get<bool>("sum_feedback"),
             overtakes = attributes.get<bool>("overtakes");
  const auto divisor = attributes.get<float>("divisor");
  const auto deadline = attributes.get<int64_t>("deadline");
  const auto inside = attributes.get<int64_t>("inside");
  const std::vector<Leaf> whole = attributes.leaves("whole_sizes", "whole_dtypes");
  const auto message = attributes.message();
  if (message.has_error()) return ffi::Unexpected(message.error());
  const Layout& l = *message->layout;
  if (is_sparse(l.codec.kind)) return refused(op, "this codec's lists are exchanged, not summed");
  if (ranks < 1 || ranks > tcp::kMostProcesses) return refused(op, std::to_string(ranks) + " ranks");
  if (two_shot) {
    if (const std::string fault = fault_of_trees(parents, ranks, l.chunks()); !fault.empty()) return refused(op, fault);
  }
  if (inside < 1 || (inside == 1) != whole.empty()) return refused(op, std::to_string(inside) + " devices inside");
  if (inside > 1) CGX_UNEXPECTED_IF_ERROR(check_shares(op, *message, whole, inside));
  if (message->batch > kMostChunks) return refused(op, "batch out of range: " + std::to_string(message->batch));
  if (own && (feedback || !two_shot)) return refused(op, "own is for two_shot without feedback");
  if (sum_feedback && !(feedback && two_shot)) return refused(op, "sum_feedback is for two_shot with feedback");
  if (deadline >= 0 && !two_shot) return refused(op, "a deadline is for two_shot");
  if (!(divisor >= kLeastDivisor)) return refused(op, "the divisor is not a positive number, 2^-126 or more");

  tcp::Allreduce a{l, ranks, message->batch, two_shot};
  a.parents.assign(parents.begin(), parents.end());
  a.own = own;
  a.feedback = feedback;
  a.sum_feedback = sum_feedback;
  a.divisor = divisor;
  a.overtakes = overtakes;
  if (deadline >= 0) a.deadline = std::chrono::microseconds(deadline);
  a.digest = digest;
  a.ids.assign(message->ids.begin(), message->ids.end());
  a.whole = whole;
  tcp::Allreduce::Inputs first;
  const size_t leaves = l.leaves.size(), keys = l.codec.stochastic ? 1 + 2 * two_shot : 0, fed = feedback ? leaves : 0;
  CGX_UNEXPECTED_IF_ERROR(expect_buffers(op, args.size(), leaves + fed + keys + 1, rets.size(), fed + 2));
  Buffers operands(op, *message, args);
  Buffers results(op, *message, rets);
  CGX_UNEXPECTED_IF_ERROR(operands.take_leaves("leaf", std::nullopt, &first.leaves, whole));
  if (feedback) CGX_UNEXPECTED_IF_ERROR(operands.take_leaves("residual", DType::kF32, &first.residuals));
  if (keys > 0) CGX_UNEXPECTED_IF_ERROR(operands.take_batch("key", ffi::DataType::U32, kKeyWords, &first.first_key));
  if (keys > 1) {
    CGX_UNEXPECTED_IF_ERROR(
        operands.take_batch("key of the root's sum", ffi::DataType::U32, kKeyWords, &first.sum_key));
    CGX_UNEXPECTED_IF_ERROR(
        operands.take_batch("key of the other sums", ffi::DataType::U32, kKeyWords, &first.hop_key));
  }
  if (feedback) CGX_UNEXPECTED_IF_ERROR(results.take_leaves("new residual", DType::kF32, &first.new_residuals));
  uint32_t* words = nullptr;
  CGX_UNEXPECTED_IF_ERROR(results.take_batch("ticket", ffi::DataType::U32, 2, &words));
  TcpBegin found{std::move(a), std::move(first), {}, std::nullopt, words};
  if (message->batch == 0) return found;

  const auto group = make_group(op, attributes, device, ranks);
  if (group.has_error()) return ffi::Unexpected(group.error());
  found.group = *group;
  if (inside > 1) {
    const auto devices = make_group(op, attributes, device, inside, "inside_groups");
    if (devices.has_error()) return ffi::Unexpected(devices.error());
    const int64_t here = tcp::the_net()->process();
    if (std::any_of(devices->processes.begin(), devices->processes.end(), [&](int64_t p) { return p != here; }))
      return refused(op, "devices of several processes inside");
    found.inside = *devices;
  }
  const auto taken = memory_for(op, found.sum.workspace_bytes(group->rank), memory, remedy);
  if (taken.has_error()) return ffi::Unexpected(taken.error());
  found.sum.workspace = *taken;
  return found;
}

ffi::ErrorOr<TcpEnd> read_end(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                              ffi::Dictionary dictionary) {
  const std::string op = "tcp_allreduce_end";
  Attributes attributes(op, dictionary);
  const bool two_shot = attributes.get<bool>("two_shot"), feedback = attributes.get<bool>("feedback"),
             ordered = attributes.get<bool>("ordered");
  const std::vector<Leaf> whole = attributes.leaves("whole_sizes", "whole_dtypes");
  const auto message = attributes.message();
  if (message.has_error()) return ffi::Unexpected(message.error());
  Buffers operands(op, *message, args);
  Buffers results(op, *message, rets);
  const size_t leaves = message->layout->leaves.size(), fed = feedback ? leaves : 0;
  if (!whole.empty() && whole.size() != leaves) return refused(op, "not a whole leaf for each leaf");
  CGX_UNEXPECTED_IF_ERROR(expect_buffers(op, args.size(), 1 + fed + ordered, rets.size(), leaves + fed + ordered));
  const uint32_t* words = nullptr;
  CGX_UNEXPECTED_IF_ERROR(operands.take_batch("ticket", ffi::DataType::U32, 2, &words));
  tcp::Allreduce::Outputs first;
  if (two_shot || !whole.empty())
    CGX_UNEXPECTED_IF_ERROR(results.take_leaves("result", std::nullopt, &first.results, whole));
  else
    CGX_UNEXPECTED_IF_ERROR(results.take_leaves("sum", DType::kF32, &first.sums));
  if (feedback) CGX_UNEXPECTED_IF_ERROR(results.take_leaves("new residual", DType::kF32, &first.residuals));
  return TcpEnd{
      *message,      whole.empty() ? message->layout->leaves : whole, std::move(first), words, two_shot, feedback,
      !whole.empty()};
}

ffi::ErrorOr<std::shared_ptr<tcp::Running>> sum_of(const TcpEnd& end, uint64_t ticket, int32_t device) {
  const std::string op = "tcp_allreduce_end";
  const auto begun = tcp::take(ticket, device);
  const auto* sum = std::get_if<std::shared_ptr<tcp::Running>>(&begun);
  if (sum == nullptr || *sum == nullptr) return refused(op, no_ticket("sum"));
  const std::shared_ptr<tcp::Running> running = *sum;
  const tcp::Allreduce& a = tcp::asked(*running);
  const auto alike = [](const std::vector<Leaf>& some, const std::vector<Leaf>& others) {
    return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                      [](const Leaf& x, const Leaf& y) { return x.size == y.size && x.dtype == y.dtype; });
  };
  if (end.message.batch != a.batch || end.two_shot != a.two_shot || end.feedback != a.feedback ||
      !alike(a.layout.leaves, end.message.layout->leaves) || end.whole == a.whole.empty() ||
      !alike(a.leaves(), end.leaves))
    return refused(op, "another message than the sum began with");
  return running;
}

}  // namespace jaxcgx
