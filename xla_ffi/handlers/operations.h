// The operations as XLA calls them, the same on every platform. Each checks the attributes and every buffer, then runs.
//
// A Platform has these members:
//  - Context: the threads or the stream that XLA gives to a handler.
//  - encode, decode, reduce, clear: run an operation, given a Context and its arguments (codec/operations.h).
//  - workspace_bytes: returns the size of the workspace, given the layout, the batch, the number of payloads that the
//    operation decodes per message, and whether it encodes. If the size is not 0, the workspace is the operation's last
//    result.
//  - check_where: checks `where` if the host can read it.
#pragma once

#include <string>
#include <vector>

#include "codec/operations.h"
#include "codec/rng.h"
#include "handlers/buffers.h"

namespace jaxcgx {

// Checks that results share the memory of their operands. This is necessary if an operation writes only parts of a
// result. The call declares the aliasing to XLA, which copies an operand first if the operand is needed later.
template <class T>
ffi::Error expect_in_place(const std::string& op, const char* result, const char* operand, const Message& m,
                           const std::vector<T*>& operands, const std::vector<T*>& results) {
  for (size_t i = 0; i < operands.size(); ++i) {
    if (m.batch * m.layout->leaves[i].size > 0 && operands[i] != results[i])
      return invalid(op, std::string(result) + " " + std::to_string(i) + " is not in place of the " + operand);
  }
  return ffi::Error::Success();
}

// Operands: leaves, residuals (with feedback), keys (stochastic). Results: payload, new residuals (with feedback).
template <class Platform>
ffi::Error encode(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary dictionary) {
  const std::string op = "encode";
  Attributes attributes(op, dictionary);
  const bool feedback = attributes.get<bool>("feedback");
  const auto message = attributes.message();
  if (message.has_error()) return message.error();
  const Layout& l = *message->layout;
  const size_t n = l.leaves.size();

  Buffers operands(op, *message, args);
  std::vector<const void*> leaves;
  std::vector<const float*> residuals;
  Encode e{l, message->batch};
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), (feedback ? 2 * n : n) + (l.codec.stochastic ? 1 : 0)));
  CGX_RETURN_IF_ERROR(operands.take_leaves("leaf", std::nullopt, &leaves));
  if (feedback) CGX_RETURN_IF_ERROR(operands.take_leaves("residual", DType::kF32, &residuals));
  if (l.codec.stochastic) CGX_RETURN_IF_ERROR(operands.take_batch("keys", ffi::DataType::U32, kKeyWords, &e.keys));

  Buffers results(op, *message, rets);
  std::vector<float*> new_residuals;
  const int64_t workspace = Platform::workspace_bytes(l, e.batch, 0, true);
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), (feedback ? n + 1 : 1) + (workspace > 0)));
  CGX_RETURN_IF_ERROR(results.take_batch("payload", ffi::DataType::U8, l.chunks() * l.chunk_bytes, &e.payload));
  if (feedback) CGX_RETURN_IF_ERROR(results.take_leaves("new residual", DType::kF32, &new_residuals));
  if (workspace > 0) CGX_RETURN_IF_ERROR(results.take("workspace", ffi::DataType::U8, workspace, &e.workspace));

  e.leaves = leaves.data();
  e.leaf_ids = message->ids.begin();
  if (feedback) {
    e.residuals = residuals.data();
    e.new_residuals = new_residuals.data();
  }
  return Platform::encode(context, e);
}

// Operand: payload. Results: leaves.
template <class Platform>
ffi::Error decode(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary dictionary) {
  const std::string op = "decode";
  const auto message = Attributes(op, dictionary).message();
  if (message.has_error()) return message.error();
  const Layout& l = *message->layout;

  Buffers operands(op, *message, args);
  Decode d{l, message->batch};
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), 1));
  CGX_RETURN_IF_ERROR(operands.take_batch("payload", ffi::DataType::U8, l.chunks() * l.chunk_bytes, &d.payload));

  Buffers results(op, *message, rets);
  std::vector<void*> leaves;
  const int64_t workspace = Platform::workspace_bytes(l, d.batch, 1, false);
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), l.leaves.size() + (workspace > 0)));
  CGX_RETURN_IF_ERROR(results.take_leaves("leaf", std::nullopt, &leaves));
  if (workspace > 0) CGX_RETURN_IF_ERROR(results.take("workspace", ffi::DataType::U8, workspace, &d.workspace));

  d.leaves = leaves.data();
  return Platform::decode(context, d);
}

// Operands: payloads, where, own leaves (with own), residuals (with feedback), keys (if the result is encoded and the
// codec is stochastic). Results: the sum as fp32 leaves, or the sum as a payload and the new residuals in place.
template <class Platform>
ffi::Error reduce(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary dictionary) {
  const std::string op = "reduce";
  Attributes attributes(op, dictionary);
  const auto ranks = attributes.get<int64_t>("ranks");
  const bool own = attributes.get<bool>("own"), encoded = attributes.get<bool>("encoded"),
             feedback = attributes.get<bool>("feedback");
  const auto divisor = attributes.get<float>("divisor");
  const auto message = attributes.message();
  if (message.has_error()) return message.error();
  const Layout& l = *message->layout;
  if (ranks < 1 || ranks > kMostRanks) return invalid(op, "ranks out of range: " + std::to_string(ranks));
  if (!encoded && l.chunks() != 1)
    return invalid(op, "expected one chunk for a sum that is not encoded, got " + std::to_string(l.chunks()));
  if (feedback && (own || !encoded))
    return invalid(op, "feedback is for a sum that is encoded, and not with own leaves");
  if (!(divisor >= kLeastDivisor)) return invalid(op, "the divisor is not a positive number, 2^-126 or more");
  const std::optional<Layout> of_lists = is_sparse(l.codec.kind) ? std::optional(of_sum(l, ranks)) : std::nullopt;
  const Layout& sum = of_lists ? *of_lists : l;
  const size_t n = l.leaves.size();
  const bool keyed = encoded && sum.codec.stochastic;

  Buffers operands(op, *message, args);
  std::vector<const void*> own_leaves;
  std::vector<float*> residuals;
  Reduce r{l, message->batch, ranks};
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), 2 + (own || feedback ? n : 0) + (keyed ? 1 : 0)));
  CGX_RETURN_IF_ERROR(operands.take_batch("payloads", ffi::DataType::U8, ranks * l.chunk_bytes, &r.payloads));
  CGX_RETURN_IF_ERROR(operands.take_batch("where", ffi::DataType::S32, 2, &r.where));
  CGX_RETURN_IF_ERROR(Platform::check_where(r.where, *message, ranks, own));
  if (own) CGX_RETURN_IF_ERROR(operands.take_leaves("own leaf", std::nullopt, &own_leaves));
  if (feedback) CGX_RETURN_IF_ERROR(operands.take_leaves("residual", DType::kF32, &residuals));
  if (keyed) CGX_RETURN_IF_ERROR(operands.take_batch("keys", ffi::DataType::U32, kKeyWords, &r.keys));

  Buffers results(op, *message, rets);
  std::vector<float*> leaves, new_residuals;
  const int64_t workspace = Platform::workspace_bytes(l, r.batch, ranks, encoded);
  CGX_RETURN_IF_ERROR(
      expect_count(op, "results", rets.size(), (encoded ? 1 : n) + (feedback ? n : 0) + (workspace > 0)));
  if (encoded)
    CGX_RETURN_IF_ERROR(results.take_batch("payload", ffi::DataType::U8, sum.chunk_bytes, &r.payload));
  else
    CGX_RETURN_IF_ERROR(results.take_leaves("leaf", DType::kF32, &leaves));
  if (feedback) {
    CGX_RETURN_IF_ERROR(results.take_leaves("new residual", DType::kF32, &new_residuals));
    CGX_RETURN_IF_ERROR(expect_in_place(op, "new residual", "residual", *message, residuals, new_residuals));
  }
  if (workspace > 0) CGX_RETURN_IF_ERROR(results.take("workspace", ffi::DataType::U8, workspace, &r.workspace));

  r.own = own ? own_leaves.data() : nullptr;
  r.divisor = divisor;
  r.leaves = leaves.data();
  r.residuals = feedback ? residuals.data() : nullptr;
  r.leaf_ids = message->ids.begin();
  return Platform::reduce(context, r);
}

// Operands: payload, arrays with the shapes and dtypes of the leaves. Results: the arrays, in place, with the elements
// of the payload set to 0.
template <class Platform>
ffi::Error clear(typename Platform::Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary dictionary) {
  const std::string op = "clear";
  const auto message = Attributes(op, dictionary).message();
  if (message.has_error()) return message.error();
  const Layout& l = *message->layout;
  if (!is_sparse(l.codec.kind)) return invalid(op, "this codec sends every element");

  Buffers operands(op, *message, args);
  std::vector<void*> arrays;
  Clear c{l, message->batch};
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), 1 + l.leaves.size()));
  CGX_RETURN_IF_ERROR(operands.take_batch("payload", ffi::DataType::U8, l.chunks() * l.chunk_bytes, &c.payload));
  CGX_RETURN_IF_ERROR(operands.take_leaves("array", std::nullopt, &arrays));

  Buffers results(op, *message, rets);
  std::vector<void*> cleared;
  const int64_t workspace = Platform::workspace_bytes(l, c.batch, 1, false);
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), l.leaves.size() + (workspace > 0)));
  CGX_RETURN_IF_ERROR(results.take_leaves("cleared array", std::nullopt, &cleared));
  CGX_RETURN_IF_ERROR(expect_in_place(op, "cleared array", "array", *message, arrays, cleared));
  if (workspace > 0) CGX_RETURN_IF_ERROR(results.take("workspace", ffi::DataType::U8, workspace, &c.workspace));

  c.arrays = cleared.data();
  return Platform::clear(context, c);
}

}  // namespace jaxcgx
