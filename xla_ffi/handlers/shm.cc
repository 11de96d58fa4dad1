#include "handlers/shm.h"

#include "cpu/pages.h"
#include "handlers/buffers.h"
#include "handlers/engine_error.h"

namespace jaxcgx {
namespace {

const char* const kOp = "exchange";

// Runs an exchange over shared memory. The tokens only order the exchanges of a program.
ffi::Error exchange(ffi::AnyBuffer x, ffi::Token, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Token>,
                    ffi::Dictionary dictionary) {
  const auto asked = read_shared(x, *y, dictionary);
  if (asked.has_error()) return asked.error();
  cpu::ask_for_large_pages(asked->exchange.out, static_cast<int64_t>(y->size_bytes()));
  const Status error = asked->segment->ring().run(asked->exchange);
  return error ? error_of(kOp, *error) : ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<SharedExchange> read_shared(ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::Dictionary dictionary) {
  Attributes attributes(kOp, dictionary);
  const auto segment = attributes.get<int64_t>("segment"), operation = attributes.get<int64_t>("operation"),
             argument = attributes.get<int64_t>("argument"), digest = attributes.get<int64_t>("digest");
  CGX_UNEXPECTED_IF_ERROR(attributes.error());
  auto found = shm::find(segment);
  if (!found)
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxcgx_exchange: this transport was closed"));
  const int64_t ranks = found->ring().ranks();
  CGX_UNEXPECTED_IF_ERROR(expect_operation(kOp, operation, shm::kOperations));
  if (argument < 0 || argument >= ranks)
    return refused(kOp, "argument " + std::to_string(argument) + " of " + std::to_string(ranks) + " ranks");
  const auto kind = static_cast<shm::Operation>(operation);
  const auto bytes = check_rows(kOp, x, y, shm::scatters(kind) ? ranks : 1, shm::gathers(kind) ? ranks : 1);
  if (bytes.has_error()) return ffi::Unexpected(bytes.error());
  const shm::Exchange exchange{
      kind,  argument, *bytes, static_cast<const uint8_t*>(x.untyped_data()), static_cast<uint8_t*>(y.untyped_data()),
      digest};
  return SharedExchange{std::move(found), exchange};
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_exchange_cpu, exchange,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attrs());

}  // namespace jaxcgx
