// The common parts of the tests: memory of exact size, pools, numbers, and the native operations on whole messages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "codec/cast.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace jaxcgx::test {

// `make test` leaves out cases that differ little from others.
inline bool everything() { return std::getenv("JAXCGX_TEST_FULL") != nullptr; }

inline const char* const kIsas[] = {"portable", "avx2", "avx512"};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Exactly `size` bytes, filled with garbage. On the heap, AddressSanitizer sees accesses around them, except those of
// masked vector instructions. Guarded memory ends before an inaccessible page, which also stops these.
class Memory {
 public:
  explicit Memory(int64_t size, uint8_t fill = 0xAB, bool guarded = false)
      : size_(static_cast<size_t>(size)), guarded_(guarded) {
    if (guarded) {
      const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      const size_t whole = (size_ + page - 1) / page * page;
      void* const p = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (p == MAP_FAILED || mprotect(static_cast<char*>(p) + whole, page, PROT_NONE) != 0) std::abort();
      data_ = {static_cast<uint8_t*>(p) + (whole - size_), [=](void*) { munmap(p, whole + page); }};
    } else {
      constexpr std::align_val_t kAlign{64};
      data_ = {static_cast<uint8_t*>(::operator new(size_, kAlign)), [](void* p) { ::operator delete(p, kAlign); }};
    }
    std::memset(data(), fill, size_);
  }

  uint8_t* data() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  size_t size() const { return size_; }
  Memory copy() const {
    Memory m(static_cast<int64_t>(size_), 0, guarded_);
    std::memcpy(m.data(), data(), size_);
    return m;
  }
  bool operator==(const Memory& o) const { return size_ == o.size_ && std::memcmp(data(), o.data(), size_) == 0; }

 private:
  size_t size_;
  bool guarded_;
  std::unique_ptr<uint8_t, std::function<void(void*)>> data_;
};

inline cpu::Pool one_thread() {
  return {1, [](std::function<void()>) { std::abort(); }};
}

// Flushes denormals, like XLA's threads.
inline void flush_denormals(bool on) {
#if defined(__SSE__)
  _mm_setcsr(on ? 0x9fc0 : 0x1f80);
#else
  (void)on;
#endif
}

// A thread for every task. Some start late, after the call that scheduled them has returned.
class Threads {
 public:
  explicit Threads(int64_t threads)
      : pool{threads, [this](std::function<void()> f) {
               std::lock_guard<std::mutex> lock(mutex_);  // tasks schedule others
               const bool late = ++scheduled_ % 3 == 0;
               started_.emplace_back([late, f = std::move(f)] {
                 flush_denormals(true);
                 if (late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                 f();
               });
             }} {}
  ~Threads() {
    for (std::thread& t : started_) t.join();
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  std::mutex mutex_;
  int64_t scheduled_ = 0;
  std::vector<std::thread> started_;

 public:
  const cpu::Pool pool;
};

struct Random {  // splitmix64
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  float uniform() { return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }  // [-1, 1)
  template <class T, size_t n>
  T pick(const T (&from)[n]) {
    return from[below(n)];
  }
  template <class T>
  T one_of(const std::vector<T>& from) {
    return from[static_cast<size_t>(below(static_cast<int64_t>(from.size())))];
  }
};

// Makes stretches of numbers of one magnitude, from denormals to 2^126: constants, zeros of both signs, offsets far
// larger than the range, and rarely an infinity or a NaN.
inline std::vector<float> numbers(int64_t n, Random& r) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n;) {
    const float scale =
        std::ldexp(1.0f, r.below(3) > 0 ? static_cast<int>(r.below(20)) - 15 : static_cast<int>(r.below(276)) - 149);
    const float offset = r.uniform() * scale;
    const int64_t kind = r.below(8), end = std::min(n, i + 1 + r.below(900));
    for (; i < end; ++i) {
      float& v = x[static_cast<size_t>(i)];
      v = kind == 0   ? offset
          : kind == 1 ? (r.below(2) ? 0.0f : -0.0f)
          : kind == 2 ? offset + r.uniform() * scale * 0x1p-18f
                      : r.uniform() * scale;
      if (kind == 3 && r.below(300) == 0)
        v = float_of(r.pick({0x7fc00000u, 0xffc12345u, 0x7f800001u, 0x7f800000u, 0xff800000u}));
    }
  }
  return x;
}

inline Memory as_leaf(DType dtype, const std::vector<float>& x, bool guarded = false) {
  Memory m(static_cast<int64_t>(x.size()) * size_of(dtype), 0, guarded);
  for (size_t i = 0; i < x.size(); ++i) {
    const int32_t code = dtype == DType::kF16 ? Cast<DType::kF16>::to_bits<Scalar, false>(x[i], 0)
                                              : static_cast<int32_t>(bits_of(x[i]) >> 16);
    if (dtype == DType::kF32)
      std::memcpy(m.data() + 4 * i, &x[i], 4);
    else
      std::memcpy(m.data() + 2 * i, &code, 2);
  }
  return m;
}

// The buffers of a message: its leaves, ids and keys.
struct Message {
  Layout layout;
  int64_t batch;
  std::vector<Memory> leaves;
  std::vector<Memory> residuals;  // empty: no feedback
  std::vector<int64_t> ids;
  std::vector<uint32_t> keys;

  Message(const Codec& codec, const std::vector<Leaf>& shapes, int64_t chunks, int64_t batch, Random& r,
          bool guarded = false)
      : layout(codec, shapes, chunks), batch(batch) {
    for (const Leaf& leaf : shapes) {
      leaves.push_back(as_leaf(leaf.dtype, numbers(batch * leaf.size, r), guarded));
      ids.push_back(r.below(1000));
    }
    for (int64_t i = 0; i < kKeyWords * batch; ++i) keys.push_back(static_cast<uint32_t>(r.next()));
  }
};

inline std::string describe(const Layout& l) {
  const Codec& c = l.codec;
  char text[200];
  std::snprintf(text, sizeof text,
                "kind %d bits %d bucket %lld stochastic %d skip %d compatible %d rotate %d chunks %lld leaves",
                static_cast<int>(c.kind), c.bits, static_cast<long long>(c.bucket_size), c.stochastic,
                c.skip_incomplete, c.compatible, c.rotate, static_cast<long long>(l.chunks()));
  std::string s = text;
  for (const Leaf& leaf : l.leaves)
    s += " " + std::to_string(leaf.size) + (leaf.dtype == DType::kF32 ? "f" : leaf.dtype == DType::kBF16 ? "b" : "h");
  return s;
}

template <class T>
std::vector<T*> pointers(const std::vector<Memory>& memory) {
  std::vector<T*> p;
  for (const Memory& m : memory) p.push_back(reinterpret_cast<T*>(m.data()));
  return p;
}

// With feedback, the new residuals replace the contents of `residuals`, which may be the message's own.
inline Memory encode(const Message& m, const cpu::Pool& pool, uint8_t fill = 0xAB,
                     const std::vector<Memory>* residuals = nullptr, bool guarded = false) {
  Memory payload(m.batch * m.layout.chunks() * m.layout.chunk_bytes, fill, guarded);
  const auto leaves = pointers<const void>(m.leaves);
  const auto old = pointers<const float>(m.residuals);
  const auto lost = residuals ? pointers<float>(*residuals) : std::vector<float*>();
  cpu::encode({m.layout, m.batch, leaves.data(), m.ids.data(), m.keys.data(), residuals ? old.data() : nullptr,
               residuals ? lost.data() : nullptr, payload.data()},
              pool);
  return payload;
}

inline std::vector<Memory> decode(const Layout& l, int64_t batch, const Memory& payload, const cpu::Pool& pool,
                                  uint8_t fill = 0xAB, bool guarded = false) {
  std::vector<Memory> leaves;
  for (const Leaf& leaf : l.leaves) leaves.emplace_back(batch * leaf.size * size_of(leaf.dtype), fill, guarded);
  cpu::decode({l, batch, payload.data(), pointers<void>(leaves).data()}, pool);
  return leaves;
}

// The sum of a chunk: as a payload, or as float32 leaves.
struct Sum {
  const Message& own;  // its leaves replace the payload of rank where[1], unless that is -1
  int64_t ranks;
  const Memory& payloads;
  std::vector<int32_t> where;
  float divisor;

  // With feedback the residuals are updated.
  Memory payload(const cpu::Pool& pool, uint8_t fill = 0xAB, const std::vector<Memory>* residuals = nullptr,
                 bool guarded = false) const {
    Memory out(own.batch * of_sum(own.layout, ranks).chunk_bytes, fill, guarded);
    run(pool, nullptr, out.data(), residuals);
    return out;
  }
  std::vector<Memory> leaves(const cpu::Pool& pool, uint8_t fill = 0xAB, bool guarded = false) const {
    std::vector<Memory> out;
    for (const Leaf& leaf : own.layout.leaves) out.emplace_back(own.batch * leaf.size * 4, fill, guarded);
    run(pool, pointers<float>(out).data(), nullptr, nullptr);
    return out;
  }

 private:
  void run(const cpu::Pool& pool, float* const* leaves, uint8_t* payload, const std::vector<Memory>* residuals) const {
    const auto raw = pointers<const void>(own.leaves);
    const auto lost = residuals ? pointers<float>(*residuals) : std::vector<float*>();
    const bool replaces = !where.empty() && where[1] >= 0;
    cpu::reduce({own.layout, own.batch, ranks, payloads.data(), where.data(), replaces ? raw.data() : nullptr, divisor,
                 leaves, payload, residuals ? lost.data() : nullptr, own.ids.data(), own.keys.data()},
                pool);
  }
};

// For each row, the chunk that is summed, and the rank whose leaves replace its payload: any rank, or -1 for none.
inline std::vector<int32_t> any_chunks(const Message& m, int64_t ranks, bool own, Random& r) {
  std::vector<int32_t> where;
  for (int64_t row = 0; row < m.batch; ++row) {
    where.push_back(static_cast<int32_t>(r.below(m.layout.chunks())));
    where.push_back(own ? static_cast<int32_t>(r.below(ranks)) : -1);
  }
  return where;
}

// The payloads that the owner of a chunk receives, from each rank's message: [batch, ranks, chunk_bytes].
inline Memory gather(const Layout& l, int64_t batch, const std::vector<Memory>& messages,
                     const std::vector<int32_t>& where, bool guarded = false) {
  const auto ranks = static_cast<int64_t>(messages.size());
  Memory out(batch * ranks * l.chunk_bytes, 0xAB, guarded);
  for (int64_t row = 0; row < batch; ++row) {
    for (int64_t r = 0; r < ranks; ++r) {
      std::memcpy(out.data() + (row * ranks + r) * l.chunk_bytes,
                  messages[static_cast<size_t>(r)].data() +
                      (row * l.chunks() + where[static_cast<size_t>(2 * row)]) * l.chunk_bytes,
                  static_cast<size_t>(l.chunk_bytes));
    }
  }
  return out;
}

inline std::vector<Memory> copies(const std::vector<Memory>& memory) {
  std::vector<Memory> all;
  for (const Memory& m : memory) all.push_back(m.copy());
  return all;
}

// Whether bytes are equal. All NaNs count as equal, because the processor chooses their bits.
inline bool same_numbers(DType dtype, const Memory& a, const Memory& b) {
  if (a == b) return true;
  if (dtype != DType::kF32 || a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size() / 4; ++i) {
    const float x = a.floats()[i], y = b.floats()[i];
    if (bits_of(x) != bits_of(y) && !(std::isnan(x) && std::isnan(y))) return false;
  }
  return true;
}

// The same for encoded sums of the chunks in `where`.
inline bool same_sums(const Layout& l, const std::vector<int32_t>& where, const Memory& a, const Memory& b) {
  if (is_raw(l.codec.kind) || is_sparse(l.codec.kind) || l.codec.skip_incomplete)
    return same_numbers(DType::kF32, a, b);
  bool same = a == b || is_lossless(l.codec.kind);
  for (size_t row = 0; is_lossless(l.codec.kind) && row < where.size() / 2; ++row) {
    std::vector<Memory> of_a, of_b;
    for (const Leaf& leaf : l.leaves)
      of_a.emplace_back(leaf.size * size_of(leaf.dtype)), of_b.emplace_back(leaf.size * size_of(leaf.dtype));
    const auto at = static_cast<int64_t>(row) * l.chunk_bytes;
    cpu::decode({l, 1, a.data() + at, pointers<void>(of_a).data()}, one_thread(), where[2 * row]);
    cpu::decode({l, 1, b.data() + at, pointers<void>(of_b).data()}, one_thread(), where[2 * row]);
    for (size_t i = 0; i < l.leaves.size(); ++i) same &= same_numbers(l.leaves[i].dtype, of_a[i], of_b[i]);
  }
  return same;
}

// Every codec that has buckets, with every setting and this bucket size.
inline std::vector<Codec> codecs(int64_t bucket) {
  std::vector<Codec> all;
  for (int32_t k = 0; k < 16; ++k) {
    const auto kind = static_cast<Kind>(k);
    const Traits t = traits_of(kind);
    if (!has_buckets(kind)) continue;
    const bool can_rotate = bucket == padded(bucket) && bucket <= kMostRotated;
    for (int32_t bits = t.least_bits; bits <= t.most_bits; ++bits) {
      for (int flags = 0; flags < 16; ++flags) {
        const bool stochastic = flags & 1, skips = flags & 2, compatible = flags & 4, rotate = flags & 8;
        if ((!stochastic || t.stochastic) && (!skips || t.skips) && (!compatible || t.compatible) &&
            (!rotate || (t.rotates && can_rotate && (t.scales ? bits == kNvfp4 && stochastic : bits % 4 == 0))) &&
            (!t.table || (stochastic && can_rotate)))
          all.push_back({kind, bits, bucket, stochastic, skips, compatible, rotate});
      }
    }
  }
  return all;
}
inline std::vector<Codec> rotated_codecs(int64_t bucket) {
  std::vector<Codec> all;
  for (const Codec& codec : codecs(bucket)) {
    if (is_rotated(codec)) all.push_back(codec);
  }
  return all;
}
inline std::vector<Codec> codecs_without_buckets() {
  std::vector<Codec> all{Codec{Kind::kRaw}};
  for (const DType to : {DType::kBF16, DType::kF16}) {
    for (const bool stochastic : {false, true}) all.push_back({Kind::kCast, static_cast<int32_t>(to), 0, stochastic});
  }
  all.push_back({Kind::kLossless});
  for (const bool compatible : {false, true}) all.push_back({Kind::kByteGrad, 0, 0, false, false, compatible});
  for (const bool stochastic : {false, true}) all.push_back({Kind::kMicro, kNvfp4, 0, stochastic});
  return all;
}

inline Codec topk(double ratio, Select select, const Codec& values, bool top = false) {
  Codec c{Kind::kTopK, 0, 0, values.stochastic || select != Select::kExact};
  c.sparse.ratio = ratio;
  c.sparse.lists = 1;
  c.sparse.top = top;
  c.sparse.select = select;
  c.sparse.share = 0.01;
  c.sparse.lower = 0.8;
  c.sparse.refinements = 10;
  c.sparse.values = values;
  return c;
}
// Every selection; values with and without buckets, with noise and with a raw tail. `exact`: only values whose bytes
// decode to the same numbers whether or not products are fused with sums.
inline std::vector<Codec> sparse_codecs(bool exact = false) {
  const Codec raw{Kind::kRaw};
  std::vector<Codec> all{topk(0.0, Select::kExact, raw), topk(0.01, Select::kExact, raw),
                         topk(1.0, Select::kExact, raw), topk(0.3, Select::kExponential, {Kind::kCast, 2, 0, true}),
                         topk(0.1, Select::kExact, {Kind::kSign, 0, 33}, true)};
  if (exact) return all;
  all.push_back(topk(0.05, Select::kQuantile, {Kind::kMaxMin, 3, 20, true, true}, true));
  all.push_back(topk(0.6, Select::kQuantile, {Kind::kByteGrad}));
  return all;
}

}  // namespace jaxcgx::test
