// Decodes and checks the attributes of a call. Handlers never trust their caller.
#pragma once

#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "codec/fields.h"
#include "codec/layout.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcgx {

namespace ffi = xla::ffi;

using Sizes = ffi::Span<const int64_t>;

constexpr int64_t kMost = int64_t{1} << 40;  // the most elements of a message or a bucket: sums of bytes can't overflow
constexpr int64_t kMostChunks = 1 << 20, kMostRanks = 1 << 20;
constexpr int64_t kMostShares = 1 << 30;    // bound on the shares of all chunks together: Layout can't overflow
constexpr float kLeastDivisor = 0x1p-126f;  // the smallest divisor: 1 / divisor is finite

inline ffi::Error invalid(const std::string& op, const std::string& what) {
  return ffi::Error::InvalidArgument("jaxcgx_" + op + ": " + what);
}
// The same, for functions that return an ffi::ErrorOr.
inline auto refused(const std::string& op, const std::string& what) { return ffi::Unexpected(invalid(op, what)); }

#define CGX_RETURN_IF_ERROR(expression)                                 \
  do {                                                                  \
    if (ffi::Error error = (expression); error.failure()) return error; \
  } while (false)
#define CGX_UNEXPECTED_IF_ERROR(expression)                                              \
  do {                                                                                   \
    if (ffi::Error error = (expression); error.failure()) return ffi::Unexpected(error); \
  } while (false)

// Returns the fault of a codec's settings; empty if they are valid.
inline std::string fault_of(const Codec& c) {
  const Traits traits = traits_of(c.kind);
  if (traits.most_bits < traits.least_bits) {
    return "no codec of kind " + std::to_string(static_cast<int32_t>(c.kind)) +
           " in this native module; if its C++ code is new, run `make build`";
  }
  if (c.bits < traits.least_bits || c.bits > traits.most_bits) {
    return "no codec of kind " + std::to_string(static_cast<int32_t>(c.kind)) + " with " + std::to_string(c.bits) +
           " bits";
  }
  if (c.bucket_size < 0 || c.bucket_size > kMost) return "bucket_size out of range: " + std::to_string(c.bucket_size);
  if (has_buckets(c.kind) && !traits.whole && c.bucket_size == 0) return "bucket_size is 0";
  if (!has_buckets(c.kind) && c.bucket_size != 0) return "a codec without buckets has a bucket_size";
  if (c.skip_incomplete && !traits.skips) return "this codec has no skip_incomplete";
  if (c.compatible && !traits.compatible) return "this codec has no compatible mode";
  if (c.stochastic && !traits.stochastic) return "this codec has no stochastic rounding";
  if (c.rotate && !traits.rotates) return "this codec has no rotation";
  if (is_seeded(c) && !c.stochastic) return "this codec draws a seed, and is stochastic";
  if (traits.scales && c.rotate && c.bits != kNvfp4) return "only nvfp4 has a rotation";
  if (is_rotated(c) && (c.bucket_size == 0 || c.bucket_size > kMostRotated || c.bucket_size != padded(c.bucket_size)))
    return "bucket_size of a rotated codec: " + std::to_string(c.bucket_size);
  if (!is_sparse(c.kind)) return "";
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
  if (is_sparse(s.values.kind)) return "the values of a sparse codec have a sparse codec of their own";
  if (is_rotated(s.values)) return "the values of a sparse codec are rotated";
  if (is_lossless(s.values.kind)) return "the values of a sparse codec have no fixed size";
  if (c.stochastic != (s.values.stochastic || s.select != Select::kExact))
    return "stochastic must be true exactly if the selection or the values are random";
  const std::string values = fault_of(values_of(c));
  return values.empty() ? values : "values: " + values;
}

// A checked message. `ids` points to the caller's memory.
struct Message {
  std::shared_ptr<const Layout> layout;
  Sizes ids;
  int64_t batch;
};

// The attributes of a message, not yet checked.
struct Description {
  Codec codec;
  Sizes sizes, dtypes, ids, shares;
  int64_t chunks, batch;
};

constexpr size_t kMostKept = 4096;  // elements of a cache

// Makes room in a cache that is full, each time at another place. Callers hold the cache's mutex.
template <class Cache>
void make_room(Cache& kept) {
  static size_t turn = 0;
  if (kept.size() == kMostKept) kept.erase(std::next(kept.begin(), static_cast<ptrdiff_t>(turn++ % kMostKept)));
}

// Returns the layout of a message with these attributes, which are checked. Layouts are kept, because a
// program calls its operations on the same messages again and again. FFI's instantiate state can't keep them: jaxlib
// (0.10 and 0.12) refuses a handler with a state if it is registered before the backend exists.
inline std::shared_ptr<const Layout> layout_of(const Description& d, std::vector<Leaf> leaves) {
  using Key = std::vector<int64_t>;
  static std::mutex mutex;
  // Never destroyed: an XLA program may still be running when the process ends.
  static auto& kept = *new std::map<Key, std::shared_ptr<const Layout>>;

  Key key{d.chunks, static_cast<int64_t>(d.shares.size()), static_cast<int64_t>(leaves.size())};
  key.reserve(64 + d.shares.size() + 2 * leaves.size());
  Codec codec = d.codec;
  each_field(codec, [&](const std::string&, auto& field) {
    int64_t bits = 0;
    if constexpr (std::is_floating_point_v<std::remove_reference_t<decltype(field)>>)
      std::memcpy(&bits, &field, sizeof(field));
    else
      bits = static_cast<int64_t>(field);
    key.push_back(bits);
  });
  key.insert(key.end(), d.shares.begin(), d.shares.end());
  for (const Leaf& leaf : leaves) key.push_back(leaf.size), key.push_back(static_cast<int64_t>(leaf.dtype));

  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  make_room(kept);
  std::vector<int64_t> shares(d.shares.begin(), d.shares.end());
  auto layout = std::make_shared<const Layout>(d.codec, std::move(leaves), d.chunks, std::move(shares));
  return kept.emplace(std::move(key), std::move(layout)).first->second;
}

// Checks the attributes of a message and finds its layout.
inline ffi::ErrorOr<Message> make_message(const std::string& op, const Description& d) {
  if (const std::string fault = fault_of(d.codec); !fault.empty()) return refused(op, fault);
  if (d.sizes.size() != d.dtypes.size() || d.sizes.size() != d.ids.size())
    return refused(op, "sizes, dtypes and ids differ in length");
  if (d.chunks < 1 || d.chunks > kMostChunks) return refused(op, "chunks out of range: " + std::to_string(d.chunks));
  const auto parts = static_cast<int64_t>(d.shares.size());
  if (parts > 0 && d.chunks % parts != 0)
    return refused(op, std::to_string(d.chunks) + " chunks of " + std::to_string(parts) + " parts");
  int64_t shares = 0;
  for (const int64_t share : d.shares) {
    if (share < 0 || share > kMostShares || (shares += share) > kMostShares) return refused(op, "shares out of range");
  }
  if (parts > 0 && (shares == 0 || shares * (d.chunks / parts) > kMostShares))
    return refused(op, "shares out of range");
  if (d.batch < 0 || d.batch > kMost) return refused(op, "batch out of range: " + std::to_string(d.batch));
  std::vector<Leaf> leaves;
  int64_t total = 0;
  for (size_t i = 0; i < d.sizes.size(); ++i) {
    if (d.sizes[i] < 0 || d.sizes[i] > kMost)
      return refused(op, "leaf " + std::to_string(i) + " has size " + std::to_string(d.sizes[i]));
    if (d.dtypes[i] < 0 || d.dtypes[i] > static_cast<int64_t>(DType::kF16))
      return refused(op, "leaf " + std::to_string(i) + " has an unknown dtype");
    leaves.push_back({d.sizes[i], static_cast<DType>(d.dtypes[i])});
    total += d.sizes[i];
    if (total > kMost) return refused(op, "the leaves have more than 2^40 elements");
  }
  auto layout = layout_of(d, std::move(leaves));
  if (is_sparse(d.codec.kind)) {
    for (const Piece& p : layout->pieces) {
      if (p.coded > kMostIndices)
        return refused(op, "a piece has more than 2^31 - 1 elements: " + std::to_string(p.coded));
    }
  }
  return Message{std::move(layout), d.ids, d.batch};
}

// The attributes of a call, by name. error() and message() report the first attribute that is missing or has the wrong
// type.
class Attributes {
 public:
  Attributes(std::string op, const ffi::Dictionary& all) : op_(std::move(op)), all_(all) {}

  template <class T>
  T get(const std::string& name) {
    return get<T>(all_, name);
  }

  // Returns leaves that are given as their sizes and dtypes; none if one is invalid.
  std::vector<Leaf> leaves(const std::string& sizes, const std::string& dtypes) {
    const auto n = get<Sizes>(sizes), types = get<Sizes>(dtypes);
    std::vector<Leaf> found;
    for (size_t i = 0; i < n.size() && fault_.empty(); ++i) {
      if (n.size() != types.size() || n[i] < 0 || n[i] > kMost || types[i] < 0 ||
          types[i] > static_cast<int64_t>(DType::kF16))
        fault_ = "attribute '" + sizes + "': bad leaves";
      else
        found.push_back({n[i], static_cast<DType>(types[i])});
    }
    return found;
  }

  ffi::Error error() const { return fault_.empty() ? ffi::Error::Success() : invalid(op_, fault_); }

  // Returns the message. Call it after getting all other attributes, because it also reports their errors.
  ffi::ErrorOr<Message> message() {
    Description d;
    const auto codec = get<ffi::Dictionary>("codec");
    size_t fields = 0;
    each_field(d.codec, [&](const std::string& name, auto& field) {
      using T = std::remove_reference_t<decltype(field)>;
      field = static_cast<T>(get<FieldType<T>>(codec, name));
      ++fields;
    });
    // An unknown field is an error: otherwise a setting would be silently ignored.
    if (fault_.empty() && codec.size() != fields)
      fault_ = "attribute 'codec': got " + std::to_string(codec.size()) + " fields, expected " + std::to_string(fields);
    d.sizes = get<Sizes>("sizes");
    d.dtypes = get<Sizes>("dtypes");
    d.ids = get<Sizes>("ids");
    d.shares = get<Sizes>("shares");
    d.chunks = get<int64_t>("chunks");
    d.batch = get<int64_t>("batch");
    return fault_.empty() ? make_message(op_, d) : refused(op_, fault_);
  }

 private:
  static inline const XLA_FFI_Attrs kNone{};

  template <class T>
  T get(const ffi::Dictionary& from, const std::string& name) {
    if (fault_.empty()) {
      auto found = from.get<T>(name);
      if (found.has_value()) return *found;
      fault_ = "attribute '" + name + "': " + found.error().message();
    }
    if constexpr (std::is_same_v<T, ffi::Dictionary>)
      return T(&kNone);
    else
      return T{};
  }

  const std::string op_;
  const ffi::Dictionary all_;
  std::string fault_;
};

}  // namespace jaxcgx
