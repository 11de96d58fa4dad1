#include "handlers/tcp.h"

#include <cstring>
#include <limits>
#include <set>

#include "cpu/pages.h"
#include "handlers/message.h"
#include "tcp/threads.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxcgx {
namespace {

enum class Operation : int64_t { kAllToAll, kAllGather, kPermute };
constexpr int64_t kOperations = 3;
// As XLA's threads do: what it goes on with in this one must have the same bits.
void flush_denormals() {
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  __asm__ volatile("msr fpcr, %0" ::"r"(mode | uint64_t{1} << 24));
#endif
}

const char* const kNames[kOperations] = {"all_to_all", "all_gather", "permute"};

// The tokens order a program's exchanges; they hold nothing.
ffi::Future exchange(ffi::AnyBuffer x, ffi::Buffer<ffi::DataType::S32> who, ffi::Token, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::Token>, int64_t operation, Sizes targets, int64_t timeout_ms) {
  const std::string op = "tcp_exchange";
  auto made = exchange_among(op, who.typed_data(), static_cast<int64_t>(who.element_count()) - 1, timeout_ms);
  if (made.has_error()) return failed(made.error());
  tcp::Exchange& e = *made;
  const auto ranks = static_cast<int64_t>(e.processes.size());
  if (operation < 0 || operation >= kOperations)
    return failed(invalid(op, "no operation " + std::to_string(operation)));
  const auto kind = static_cast<Operation>(operation);
  const int64_t in = static_cast<int64_t>(x.size_bytes()), out = static_cast<int64_t>(y->size_bytes());
  const int64_t bytes = kind == Operation::kAllToAll ? in / ranks : in;
  if (x.element_type() != y->element_type()) return failed(invalid(op, "a result of another dtype than the operand"));
  if ((kind == Operation::kAllToAll && bytes * ranks != in) ||
      out != (kind == Operation::kPermute ? bytes : bytes * ranks)) {
    return failed(invalid(
        op, "a result of " + std::to_string(out) + " bytes does not belong to an operand of " + std::to_string(in)));
  }
  if (static_cast<int64_t>(targets.size()) != (kind == Operation::kPermute ? ranks : 0))
    return failed(invalid(op, "targets: not one for each rank"));
  for (const int64_t target : targets) {
    if (target < -1 || target >= ranks)
      return failed(invalid(op, "target " + std::to_string(target) + " of " + std::to_string(ranks) + " ranks"));
  }

  e.name = std::string(kNames[operation]) + " of " + std::to_string(bytes) + " bytes";
  e.kind = operation;
  const auto* from = static_cast<const uint8_t*>(x.untyped_data());
  auto* to = static_cast<uint8_t*>(y->untyped_data());
  const bool to_each = kind == Operation::kAllToAll, permutes = kind == Operation::kPermute;
  const auto goes = [&](int64_t source, int64_t target) { return !permutes || targets[source] == target; };
  std::vector<int64_t> others;  // those that come behind this one first, so that not all send to the same rank at once
  for (int64_t i = 1; i < ranks; ++i) {
    const int64_t other = (e.rank + i) % ranks;
    if (goes(e.rank, other)) others.push_back(other);
    if (goes(other, e.rank)) e.receives.push_back({other, 0, permutes ? to : to + other * bytes, bytes});
  }
  e.sends = static_cast<int64_t>(others.size());
  const int64_t rank = e.rank;
  const bool waits = !e.receives.empty();
  auto completion = std::make_shared<Completion>(2);
  e.done = [completion](const tcp::Status& status) { completion->part(status); };
  cpu::ask_for_large_pages(to, out);
  const auto running = the_net()->begin(std::move(e));
  for (const int64_t other : others) the_net()->send(running, other, 0, from + (to_each ? other * bytes : 0), bytes);
  // Its own part, while the others' are on their way.
  uint8_t* own = permutes ? to : to + rank * bytes;
  if (bytes > 0 && goes(rank, rank))
    std::memcpy(own, from + (to_each ? rank * bytes : 0), bytes);
  else if (bytes > 0 && !waits)
    std::memset(to, 0, bytes);
  completion->part();
  return completion->future();
}

}  // namespace

std::shared_ptr<tcp::Net>& the_net() {
  static auto& net = *new std::shared_ptr<tcp::Net>;
  return net;
}

ffi::Error error_of(const tcp::Error& error) {
  const auto code = error.kind == tcp::Error::Kind::kGone   ? ffi::ErrorCode::kUnavailable
                    : error.kind == tcp::Error::Kind::kLate ? ffi::ErrorCode::kDeadlineExceeded
                                                            : ffi::ErrorCode::kInvalidArgument;
  return ffi::Error(code, "jaxcgx_tcp: " + error.message);
}

ffi::Future failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

void Completion::part(const tcp::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (status && !error_) error_ = error_of(*status);
  if (--left_ > 0) return;
  static auto& threads = *new tcp::Threads(std::numeric_limits<int64_t>::max());
  threads.run([promise = promise_, error = error_]() mutable {
    flush_denormals();
    if (error)
      promise.SetError(*error);
    else
      promise.SetAvailable();
  });
}

ffi::ErrorOr<tcp::Exchange> exchange_among(const std::string& op, const int32_t* who, int64_t ranks,
                                           int64_t timeout_ms) {
  const auto bad = [&](const std::string& what) { return ffi::Unexpected(invalid(op, what)); };
  if (!the_net() || the_net()->process() < 0) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxcgx_" + op + ": the processes have not connected"));
  }
  if (ranks < 1) return bad("no ranks");
  if (timeout_ms < 1) return bad("a timeout of " + std::to_string(timeout_ms) + " ms");
  tcp::Exchange e{};
  e.rank = who[0];
  e.processes.assign(who + 1, who + 1 + ranks);
  e.timeout = std::chrono::milliseconds(timeout_ms);
  if (e.rank < 0 || e.rank >= ranks) return bad("rank " + std::to_string(e.rank) + " of " + std::to_string(ranks));
  for (const int64_t p : e.processes) {
    if (p < 0 || p >= the_net()->processes())
      return bad("process " + std::to_string(p) + " of " + std::to_string(the_net()->processes()));
  }
  if (std::set<int64_t>(e.processes.begin(), e.processes.end()).size() != e.processes.size() ||
      e.processes[e.rank] != the_net()->process()) {
    return bad("the ranks are not processes of their own");
  }
  return e;
}

tcp::Or<int> tcp_listen() {
  if (the_net()) return tcp::Failure{"this process listens already"};
  auto made = tcp::Net::listen();
  if (const auto* failure = std::get_if<tcp::Failure>(&made)) return *failure;
  the_net() = std::get<0>(made);
  return the_net()->port();
}

std::optional<tcp::Failure> tcp_connect(int64_t process, std::vector<tcp::Address> addresses, const std::string& token,
                                        double timeout) {
  if (!the_net()) return tcp::Failure{"this process does not listen"};
  return the_net()->connect(process, std::move(addresses), token,
                            std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000)));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_exchange_cpu, exchange,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::DataType::S32>>()
                                  .Arg<ffi::Token>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Token>()
                                  .Attr<int64_t>("operation")
                                  .Attr<Sizes>("targets")
                                  .Attr<int64_t>("timeout_ms"));

}  // namespace jaxcgx
