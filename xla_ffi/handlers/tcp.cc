#include "handlers/tcp.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "codec/rng.h"
#include "cpu/pages.h"
#include "handlers/buffers.h"
#include "handlers/cpu.h"
#include "handlers/engine_error.h"
#include "tcp/allreduce.h"
#include "tcp/collectives.h"
#include "tcp/process.h"
#include "tcp/threads.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxcgx {
namespace {

// Makes this thread flush denormals, as XLA's threads do. XLA continues a program in the thread that completes a
// result, and the program's results must not depend on the thread.
void flush_denormals() {
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  __asm__ volatile("msr fpcr, %0" ::"r"(mode | uint64_t{1} << 24));
#endif
}

// Returns a function that completes a result. It does so in a thread without other work, because XLA continues the
// program in that thread.
tcp::Done completes(ffi::Promise promise) {
  return [promise](const Status& status) {
    static auto& threads = *new tcp::Threads(std::numeric_limits<int64_t>::max());
    threads.run([promise, status]() mutable {
      flush_denormals();
      if (status)
        promise.SetError(error_of("tcp", *status));
      else
        promise.SetAvailable();
    });
  };
}

ffi::Future failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

#define CGX_FAIL_IF_ERROR(expression)                                           \
  do {                                                                          \
    if (ffi::Error error = (expression); error.failure()) return failed(error); \
  } while (false)

// Returns the checked group of an exchange, that of this device. The attributes are the same on all devices:
//  - groups, or the attribute `name`: [number of groups, ranks]: places in the mesh.
//  - processes, devices, ordinals: for each place the process, the device's number in it, and XLA's ordinal for it.
ffi::ErrorOr<tcp::Group> make_group(const std::string& op, Attributes& attributes, int32_t ordinal, int64_t ranks,
                                    const std::string& name = "groups") {
  const auto bad = [&](const std::string& what) { return ffi::Unexpected(invalid(op, what)); };
  const auto timeout_ms = attributes.get<int64_t>("timeout_ms");
  const auto groups = attributes.get<Sizes>(name), processes = attributes.get<Sizes>("processes"),
             devices = attributes.get<Sizes>("devices"), ordinals = attributes.get<Sizes>("ordinals");
  if (ffi::Error error = attributes.error(); error.failure()) return ffi::Unexpected(std::move(error));
  const auto& net = tcp::the_net();
  if (!net || net->process() < 0) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxcgx_" + op + ": the processes have not connected"));
  }
  if (ranks < 1) return bad("no ranks");
  if (timeout_ms < 1) return bad("a timeout of " + std::to_string(timeout_ms) + " ms");
  const auto places = static_cast<int64_t>(groups.size());
  if (places % ranks != 0 || groups.size() != processes.size() || groups.size() != devices.size() ||
      groups.size() != ordinals.size())
    return bad("attributes of " + std::to_string(places) + " places in groups of " + std::to_string(ranks));
  std::set<int64_t> different;
  int64_t at = -1;
  for (int64_t i = 0; i < places; ++i) {
    const int64_t place = groups[i];
    if (place < 0 || place >= places || !different.insert(place).second)
      return bad("place " + std::to_string(place) + " of " + std::to_string(places));
    if (processes[place] < 0 || processes[place] >= net->processes())
      return bad("process " + std::to_string(processes[place]) + " of " + std::to_string(net->processes()));
    if (devices[place] < 0 || devices[place] >= net->devices())
      return bad("device " + std::to_string(devices[place]) + " of " + std::to_string(net->devices()));
    if (processes[place] == net->process() && ordinals[place] == ordinal) at = i;
  }
  if (at < 0) return bad("device " + std::to_string(ordinal) + " of this process is no rank");
  tcp::Group group{{}, {}, at % ranks, std::chrono::milliseconds(timeout_ms)};
  for (int64_t i = at / ranks * ranks; static_cast<int64_t>(group.processes.size()) < ranks; ++i) {
    group.processes.push_back(processes[groups[i]]);
    group.devices.push_back(devices[groups[i]]);
  }
  return group;
}

// Starts an exchange of raw bytes over TCP. The tokens only order the exchanges of a program.
ffi::Future exchange(int32_t device, ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::Token>, ffi::Dictionary dictionary) {
  const std::string op = "tcp_exchange";
  Attributes attributes(op, dictionary);
  const auto operation = attributes.get<int64_t>("operation"), digest = attributes.get<int64_t>("digest");
  const auto targets = attributes.get<Sizes>("targets");
  const auto ranks = attributes.get<int64_t>("ranks");
  const auto group = make_group(op, attributes, device, ranks);
  if (group.has_error()) return failed(group.error());
  CGX_FAIL_IF_ERROR(expect_operation(op, operation, tcp::kOperations));
  const auto kind = static_cast<tcp::Operation>(operation);
  const bool permutes = kind == tcp::Operation::kPermute;
  const auto bytes = check_rows(op, x, *y, kind == tcp::Operation::kAllToAll ? ranks : 1, permutes ? 1 : ranks);
  if (bytes.has_error()) return failed(bytes.error());
  if (static_cast<int64_t>(targets.size()) != (permutes ? ranks : 0))
    return failed(invalid(op, "targets: not one for each rank"));
  for (const int64_t target : targets) {
    if (target < -1 || target >= ranks)
      return failed(invalid(op, "target " + std::to_string(target) + " of " + std::to_string(ranks) + " ranks"));
  }

  auto* const out = static_cast<uint8_t*>(y->untyped_data());
  cpu::ask_for_large_pages(out, static_cast<int64_t>(y->size_bytes()));
  ffi::Promise promise;
  ffi::Future future(promise);
  tcp::run(tcp::the_net(), *group,
           {kind, *bytes, {targets.begin(), targets.end()}, static_cast<const uint8_t*>(x.untyped_data()), out, digest},
           completes(promise));
  return future;
}

// A sum of messages takes two calls, begin and end. Between them the program does other work, or returns: then a later
// program ends the sum.
//
// begin:
//  - Operands: leaves, residuals (with feedback), keys (if the codec is stochastic), a token.
//    There is one key; with two_shot there are also a key for the root's sum and a key for the other sums.
//  - Results: new residuals (with feedback), a ticket (two words, the same for each message of the batch), a token. The
//    tokens only order the exchanges of a program.
//
//    With `inside` > 1, that many devices of each process add their leaves first (tcp/allreduce.h): the leaves are then
//    those of `whole_sizes` and `whole_dtypes`, and the residuals those of this device's share.
//
// end:
//  - Operands: the ticket, new residuals (with feedback), a token if `ordered`.
//  - Results: the sums (one_shot: fp32; two_shot: the leaves' dtypes), new residuals (with feedback), a token if
//    `ordered`. With whole_sizes, the sums are whole, too, and have the dtypes `whole_dtypes`. A ticket of zeros means
//    that no sum has begun. Then the sums are zeros.

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

// Checks that leaf i of a message is float32, and has 1 / `inside` of the elements of whole leaf i, rounded up.
ffi::Error check_shares(const std::string& op, const Message& message, const std::vector<Leaf>& whole, int64_t inside) {
  const std::vector<Leaf>& shares = message.layout->leaves;
  const auto is_share = [&](const Leaf& all, const Leaf& share) {
    return share.dtype == DType::kF32 && share.size == div_up(all.size, inside);
  };
  if (std::equal(whole.begin(), whole.end(), shares.begin(), shares.end(), is_share)) return ffi::Error::Success();
  return invalid(op, "the leaves are no shares of the whole leaves");
}

ffi::Future begin(int32_t device, ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary dictionary) {
  const std::string op = "tcp_allreduce";
  Attributes attributes(op, dictionary);
  const auto ranks = attributes.get<int64_t>("ranks"), digest = attributes.get<int64_t>("digest");
  const auto parents = attributes.get<Sizes>("parents");
  const bool two_shot = attributes.get<bool>("two_shot"), own = attributes.get<bool>("own"),
             feedback = attributes.get<bool>("feedback"), sum_feedback = attributes.get<bool>("sum_feedback"),
             overtakes = attributes.get<bool>("overtakes");
  const auto divisor = attributes.get<float>("divisor");
  const auto inside = attributes.get<int64_t>("inside");
  const std::vector<Leaf> whole = attributes.leaves("whole_sizes", "whole_dtypes");
  const auto message = attributes.message();
  if (message.has_error()) return failed(message.error());
  const Layout& l = *message->layout;
  if (is_sparse(l.codec.kind)) return failed(invalid(op, "this codec's lists are exchanged, not summed"));
  if (ranks < 1 || ranks > tcp::kMostProcesses) return failed(invalid(op, std::to_string(ranks) + " ranks"));
  if (two_shot) {
    if (const std::string fault = fault_of_trees(parents, ranks, l.chunks()); !fault.empty())
      return failed(invalid(op, fault));
  }
  if (inside < 1 || (inside == 1) != whole.empty())
    return failed(invalid(op, std::to_string(inside) + " devices inside"));
  if (inside > 1) CGX_FAIL_IF_ERROR(check_shares(op, *message, whole, inside));
  if (message->batch > kMostChunks) return failed(invalid(op, "batch out of range: " + std::to_string(message->batch)));
  if (own && (feedback || !two_shot)) return failed(invalid(op, "own is for two_shot without feedback"));
  if (sum_feedback && !(feedback && two_shot)) return failed(invalid(op, "sum_feedback is for two_shot with feedback"));
  if (!(divisor >= kLeastDivisor)) return failed(invalid(op, "the divisor is not a positive number, 2^-126 or more"));

  tcp::Allreduce a{l, ranks, message->batch, two_shot};
  a.parents.assign(parents.begin(), parents.end());
  a.own = own;
  a.feedback = feedback;
  a.sum_feedback = sum_feedback;
  a.divisor = divisor;
  a.overtakes = overtakes;
  a.digest = digest;
  a.ids.assign(message->ids.begin(), message->ids.end());
  a.whole = whole;
  tcp::Allreduce::Inputs first;
  const size_t leaves = l.leaves.size(), keys = l.codec.stochastic ? 1 + 2 * two_shot : 0, fed = feedback ? leaves : 0;
  CGX_FAIL_IF_ERROR(expect_buffers(op, args.size(), leaves + fed + keys + 1, rets.size(), fed + 2));
  Buffers operands(op, *message, args);
  Buffers results(op, *message, rets);
  CGX_FAIL_IF_ERROR(operands.take_leaves("leaf", std::nullopt, &first.leaves, whole));
  if (feedback) CGX_FAIL_IF_ERROR(operands.take_leaves("residual", DType::kF32, &first.residuals));
  if (keys > 0) CGX_FAIL_IF_ERROR(operands.take_batch("key", ffi::DataType::U32, kKeyWords, &first.first_key));
  if (keys > 1) {
    CGX_FAIL_IF_ERROR(operands.take_batch("key of the root's sum", ffi::DataType::U32, kKeyWords, &first.sum_key));
    CGX_FAIL_IF_ERROR(operands.take_batch("key of the other sums", ffi::DataType::U32, kKeyWords, &first.hop_key));
  }
  if (feedback) CGX_FAIL_IF_ERROR(results.take_leaves("new residual", DType::kF32, &first.new_residuals));
  uint32_t* words = nullptr;
  CGX_FAIL_IF_ERROR(results.take_batch("ticket", ffi::DataType::U32, 2, &words));
  ffi::Promise promise;
  ffi::Future future(promise);
  if (message->batch == 0) {
    promise.SetAvailable();
    return future;
  }

  const auto group = make_group(op, attributes, device, ranks);
  if (group.has_error()) return failed(group.error());
  if (tcp::begun() >= tcp::kMostBegun) {
    return failed(ffi::Error(ffi::ErrorCode::kResourceExhausted,
                             "jaxcgx_" + op + ": " + std::to_string(tcp::kMostBegun) +
                                 " sums have begun and have not been ended; end each ticket once"));
  }
  const int64_t bytes = a.workspace_bytes(group->rank);
  a.workspace = tcp::the_workspaces().take(bytes);
  if (a.workspace == nullptr) {
    return failed(ffi::Error(ffi::ErrorCode::kResourceExhausted,
                             "jaxcgx_" + op + ": no memory for " + std::to_string(bytes) + " bytes"));
  }
  std::shared_ptr<tcp::Running> running;
  if (inside > 1) {
    const auto devices = make_group(op, attributes, device, inside, "inside_groups");
    if (devices.has_error()) return failed(devices.error());
    const int64_t here = tcp::the_net()->process();
    if (std::any_of(devices->processes.begin(), devices->processes.end(), [&](int64_t p) { return p != here; }))
      return failed(invalid(op, "devices of several processes inside"));
    running = tcp::begin_inside(tcp::the_net(), *group, *devices, std::move(a), std::move(first), completes(promise));
  } else {
    running = tcp::begin(tcp::the_net(), *group, std::move(a), std::move(first), pool_of(threads));
    promise.SetAvailable();
  }
  const uint64_t ticket = tcp::keep(std::move(running), device);
  for (int64_t i = 0; i < message->batch; ++i) {
    words[2 * i] = static_cast<uint32_t>(ticket);
    words[2 * i + 1] = static_cast<uint32_t>(ticket >> 32);
  }
  return future;
}

// Sets the buffers of leaves to 0; none if there are no buffers.
template <class T>
void set_to_zero(const std::vector<Leaf>& leaves, int64_t batch, const std::vector<T*>& buffers,
                 size_t bytes_of_element = 0) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    const size_t each = bytes_of_element > 0 ? bytes_of_element : static_cast<size_t>(size_of(leaves[i].dtype));
    std::memset(buffers[i], 0, static_cast<size_t>(batch * leaves[i].size) * each);
  }
}

ffi::Future end(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary dictionary) {
  const std::string op = "tcp_allreduce_end";
  Attributes attributes(op, dictionary);
  const bool two_shot = attributes.get<bool>("two_shot"), feedback = attributes.get<bool>("feedback"),
             ordered = attributes.get<bool>("ordered");
  const std::vector<Leaf> whole = attributes.leaves("whole_sizes", "whole_dtypes");
  const auto message = attributes.message();
  if (message.has_error()) return failed(message.error());
  Buffers operands(op, *message, args);
  Buffers results(op, *message, rets);
  const size_t leaves = message->layout->leaves.size(), fed = feedback ? leaves : 0;
  if (!whole.empty() && whole.size() != leaves) return failed(invalid(op, "not a whole leaf for each leaf"));
  CGX_FAIL_IF_ERROR(expect_buffers(op, args.size(), 1 + fed + ordered, rets.size(), leaves + fed + ordered));
  const uint32_t* words = nullptr;
  CGX_FAIL_IF_ERROR(operands.take_batch("ticket", ffi::DataType::U32, 2, &words));
  tcp::Allreduce::Outputs first;
  if (two_shot || !whole.empty())
    CGX_FAIL_IF_ERROR(results.take_leaves("result", std::nullopt, &first.results, whole));
  else
    CGX_FAIL_IF_ERROR(results.take_leaves("sum", DType::kF32, &first.sums));
  if (feedback) CGX_FAIL_IF_ERROR(results.take_leaves("new residual", DType::kF32, &first.residuals));
  ffi::Promise promise;
  ffi::Future future(promise);
  const uint64_t ticket = message->batch == 0 ? 0 : words[0] | uint64_t{words[1]} << 32;
  if (ticket == 0) {
    set_to_zero(whole.empty() ? message->layout->leaves : whole, message->batch, first.results);
    set_to_zero(message->layout->leaves, message->batch, first.sums, sizeof(float));
    promise.SetAvailable();
    return future;
  }
  const auto running = tcp::take(ticket, device);
  if (running == nullptr)
    return failed(invalid(op,
                          "no sum of this device is under way with this ticket; end a ticket once, on the device that "
                          "began the sum"));
  const tcp::Allreduce& a = tcp::asked(*running);
  const auto same = [](const Leaf& a, const Leaf& b) { return a.size == b.size && a.dtype == b.dtype; };
  const std::vector<Leaf>&begun = a.layout.leaves, &ended = message->layout->leaves;
  if (message->batch != a.batch || two_shot != a.two_shot || feedback != a.feedback ||
      !std::equal(begun.begin(), begun.end(), ended.begin(), ended.end(), same) ||
      !std::equal(a.whole.begin(), a.whole.end(), whole.begin(), whole.end(), same))
    return failed(invalid(op, "another message than the sum began with"));
  tcp::end(running, std::move(first), completes(promise));
  return future;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_cpu, exchange,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Token>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Token>()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_tcp_allreduce_cpu, begin,
    ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_end_cpu, end,
                              ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxcgx
