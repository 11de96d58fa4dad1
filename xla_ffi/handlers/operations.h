// The operations as XLA calls them, the same on every platform: check every buffer against the message, then run.
//
// A Platform has a Context, what XLA hands its handlers (threads or a stream); encode, decode, reduce and clear, which
// take it, the workspace and what cpu/cpu.h says of an operation; workspace_bytes; and check_where, for what of `where`
// the host can read. The workspace, where it is not empty, is one more result behind an operation's own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "handlers/message.h"

namespace jaxcgx {

inline ffi::AnyBuffer& the_buffer(ffi::AnyBuffer& operand) { return operand; }
inline ffi::AnyBuffer& the_buffer(ffi::Result<ffi::AnyBuffer>& result) { return *result; }

// A buffer of the operands or the results, checked.
template <class T, class Buffers>
ffi::Error find(const std::string& op, const std::string& name, const Buffers& buffers, size_t at, ffi::DataType type,
                int64_t batch, int64_t count, T** out) {
  auto found = buffers.template get<ffi::AnyBuffer>(at);
  if (found.has_error()) return found.error();
  ffi::AnyBuffer& buffer = the_buffer(*found);
  CGX_RETURN_IF_ERROR(expect(op, name, buffer, type, batch, count));
  *out = static_cast<T*>(buffer.untyped_data());
  return ffi::Error::Success();
}

inline ffi::Error expect_count(const std::string& op, const char* name, size_t got, size_t expected) {
  if (got == expected) return ffi::Error::Success();
  return invalid(op, std::string(name) + ": got " + std::to_string(got) + ", expected " + std::to_string(expected));
}

// The workspace of an operation that decodes `payloads` of each row and `encodes`: the result at `at`, where it needs
// one. Operands and results of the sizes that go before it are there, so that its size does not overflow.
template <class Platform>
ffi::Error find_workspace(const std::string& op, const Layout& l, int64_t batch, int64_t payloads, bool encodes,
                          ffi::RemainingRets& rets, size_t at, uint8_t** out) {
  const int64_t bytes = Platform::workspace_bytes(l, batch, payloads, encodes);
  *out = nullptr;
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), at + (bytes > 0)));
  return bytes > 0 ? find(op, "workspace", rets, at, ffi::DataType::U8, 1, bytes, out) : ffi::Error::Success();
}

// The buffers of a list of leaves, each checked.
template <class T, class Buffers>
ffi::Error find_leaves(const std::string& op, const std::string& name, const Layout& l, int64_t batch,
                       const Buffers& buffers, size_t first, std::optional<DType> dtype, std::vector<T*>* out) {
  out->resize(l.leaves.size());
  for (size_t i = 0; i < l.leaves.size(); ++i) {
    const ffi::DataType type = type_of(dtype.value_or(l.leaves[i].dtype));
    CGX_RETURN_IF_ERROR(
        find(op, name + " " + std::to_string(i), buffers, first + i, type, batch, l.leaves[i].size, &(*out)[i]));
  }
  return ffi::Error::Success();
}

// Where results are written in part only: XLA, told that they are the operands, copies first where it must not lose
// these.
template <class T>
ffi::Error expect_in_place(const std::string& op, const std::string& result, const std::string& operand,
                           const Layout& l, int64_t batch, const std::vector<T*>& operands,
                           const std::vector<T*>& results) {
  for (size_t i = 0; i < l.leaves.size(); ++i) {
    if (batch * l.leaves[i].size > 0 && operands[i] != results[i]) {
      return invalid(op, result + " " + std::to_string(i) + " does not lie where the " + operand + " does");
    }
  }
  return ffi::Error::Success();
}

// Operands: leaves, residuals (with feedback), keys (stochastic). Results: payload, new residuals.
template <class Platform>
ffi::Error encode(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec,
                  Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch, bool feedback) {
  const std::string op = "encode";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  const size_t n = l.leaves.size(), inputs = feedback ? 2 * n : n, outputs = feedback ? n + 1 : 1;
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), inputs + (l.codec.stochastic ? 1 : 0)));
  std::vector<const void*> leaves;
  std::vector<const float*> residuals;
  std::vector<float*> new_residuals;
  const uint32_t* keys = nullptr;
  uint8_t *payload = nullptr, *workspace = nullptr;
  CGX_RETURN_IF_ERROR(find_leaves(op, "leaf", l, batch, args, 0, std::nullopt, &leaves));
  CGX_RETURN_IF_ERROR(find_workspace<Platform>(op, l, batch, 0, true, rets, outputs, &workspace));
  if (feedback) {
    CGX_RETURN_IF_ERROR(find_leaves(op, "residual", l, batch, args, n, DType::kF32, &residuals));
    CGX_RETURN_IF_ERROR(find_leaves(op, "new residual", l, batch, rets, 1, DType::kF32, &new_residuals));
  }
  if (l.codec.stochastic) CGX_RETURN_IF_ERROR(find(op, "keys", args, inputs, ffi::DataType::U32, batch, 2, &keys));
  CGX_RETURN_IF_ERROR(find(op, "payload", rets, 0, ffi::DataType::U8, batch, chunks * l.chunk_bytes, &payload));
  return Platform::encode(context, workspace, l, batch, leaves.data(), ids.begin(), keys,
                          feedback ? residuals.data() : nullptr, new_residuals.data(), payload);
}

// Operand: payload. Results: leaves.
template <class Platform>
ffi::Error decode(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec,
                  Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch) {
  const std::string op = "decode";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), 1));
  const uint8_t* payload = nullptr;
  uint8_t* workspace = nullptr;
  std::vector<void*> leaves;
  CGX_RETURN_IF_ERROR(find(op, "payload", args, 0, ffi::DataType::U8, batch, chunks * l.chunk_bytes, &payload));
  CGX_RETURN_IF_ERROR(find_workspace<Platform>(op, l, batch, 1, false, rets, l.leaves.size(), &workspace));
  CGX_RETURN_IF_ERROR(find_leaves(op, "leaf", l, batch, rets, 0, std::nullopt, &leaves));
  return Platform::decode(context, workspace, l, batch, payload, leaves.data());
}

// Operands: payloads, where, own leaves (with own), residuals (with feedback), keys (where the result is encoded and
// the codec stochastic). Results: the sum as fp32 leaves; or as a payload, and the new residuals, in the same memory.
template <class Platform>
ffi::Error reduce(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec,
                  Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch, int64_t ranks, bool own,
                  bool encoded, float divisor, bool feedback) {
  const std::string op = "reduce";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  if (ranks < 1 || ranks > (1 << 20)) return invalid(op, "ranks out of range: " + std::to_string(ranks));
  if (!encoded && chunks != 1)
    return invalid(op, "a sum that is not encoded is of one chunk, got " + std::to_string(chunks));
  if (feedback && (own || !encoded))
    return invalid(op, "feedback is for a sum that is encoded, and not with own leaves");
  // Of a smaller one 1 / divisor may be infinite.
  if (!(divisor >= 0x1p-126f)) return invalid(op, "the divisor is not a positive number, 2^-126 or more");
  const Layout sum = of_sum(l, ranks);
  const size_t n = l.leaves.size(), inputs = own || feedback ? n + 2 : 2, outputs = feedback ? n + 1 : encoded ? 1 : n;
  const bool keyed = encoded && sum.codec.stochastic;
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), inputs + (keyed ? 1 : 0)));
  const uint8_t* payloads = nullptr;
  const int32_t* where = nullptr;
  const uint32_t* keys = nullptr;
  std::vector<const void*> own_leaves;
  std::vector<float*> leaves, residuals, new_residuals;
  uint8_t *payload = nullptr, *workspace = nullptr;
  CGX_RETURN_IF_ERROR(find(op, "payloads", args, 0, ffi::DataType::U8, batch, ranks * l.chunk_bytes, &payloads));
  CGX_RETURN_IF_ERROR(find_workspace<Platform>(op, l, batch, ranks, encoded, rets, outputs, &workspace));
  CGX_RETURN_IF_ERROR(find(op, "where", args, 1, ffi::DataType::S32, batch, 2, &where));
  CGX_RETURN_IF_ERROR(Platform::check_where(where, batch, chunks, ranks, own));
  if (own) CGX_RETURN_IF_ERROR(find_leaves(op, "own leaf", l, batch, args, 2, std::nullopt, &own_leaves));
  if (feedback) {
    CGX_RETURN_IF_ERROR(find_leaves(op, "residual", l, batch, args, 2, DType::kF32, &residuals));
    CGX_RETURN_IF_ERROR(find_leaves(op, "new residual", l, batch, rets, 1, DType::kF32, &new_residuals));
    CGX_RETURN_IF_ERROR(expect_in_place(op, "new residual", "residual", l, batch, residuals, new_residuals));
  }
  if (keyed) CGX_RETURN_IF_ERROR(find(op, "keys", args, inputs, ffi::DataType::U32, batch, 2, &keys));
  if (encoded) {
    CGX_RETURN_IF_ERROR(find(op, "payload", rets, 0, ffi::DataType::U8, batch, sum.chunk_bytes, &payload));
  } else {
    CGX_RETURN_IF_ERROR(find_leaves(op, "leaf", l, batch, rets, 0, DType::kF32, &leaves));
  }
  return Platform::reduce(context, workspace, l, batch, ranks, payloads, where, own ? own_leaves.data() : nullptr,
                          divisor, leaves.data(), payload, feedback ? residuals.data() : nullptr, ids.begin(), keys);
}

// Operands: payload, arrays of the leaves' shapes and dtypes. Results: these without what the payload has, in the same
// memory.
template <class Platform>
ffi::Error clear(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec,
                 Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch) {
  const std::string op = "clear";
  auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return layout.error();
  const Layout& l = *layout;
  if (l.codec.kind != Kind::kTopK) return invalid(op, "this codec sends every element");
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), 1 + l.leaves.size()));
  const uint8_t* payload = nullptr;
  uint8_t* workspace = nullptr;
  std::vector<void*> arrays, cleared;
  CGX_RETURN_IF_ERROR(find(op, "payload", args, 0, ffi::DataType::U8, batch, chunks * l.chunk_bytes, &payload));
  CGX_RETURN_IF_ERROR(find_workspace<Platform>(op, l, batch, 1, false, rets, l.leaves.size(), &workspace));
  CGX_RETURN_IF_ERROR(find_leaves(op, "array", l, batch, args, 1, std::nullopt, &arrays));
  CGX_RETURN_IF_ERROR(find_leaves(op, "cleared array", l, batch, rets, 0, std::nullopt, &cleared));
  CGX_RETURN_IF_ERROR(expect_in_place(op, "cleared array", "array", l, batch, arrays, cleared));
  return Platform::clear(context, workspace, l, batch, payload, cleared.data());
}

// What the handlers of the operations are bound to. The context is bound before.
#define CGX_MESSAGE             \
  RemainingArgs()               \
      .RemainingRets()          \
      .Attr<CodecAttr>("codec") \
      .Attr<Sizes>("sizes")     \
      .Attr<Sizes>("dtypes")    \
      .Attr<Sizes>("ids")       \
      .Attr<int64_t>("chunks")  \
      .Attr<int64_t>("batch")
#define CGX_ENCODE CGX_MESSAGE.Attr<bool>("feedback")
#define CGX_DECODE CGX_MESSAGE
#define CGX_CLEAR CGX_MESSAGE
#define CGX_REDUCE                                                                                              \
  CGX_MESSAGE.Attr<int64_t>("ranks").Attr<bool>("own").Attr<bool>("encoded").Attr<float>("divisor").Attr<bool>( \
      "feedback")

}  // namespace jaxcgx
