#include "handlers/shm.h"

#include <map>
#include <mutex>

#include "cpu/pages.h"
#include "handlers/message.h"

namespace jaxcgx {
namespace {

// A handler has no state of its own: its segment is an attribute.
struct Segments {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<shm::Segment>> of;
  int64_t last = 0;
};

Segments& segments() {
  // Never destroyed: a program may still run when the process ends.
  static Segments& all = *new Segments;
  return all;
}

std::shared_ptr<shm::Segment> find_segment(int64_t number) {
  std::lock_guard<std::mutex> lock(segments().mutex);
  const auto found = segments().of.find(number);
  return found == segments().of.end() ? nullptr : found->second;
}

ffi::ErrorCode code_of(shm::Error::Kind kind) {
  switch (kind) {
    case shm::Error::Kind::kGone:
      return ffi::ErrorCode::kUnavailable;
    case shm::Error::Kind::kLate:
      return ffi::ErrorCode::kDeadlineExceeded;
    case shm::Error::Kind::kDifferent:
      return ffi::ErrorCode::kInvalidArgument;
  }
  return ffi::ErrorCode::kInternal;
}

// The tokens order a program's exchanges; they hold nothing.
ffi::Error exchange(ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Token>,
                    int64_t segment, int64_t operation, int64_t argument) {
  const std::string op = "exchange";
  const auto found = find_segment(segment);
  if (!found) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxcgx_exchange: this transport was closed");
  shm::Ring& ring = found->ring();
  if (operation < 0 || operation >= shm::kOperations) return invalid(op, "no operation " + std::to_string(operation));
  if (argument < 0 || argument >= ring.ranks()) {
    return invalid(op, "argument " + std::to_string(argument) + " of " + std::to_string(ring.ranks()) + " ranks");
  }
  const auto kind = static_cast<shm::Operation>(operation);
  const int64_t in = static_cast<int64_t>(x.size_bytes()), out = static_cast<int64_t>(y->size_bytes());
  const int64_t bytes = kind == shm::Operation::kAllToAll ? in / ring.ranks() : in;
  const bool rows = kind == shm::Operation::kAllToAll || kind == shm::Operation::kAllGather;
  if (x.element_type() != y->element_type()) return invalid(op, "a result of another dtype than the operand");
  if ((kind == shm::Operation::kAllToAll && bytes * ring.ranks() != in) ||
      out != (rows ? bytes * ring.ranks() : bytes)) {
    return invalid(
        op, "a result of " + std::to_string(out) + " bytes does not belong to an operand of " + std::to_string(in));
  }
  cpu::ask_for_large_pages(y->untyped_data(), out);
  const auto* from = static_cast<const uint8_t*>(x.untyped_data());
  const shm::Status error = ring.run({kind, argument, bytes, from, static_cast<uint8_t*>(y->untyped_data())});
  return error ? ffi::Error(code_of(error->kind), "jaxcgx_exchange: " + error->message) : ffi::Error::Success();
}

}  // namespace

shm::Or<int64_t> shm_attach(const std::string& name, int64_t rank, int64_t ranks, double timeout) {
  auto attached =
      shm::Segment::attach(name, rank, ranks, std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000)));
  if (const auto* failure = std::get_if<shm::Failure>(&attached)) return *failure;
  std::lock_guard<std::mutex> lock(segments().mutex);
  segments().of[++segments().last] = std::get<0>(attached);
  return segments().last;
}

void shm_detach(int64_t segment) {
  std::shared_ptr<shm::Segment> detached;  // the last of it goes without the lock
  std::lock_guard<std::mutex> lock(segments().mutex);
  const auto found = segments().of.find(segment);
  if (found == segments().of.end()) return;
  detached.swap(found->second);
  segments().of.erase(found);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_exchange_cpu, exchange,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Token>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Token>()
                                  .Attr<int64_t>("segment")
                                  .Attr<int64_t>("operation")
                                  .Attr<int64_t>("argument"));

}  // namespace jaxcgx
