// XLA FFI handlers of platform CPU: check every buffer against the message, then call cpu/.
#include "handlers/cpu.h"

#include "cpu/cpu.h"
#include "handlers/message.h"

namespace jaxcgx {
namespace {

cpu::Pool pool_of(ffi::ThreadPool& pool) {
  return {pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

ffi::AnyBuffer& the_buffer(ffi::AnyBuffer& operand) { return operand; }
ffi::AnyBuffer& the_buffer(ffi::Result<ffi::AnyBuffer>& result) { return *result; }

// The buffers of a list of leaves, each checked.
template <class T, class Args>
ffi::Error collect(const std::string& op, const std::string& name, const Layout& l, int64_t batch, const Args& args, size_t first,
                   std::optional<DType> dtype, std::vector<T>* out) {
  for (size_t i = 0; i < l.leaves.size(); ++i) {
    auto found = args.template get<ffi::AnyBuffer>(first + i);
    if (found.has_error()) return found.error();
    ffi::AnyBuffer& buffer = the_buffer(*found);
    CGX_RETURN_IF_ERROR(expect(op, name + " " + std::to_string(i), buffer, type_of(dtype.value_or(l.leaves[i].dtype)), batch, l.leaves[i].size));
    out->push_back(static_cast<T>(buffer.untyped_data()));
  }
  return ffi::Error::Success();
}

ffi::Error expect_count(const std::string& op, const char* name, size_t got, size_t expected) {
  if (got == expected) return ffi::Error::Success();
  return invalid(op, std::string(name) + ": got " + std::to_string(got) + ", expected " + std::to_string(expected));
}

ffi::Error find_keys(const std::string& op, const ffi::RemainingArgs& args, size_t at, int64_t batch, const uint32_t** keys) {
  auto buffer = args.get<ffi::AnyBuffer>(at);
  if (buffer.has_error()) return buffer.error();
  CGX_RETURN_IF_ERROR(expect(op, "keys", *buffer, ffi::DataType::U32, batch, 2));
  *keys = static_cast<const uint32_t*>(buffer->untyped_data());
  return ffi::Error::Success();
}

// Operands: leaves, residuals (with feedback), keys (stochastic). Results: payload, new residuals.
ffi::Error encode(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec, Sizes sizes, Sizes dtypes,
                  Sizes ids, int64_t chunks, int64_t batch, bool feedback) {
  const std::string op = "encode";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  const size_t n = l.leaves.size(), inputs = feedback ? 2 * n : n;
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), inputs + (l.codec.stochastic ? 1 : 0)));
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), feedback ? n + 1 : 1));
  std::vector<const void*> leaves;
  std::vector<const float*> residuals;
  std::vector<float*> new_residuals;
  CGX_RETURN_IF_ERROR(collect(op, "leaf", l, batch, args, 0, std::nullopt, &leaves));
  if (feedback) {
    CGX_RETURN_IF_ERROR(collect(op, "residual", l, batch, args, n, DType::kF32, &residuals));
    CGX_RETURN_IF_ERROR(collect(op, "new residual", l, batch, rets, 1, DType::kF32, &new_residuals));
  }
  const uint32_t* keys = nullptr;
  if (l.codec.stochastic) CGX_RETURN_IF_ERROR(find_keys(op, args, inputs, batch, &keys));
  auto payload = rets.get<ffi::AnyBuffer>(0);
  if (payload.has_error()) return payload.error();
  CGX_RETURN_IF_ERROR(expect(op, "payload", **payload, ffi::DataType::U8, batch, chunks * l.chunk_bytes));
  cpu::encode({l, batch, leaves.data(), ids.begin(), keys, feedback ? residuals.data() : nullptr, new_residuals.data(),
               static_cast<uint8_t*>((*payload)->untyped_data())},
              pool_of(threads));
  return ffi::Error::Success();
}

// Operand: payload. Results: leaves.
ffi::Error decode(ffi::ThreadPool threads, ffi::AnyBuffer payload, ffi::RemainingRets rets, CodecAttr codec, Sizes sizes, Sizes dtypes,
                  Sizes ids, int64_t chunks, int64_t batch) {
  const std::string op = "decode";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), l.leaves.size()));
  CGX_RETURN_IF_ERROR(expect(op, "payload", payload, ffi::DataType::U8, batch, chunks * l.chunk_bytes));
  std::vector<void*> leaves;
  CGX_RETURN_IF_ERROR(collect(op, "leaf", l, batch, rets, 0, std::nullopt, &leaves));
  cpu::decode({l, batch, static_cast<const uint8_t*>(payload.untyped_data()), leaves.data()}, pool_of(threads));
  return ffi::Error::Success();
}

// Operands: payloads, where, own leaves (with own), keys (where the result is encoded and the codec stochastic).
// Results: the sum as fp32 leaves, or as a payload.
ffi::Error reduce(ffi::ThreadPool threads, ffi::AnyBuffer payloads, ffi::AnyBuffer where, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  CodecAttr codec, Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch, int64_t ranks, bool own,
                  bool encoded, float divisor) {
  const std::string op = "reduce";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  if (ranks < 1 || ranks > (1 << 20)) return invalid(op, "ranks out of range: " + std::to_string(ranks));
  if (!encoded && chunks != 1) return invalid(op, "a sum that is not encoded is of one chunk, got " + std::to_string(chunks));
  if (!(divisor > 0.0f)) return invalid(op, "the divisor is not positive");
  const size_t inputs = own ? l.leaves.size() : 0;
  const bool keyed = encoded && l.codec.stochastic;
  CGX_RETURN_IF_ERROR(expect_count(op, "operands after the second", args.size(), inputs + (keyed ? 1 : 0)));
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), encoded ? 1 : l.leaves.size()));
  CGX_RETURN_IF_ERROR(expect(op, "payloads", payloads, ffi::DataType::U8, batch, ranks * l.chunk_bytes));
  CGX_RETURN_IF_ERROR(expect(op, "where", where, ffi::DataType::S32, batch, 2));
  const int32_t* at = static_cast<const int32_t*>(where.untyped_data());
  for (int64_t row = 0; row < batch; ++row) {
    if (at[2 * row] < 0 || at[2 * row] >= chunks) return invalid(op, "chunk " + std::to_string(at[2 * row]) + " of " + std::to_string(chunks));
    if (own && (at[2 * row + 1] < 0 || at[2 * row + 1] >= ranks)) {
      return invalid(op, "own rank " + std::to_string(at[2 * row + 1]) + " of " + std::to_string(ranks));
    }
  }
  std::vector<const void*> own_leaves;
  if (own) CGX_RETURN_IF_ERROR(collect(op, "own leaf", l, batch, args, 0, std::nullopt, &own_leaves));
  const uint32_t* keys = nullptr;
  if (keyed) CGX_RETURN_IF_ERROR(find_keys(op, args, inputs, batch, &keys));
  std::vector<float*> leaves;
  uint8_t* payload = nullptr;
  if (encoded) {
    auto buffer = rets.get<ffi::AnyBuffer>(0);
    if (buffer.has_error()) return buffer.error();
    CGX_RETURN_IF_ERROR(expect(op, "payload", **buffer, ffi::DataType::U8, batch, l.chunk_bytes));
    payload = static_cast<uint8_t*>((*buffer)->untyped_data());
  } else {
    CGX_RETURN_IF_ERROR(collect(op, "leaf", l, batch, rets, 0, DType::kF32, &leaves));
  }
  cpu::reduce({l, batch, ranks, static_cast<const uint8_t*>(payloads.untyped_data()), at, own ? own_leaves.data() : nullptr, divisor,
               leaves.data(), payload, ids.begin(), keys},
              pool_of(threads));
  return ffi::Error::Success();
}

}  // namespace

// What the attributes of every operation begin with.
#define CGX_MESSAGE                                                                                                    \
  .Attr<CodecAttr>("codec").Attr<Sizes>("sizes").Attr<Sizes>("dtypes").Attr<Sizes>("ids").Attr<int64_t>("chunks").Attr<int64_t>("batch")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_encode_cpu, encode,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets() CGX_MESSAGE.Attr<bool>("feedback"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_decode_cpu, decode,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingRets() CGX_MESSAGE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxcgx_reduce_cpu, reduce,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets() CGX_MESSAGE
        .Attr<int64_t>("ranks").Attr<bool>("own").Attr<bool>("encoded").Attr<float>("divisor"));

}  // namespace jaxcgx
