#include "handlers/shm.h"

#include "cpu/pages.h"
#include "handlers/engine_error.h"
#include "handlers/message.h"
#include "shm/segments.h"

namespace jaxcgx {
namespace {

// The tokens order a program's exchanges; they hold nothing.
ffi::Error exchange(ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Token>,
                    int64_t segment, int64_t operation, int64_t argument, int64_t digest) {
  const std::string op = "exchange";
  const auto found = shm::find(segment);
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
  const Status error = ring.run({kind, argument, bytes, from, static_cast<uint8_t*>(y->untyped_data()), digest});
  return error ? error_of(op, *error) : ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_exchange_cpu, exchange,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Token>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Token>()
                                  .Attr<int64_t>("segment")
                                  .Attr<int64_t>("operation")
                                  .Attr<int64_t>("argument")
                                  .Attr<int64_t>("digest"));

}  // namespace jaxcgx
