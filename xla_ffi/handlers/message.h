// What every handler is told about its message, checked: handlers never trust their caller.
#pragma once

#include <optional>
#include <string>

#include "codec/layout.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

namespace ffi = xla::ffi;

// The attribute "codec", a dictionary; jaxcgx/codecs/base.py makes it.
struct CodecAttr {
  int32_t kind, bits;
  int64_t bucket_size;
  int32_t stochastic, skip_incomplete, compatible;
  // What TopK has besides, zeros elsewhere; values_...: of the codec of its values.
  double ratio;
  int64_t lists;
  int32_t top, select;
  double share, lower;
  int32_t refinements, values_kind, values_bits;
  int64_t values_bucket_size;
  int32_t values_stochastic, values_skip_incomplete, values_compatible;
};

using Sizes = ffi::Span<const int64_t>;

inline ffi::Error invalid(const std::string& op, const std::string& what) {
  return ffi::Error::InvalidArgument("jaxcgx_" + op + ": " + what);
}

constexpr int64_t kMost = int64_t{1} << 40;  // elements of a leaf or a bucket: sums of bytes stay far from overflow

// What is wrong with a codec; empty: nothing.
inline std::string fault_of(const Codec& c) {
  const auto range = [&](int32_t low, int32_t high) { return c.bits >= low && c.bits <= high; };
  bool good = false;
  switch (c.kind) {
    case Kind::kMaxMin:
      good = range(1, 8);
      break;
    case Kind::kAbsMax:
      good = range(2, 8);
      break;
    case Kind::kFloat8:
      good = range(4, 5);
      break;
    case Kind::kCast:
      good = range(static_cast<int32_t>(DType::kBF16), static_cast<int32_t>(DType::kF16));
      break;
    case Kind::kRaw:
    case Kind::kByteGrad:
    case Kind::kSign:
    case Kind::kTopK:
      good = true;
      break;
  }
  if (!good)
    return "no codec of kind " + std::to_string(static_cast<int32_t>(c.kind)) + " with " + std::to_string(c.bits) +
           " bits";
  if (c.bucket_size < 0 || c.bucket_size > kMost) return "bucket_size out of range: " + std::to_string(c.bucket_size);
  if (has_buckets(c.kind) && c.kind != Kind::kByteGrad && c.bucket_size == 0) return "bucket_size is 0";
  if (!has_buckets(c.kind) && c.bucket_size != 0) return "a codec without buckets has a bucket_size";
  if (c.skip_incomplete && c.kind != Kind::kMaxMin) return "this codec has no skip_incomplete";
  if (c.kind != Kind::kTopK) {
    return c.stochastic && c.kind != Kind::kMaxMin && c.kind != Kind::kCast ? "this codec has no stochastic rounding"
                                                                            : "";
  }
  const Sparse& s = c.sparse;
  const auto share = [](double x) { return x >= 0x1p-15 && x <= 1.0; };
  if (!(s.ratio >= 0.0 && s.ratio <= 1.0)) return "ratio out of range: " + std::to_string(s.ratio);
  if (s.lists < 1 || s.lists > kMost) return "lists out of range: " + std::to_string(s.lists);
  if (s.select != Select::kExact) {
    if (s.select != Select::kQuantile && s.select != Select::kExponential)
      return "select out of range: " + std::to_string(static_cast<int32_t>(s.select));
    if (!share(s.share)) return "share out of range: " + std::to_string(s.share);
    if (!share(s.lower)) return "lower out of range: " + std::to_string(s.lower);
    if (s.refinements < 0 || s.refinements > kMostRefinements)
      return "refinements out of range: " + std::to_string(s.refinements);
  }
  if (s.kind == Kind::kTopK) return "values of kind 7, which keeps some only";
  if (c.stochastic != (s.stochastic || s.select != Select::kExact))
    return "stochastic where nothing is random, or not where something is";
  const std::string values = fault_of(values_of(c));
  return values.empty() ? values : "values: " + values;
}

// The message's layout, or what is wrong with its description.
inline ffi::ErrorOr<Layout> make_layout(const std::string& op, const CodecAttr& a, Sizes sizes, Sizes dtypes, Sizes ids,
                                        int64_t chunks, int64_t batch) {
  const auto bad = [&](const std::string& what) { return ffi::Unexpected(invalid(op, what)); };
  const Codec c{static_cast<Kind>(a.kind),
                a.bits,
                a.bucket_size,
                a.stochastic != 0,
                a.skip_incomplete != 0,
                a.compatible != 0,
                {a.ratio, a.lists, a.top != 0, static_cast<Select>(a.select), a.share, a.lower, a.refinements,
                 static_cast<Kind>(a.values_kind), a.values_bits, a.values_bucket_size, a.values_stochastic != 0,
                 a.values_skip_incomplete != 0, a.values_compatible != 0}};
  if (const std::string fault = fault_of(c); !fault.empty()) return bad(fault);
  if (sizes.size() != dtypes.size() || sizes.size() != ids.size()) return bad("sizes, dtypes and ids differ in length");
  if (chunks < 1 || chunks > (1 << 20)) return bad("chunks out of range: " + std::to_string(chunks));
  if (batch < 0 || batch > kMost) return bad("batch out of range: " + std::to_string(batch));
  std::vector<Leaf> leaves;
  int64_t total = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || sizes[i] > kMost)
      return bad("leaf " + std::to_string(i) + " has size " + std::to_string(sizes[i]));
    if (dtypes[i] < 0 || dtypes[i] > static_cast<int64_t>(DType::kF16))
      return bad("leaf " + std::to_string(i) + " has an unknown dtype");
    leaves.push_back({sizes[i], static_cast<DType>(dtypes[i])});
    total += sizes[i];
    if (total > kMost) return bad("the leaves have more than 2^40 elements");
  }
  Layout layout(c, std::move(leaves), chunks);
  if (c.kind == Kind::kTopK) {
    for (const Piece& p : layout.pieces) {
      if (p.coded > kMostIndices) return bad("a piece has more than 2^31 - 1 elements: " + std::to_string(p.coded));
    }
  }
  return layout;
}

// Expects batch * count elements of `type` in a buffer.
template <class Buffer>
ffi::Error expect(const std::string& op, const std::string& name, const Buffer& buffer, ffi::DataType type,
                  int64_t batch, int64_t count) {
  if (buffer.element_type() != type) return invalid(op, name + " has another dtype than expected");
  int64_t expected;
  if (__builtin_mul_overflow(batch, count, &expected)) return invalid(op, name + ": its size overflows");
  if (static_cast<int64_t>(buffer.element_count()) != expected) {
    return invalid(op, name + " has " + std::to_string(buffer.element_count()) + " elements, expected " +
                           std::to_string(expected));
  }
  return ffi::Error::Success();
}

inline ffi::DataType type_of(DType d) {
  return d == DType::kF32 ? ffi::DataType::F32 : d == DType::kBF16 ? ffi::DataType::BF16 : ffi::DataType::F16;
}

#define CGX_RETURN_IF_ERROR(expression)                                 \
  do {                                                                  \
    if (ffi::Error error = (expression); error.failure()) return error; \
  } while (false)

}  // namespace jaxcgx

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxcgx::CodecAttr, xla::ffi::StructMember<int32_t>("kind"), xla::ffi::StructMember<int32_t>("bits"),
    xla::ffi::StructMember<int64_t>("bucket_size"), xla::ffi::StructMember<int32_t>("stochastic"),
    xla::ffi::StructMember<int32_t>("skip_incomplete"), xla::ffi::StructMember<int32_t>("compatible"),
    xla::ffi::StructMember<double>("ratio"), xla::ffi::StructMember<int64_t>("lists"),
    xla::ffi::StructMember<int32_t>("top"), xla::ffi::StructMember<int32_t>("select"),
    xla::ffi::StructMember<double>("share"), xla::ffi::StructMember<double>("lower"),
    xla::ffi::StructMember<int32_t>("refinements"), xla::ffi::StructMember<int32_t>("values_kind"),
    xla::ffi::StructMember<int32_t>("values_bits"), xla::ffi::StructMember<int64_t>("values_bucket_size"),
    xla::ffi::StructMember<int32_t>("values_stochastic"), xla::ffi::StructMember<int32_t>("values_skip_incomplete"),
    xla::ffi::StructMember<int32_t>("values_compatible"));
