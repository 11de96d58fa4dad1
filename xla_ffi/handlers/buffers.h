// The buffers of a call on a message. Each is checked before a kernel gets it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "handlers/message.h"

namespace jaxcgx {

inline ffi::DataType type_of(DType d) {
  return d == DType::kF32 ? ffi::DataType::F32 : d == DType::kBF16 ? ffi::DataType::BF16 : ffi::DataType::F16;
}

inline ffi::Error expect_count(const std::string& op, const char* name, size_t got, size_t expected) {
  if (got == expected) return ffi::Error::Success();
  return invalid(op, std::string(name) + ": got " + std::to_string(got) + ", expected " + std::to_string(expected));
}

inline ffi::Error expect_operation(const std::string& op, int64_t got, int64_t operations) {
  if (got >= 0 && got < operations) return ffi::Error::Success();
  return invalid(op, "no operation " + std::to_string(got));
}

// Returns the bytes of a row of an exchange's operand and result. The operand has `in_rows` rows, the result
// `out_rows`.
inline ffi::ErrorOr<int64_t> check_rows(const std::string& op, const ffi::AnyBuffer& x, const ffi::AnyBuffer& y,
                                        int64_t in_rows, int64_t out_rows) {
  const auto in = static_cast<int64_t>(x.size_bytes()), out = static_cast<int64_t>(y.size_bytes());
  const int64_t bytes = in / in_rows;
  if (x.element_type() != y.element_type()) return refused(op, "a result of another dtype than the operand");
  if (bytes * in_rows != in || bytes * out_rows != out)
    return refused(
        op, "a result of " + std::to_string(out) + " bytes does not belong to an operand of " + std::to_string(in));
  return bytes;
}

// The operands (ffi::RemainingArgs) or the results (ffi::RemainingRets) of a call. They are taken one after another.
template <class All>
class Buffers {
 public:
  Buffers(std::string op, const Message& message, const All& all) : op_(std::move(op)), message_(message), all_(all) {}

  // Takes the next buffer, which must have `count` elements of `type`.
  template <class T>
  ffi::Error take(const std::string& name, ffi::DataType type, int64_t count, T** out) {
    auto found = all_.template get<ffi::AnyBuffer>(next_++);
    if (found.has_error()) return found.error();
    ffi::AnyBuffer& buffer = buffer_of(*found);
    if (buffer.element_type() != type) return invalid(op_, name + " has another dtype than expected");
    if (static_cast<int64_t>(buffer.element_count()) != count) {
      return invalid(op_, name + " has " + std::to_string(buffer.element_count()) + " elements, expected " +
                              std::to_string(count));
    }
    // On a GPU, XLA gives an empty buffer the address nullptr. To an operation, nullptr means that there is no buffer.
    alignas(16) static char nothing;
    *out = static_cast<T*>(count > 0 ? buffer.untyped_data() : &nothing);
    return ffi::Error::Success();
  }

  // Takes the next buffer, which must have `count` elements of `type` for each message of the batch.
  template <class T>
  ffi::Error take_batch(const std::string& name, ffi::DataType type, int64_t count, T** out) {
    int64_t expected;
    if (__builtin_mul_overflow(message_.batch, count, &expected)) return invalid(op_, name + ": its size overflows");
    return take(name, type, expected, out);
  }

  // Takes a buffer for each leaf. The buffers have the dtype `dtype`, by default each leaf's. `others`: leaves in
  // place of the message's.
  template <class T>
  ffi::Error take_leaves(const std::string& name, std::optional<DType> dtype, std::vector<T*>* out,
                         const std::vector<Leaf>& others = {}) {
    const std::vector<Leaf>& leaves = others.empty() ? message_.layout->leaves : others;
    out->resize(leaves.size());
    for (size_t i = 0; i < leaves.size(); ++i) {
      const ffi::DataType type = type_of(dtype.value_or(leaves[i].dtype));
      CGX_RETURN_IF_ERROR(take_batch(name + " " + std::to_string(i), type, leaves[i].size, &(*out)[i]));
    }
    return ffi::Error::Success();
  }

 private:
  static ffi::AnyBuffer& buffer_of(ffi::AnyBuffer& operand) { return operand; }
  static ffi::AnyBuffer& buffer_of(ffi::Result<ffi::AnyBuffer>& result) { return *result; }

  const std::string op_;
  const Message& message_;
  const All& all_;
  size_t next_ = 0;
};

}  // namespace jaxcgx
