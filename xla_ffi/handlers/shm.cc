#include "handlers/shm.h"

#include "cpu/pages.h"
#include "handlers/buffers.h"
#include "handlers/engine_error.h"
#include "shm/segments.h"

namespace jaxcgx {
namespace {

// Runs an exchange over shared memory. The tokens only order the exchanges of a program.
ffi::Error exchange(ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Token>,
                    ffi::Dictionary dictionary) {
  const std::string op = "exchange";
  Attributes attributes(op, dictionary);
  const auto segment = attributes.get<int64_t>("segment"), operation = attributes.get<int64_t>("operation"),
             argument = attributes.get<int64_t>("argument"), digest = attributes.get<int64_t>("digest");
  CGX_RETURN_IF_ERROR(attributes.error());
  const auto found = shm::find(segment);
  if (!found) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxcgx_exchange: this transport was closed");
  shm::Ring& ring = found->ring();
  CGX_RETURN_IF_ERROR(expect_operation(op, operation, shm::kOperations));
  if (argument < 0 || argument >= ring.ranks()) {
    return invalid(op, "argument " + std::to_string(argument) + " of " + std::to_string(ring.ranks()) + " ranks");
  }
  const auto kind = static_cast<shm::Operation>(operation);
  const bool scatters = kind == shm::Operation::kAllToAll, gathers = scatters || kind == shm::Operation::kAllGather;
  const auto bytes = check_rows(op, x, *y, scatters ? ring.ranks() : 1, gathers ? ring.ranks() : 1);
  if (bytes.has_error()) return bytes.error();
  auto* const out = static_cast<uint8_t*>(y->untyped_data());
  cpu::ask_for_large_pages(out, static_cast<int64_t>(y->size_bytes()));
  const Status error = ring.run({kind, argument, *bytes, static_cast<const uint8_t*>(x.untyped_data()), out, digest});
  return error ? error_of(op, *error) : ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_exchange_cpu, exchange,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attrs());

}  // namespace jaxcgx
