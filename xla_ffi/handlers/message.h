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
};

using Sizes = ffi::Span<const int64_t>;

inline ffi::Error invalid(const std::string& op, const std::string& what) {
  return ffi::Error::InvalidArgument("jaxcgx_" + op + ": " + what);
}

// The message's layout, or what is wrong with its description.
inline ffi::ErrorOr<Layout> make_layout(const std::string& op, const CodecAttr& a, Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch) {
  const auto bad = [&](const std::string& what) { return ffi::Unexpected(invalid(op, what)); };
  const Codec c{static_cast<Kind>(a.kind), a.bits, a.bucket_size, a.stochastic != 0, a.skip_incomplete != 0, a.compatible != 0};
  const auto range = [&](int32_t low, int32_t high) { return c.bits >= low && c.bits <= high; };
  bool good = false;
  switch (c.kind) {
    case Kind::kMaxMin: good = range(1, 8); break;
    case Kind::kAbsMax: good = range(2, 8); break;
    case Kind::kFloat8: good = range(4, 5); break;
    case Kind::kCast: good = range(static_cast<int32_t>(DType::kBF16), static_cast<int32_t>(DType::kF16)); break;
    case Kind::kRaw:
    case Kind::kByteGrad:
    case Kind::kSign: good = true; break;
  }
  if (!good) return bad("no codec of kind " + std::to_string(a.kind) + " with " + std::to_string(a.bits) + " bits");
  constexpr int64_t kMost = int64_t{1} << 40;  // elements of a leaf or a bucket: sums of bytes stay far from overflow
  if (c.bucket_size < 0 || c.bucket_size > kMost) return bad("bucket_size out of range: " + std::to_string(c.bucket_size));
  if (has_buckets(c.kind) && c.kind != Kind::kByteGrad && c.bucket_size == 0) return bad("bucket_size is 0");
  if (!has_buckets(c.kind) && c.bucket_size != 0) return bad("a codec without buckets has a bucket_size");
  if (c.stochastic && c.kind != Kind::kMaxMin && c.kind != Kind::kCast) return bad("this codec has no stochastic rounding");
  if (c.skip_incomplete && c.kind != Kind::kMaxMin) return bad("this codec has no skip_incomplete");
  if (sizes.size() != dtypes.size() || sizes.size() != ids.size()) return bad("sizes, dtypes and ids differ in length");
  if (chunks < 1 || chunks > (1 << 20)) return bad("chunks out of range: " + std::to_string(chunks));
  if (batch < 0 || batch > kMost) return bad("batch out of range: " + std::to_string(batch));
  std::vector<Leaf> leaves;
  int64_t total = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || sizes[i] > kMost) return bad("leaf " + std::to_string(i) + " has size " + std::to_string(sizes[i]));
    if (dtypes[i] < 0 || dtypes[i] > static_cast<int64_t>(DType::kF16)) return bad("leaf " + std::to_string(i) + " has an unknown dtype");
    leaves.push_back({sizes[i], static_cast<DType>(dtypes[i])});
    total += sizes[i];
    if (total > kMost) return bad("the leaves have more than 2^40 elements");
  }
  return Layout(c, std::move(leaves), chunks);
}

// Expects batch * count elements of `type` in a buffer.
template <class Buffer>
ffi::Error expect(const std::string& op, const std::string& name, const Buffer& buffer, ffi::DataType type, int64_t batch, int64_t count) {
  if (buffer.element_type() != type) return invalid(op, name + " has another dtype than expected");
  int64_t expected;
  if (__builtin_mul_overflow(batch, count, &expected)) return invalid(op, name + ": its size overflows");
  if (static_cast<int64_t>(buffer.element_count()) != expected) {
    return invalid(op, name + " has " + std::to_string(buffer.element_count()) + " elements, expected " + std::to_string(expected));
  }
  return ffi::Error::Success();
}

inline ffi::DataType type_of(DType d) {
  return d == DType::kF32 ? ffi::DataType::F32 : d == DType::kBF16 ? ffi::DataType::BF16 : ffi::DataType::F16;
}

#define CGX_RETURN_IF_ERROR(expression)                            \
  do {                                                             \
    if (ffi::Error error = (expression); error.failure()) return error; \
  } while (false)

}  // namespace jaxcgx

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxcgx::CodecAttr, xla::ffi::StructMember<int32_t>("kind"),
                                      xla::ffi::StructMember<int32_t>("bits"), xla::ffi::StructMember<int64_t>("bucket_size"),
                                      xla::ffi::StructMember<int32_t>("stochastic"),
                                      xla::ffi::StructMember<int32_t>("skip_incomplete"),
                                      xla::ffi::StructMember<int32_t>("compatible"));
