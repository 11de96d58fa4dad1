// Every instruction set and any number of threads give the same bytes, write all of them and nothing else.
#include "check.h"
#include "message.h"

namespace jaxcgx::test {
namespace {

// Runs one message through encode, decode and reduce: first the best instruction set on one thread, then each one on
// several threads that flush denormals, into memory with different garbage. So a byte that is not written differs.
void compare(const Codec& codec, const std::vector<Leaf>& shapes, int64_t chunks, int64_t batch, bool feedback,
             Random& r) {
  Message m(codec, shapes, chunks, batch, r);
  const Layout& l = m.layout;
  const int64_t ranks = r.below(100) == 0 ? cpu::Terms::kMost + 2 : 1 + r.below(3);
  std::vector<Message> others;
  for (int64_t i = 1; i < ranks; ++i) others.emplace_back(codec, shapes, chunks, batch, r);
  const bool own = r.below(2) == 1;
  const std::vector<int32_t> where = any_chunks(m, ranks, own, r);
  const float divisor = r.pick({1.0f, 3.0f});
  if (feedback) {
    for (const Leaf& leaf : shapes) m.residuals.push_back(as_leaf(DType::kF32, numbers(batch * leaf.size, r)));
  }

  struct Results {
    Memory payload;
    std::vector<Memory> residuals, leaves;
    Memory sum;
    std::vector<Memory> sum_residuals;
    std::vector<Memory> sum_leaves;
  };
  const auto run = [&](const cpu::Pool& pool, uint8_t fill) {
    std::vector<Memory> lost;
    for (const Memory& old : m.residuals) lost.emplace_back(static_cast<int64_t>(old.size()), fill);
    std::vector<Memory> messages;
    messages.push_back(encode(m, pool, fill, feedback ? &lost : nullptr));
    for (const Message& o : others) messages.push_back(encode(o, pool, fill));
    auto leaves = decode(l, batch, messages[0], pool, fill);
    const Memory payloads = gather(l, batch, messages, where);
    const Sum sum{m, ranks, payloads, where, divisor};
    auto sum_lost = copies(m.residuals);
    auto sum_payload = sum.payload(pool, fill, feedback ? &sum_lost : nullptr);
    return Results{std::move(messages[0]), std::move(lost),
                   std::move(leaves),      std::move(sum_payload),
                   std::move(sum_lost),    chunks == 1 ? sum.leaves(pool, fill) : std::vector<Memory>()};
  };

  for (const char* isa : kIsas)
    cpu::select_kernels(isa);  // the last one that this processor has, because instrumented portable code is slow
  const Results expected = run(one_thread(), 0xAB);
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    const std::string context = std::string(isa) + " " + describe(l);
    flush_denormals(true);
    const Results got = [&] {
      Threads threads(4);
      return run(threads.pool, 0x54);
    }();
    flush_denormals(false);
    CHECK(got.payload == expected.payload, context);
    // The processor chooses the NaN of a sum of two NaNs, and Raw values keep it.
    CHECK(is_sparse(codec.kind) ? same_numbers(DType::kF32, got.sum, expected.sum) : got.sum == expected.sum, context);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const std::string leaf = context + ", leaf " + std::to_string(i);
      CHECK(same_numbers(shapes[i].dtype, got.leaves[i], expected.leaves[i]), leaf);
      if (feedback) {
        CHECK(same_numbers(DType::kF32, got.residuals[i], expected.residuals[i]), leaf);
        CHECK(same_numbers(DType::kF32, got.sum_residuals[i], expected.sum_residuals[i]), leaf);
      }
      if (chunks == 1) CHECK(same_numbers(DType::kF32, got.sum_leaves[i], expected.sum_leaves[i]), leaf);
    }
  }
}

constexpr int64_t kSizes[] = {0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049};
constexpr int64_t kBuckets[] = {1, 2, 3, 7, 8, 33, 64, 100, 128, 512, 1000, 2048, 5000, 40000};
constexpr int64_t kChunks[] = {1, 2, 3, 7};

// All sizes as the leaves of one message. The dtypes rotate with the codecs and bucket sizes. `make test` takes every
// third codec of a bucket size, others of the next one.
void small_sizes() {
  Random r{1};
  size_t turn = 0;
  const auto all_sizes = [&](const Codec& codec) {
    std::vector<Leaf> shapes;
    for (const int64_t size : kSizes) shapes.push_back({size, kDTypes[(shapes.size() + turn) % 3]});
    compare(codec, shapes, kChunks[turn % 4], turn % 11 == 0 ? 3 : 1, turn % 7 < 2, r);
    ++turn;
  };
  for (size_t i = 0; i < std::size(kBuckets); ++i) {
    const std::vector<Codec> all = codecs(kBuckets[i]);
    for (size_t j = 0; j < all.size(); ++j) {
      if (everything() || (i + j) % 3 == 0) all_sizes(all[j]);
    }
  }
  for (int i = 0; i < 3; ++i) {
    for (const Codec& codec : codecs_without_buckets()) all_sizes(codec);
    for (const Codec& codec : sparse_codecs()) all_sizes(codec);
  }
}

// Each size alone, with every number of chunks: more chunks than buckets, and buckets that just don't fit a chunk.
// `make test` takes every second of them, others for the next size and codec.
void single_leaves() {
  Random r{2};
  size_t turn = 0;
  for (const int64_t bucket : {3, 128, 1000}) {
    for (const Codec& codec : {Codec{Kind::kMaxMin, 4, bucket}, Codec{Kind::kMaxMin, 3, bucket, true, true},
                               Codec{Kind::kSign, 0, bucket}, Codec{Kind::kByteGrad}, Codec{Kind::kCast, 2, 0, true}}) {
      for (const int64_t size : kSizes) {
        for (const int64_t chunks : kChunks) {
          if (everything() || turn++ % 2 == 0)
            compare(codec, {{size, r.pick(kDTypes)}}, chunks, 1 + 2 * (chunks == 3), chunks == 2, r);
        }
        ++turn;
      }
      ++turn;
    }
  }
}

// Several tasks, spans and parts of buckets. 40000 and whole pieces are buckets larger than a span. `make test` takes
// every third codec of a bucket size, others of the next one.
void large_sizes() {
  Random r{3};
  size_t turn = 0;
  const auto large = [&](const Codec& codec) {
    const DType dtype = kDTypes[turn % 3];
    const int64_t larger = codec.bucket_size == 7 ? 9 : 100003;  // to save time
    compare(codec, {{33000, dtype}, {17, DType::kF32}, {larger, kDTypes[(turn / 3) % 3]}}, kChunks[turn % 4], 1,
            turn % 5 == 0, r);
    ++turn;
  };
  size_t skipped = 0;
  for (const int64_t bucket : {7, 512, 40000}) {
    for (const Codec& codec : codecs(bucket)) {
      if (codec.skip_incomplete == (codec.bits % 2 == 0)) continue;  // half of them, to save time
      if (everything() || ++skipped % 3 == 0) large(codec);
    }
  }
  for (const Codec& codec : codecs_without_buckets()) large(codec);
  for (const Codec& codec : sparse_codecs()) large(codec);
}

// Decoding 8 MiB and more writes around the caches if the memory is aligned for it. The second message is not aligned.
void streamed() {
  Random r{4};
  compare({Kind::kMaxMin, 4, 512}, {{(int64_t{1} << 20) + 129, DType::kF32}}, 1, 2, false, r);
}

// No leaves, no elements, no messages. Empty memory may have no address.
void nothing() {
  for (const char* isa : kIsas) {
    if (!cpu::select_kernels(isa)) continue;
    std::vector<Codec> all = codecs(512);
    all.push_back(sparse_codecs()[1]);
    for (const Codec& codec : all) {
      for (const auto& shapes : {std::vector<Leaf>{}, std::vector<Leaf>{{0, DType::kF32}, {0, DType::kBF16}}}) {
        const Layout l(codec, shapes, 3);
        const void* const in[2] = {};
        void* const out[2] = {};
        const int64_t ids[2] = {};
        const uint32_t key[kKeyWords] = {};
        const int32_t where[2] = {2, 1};
        CHECK(l.chunk_bytes == 0, describe(l));
        for (const int64_t batch : {0, 1}) {
          cpu::encode({l, batch, in, ids, key, nullptr, nullptr, nullptr}, one_thread());
          cpu::decode({l, batch, nullptr, out}, one_thread());
          cpu::reduce({l, batch, 2, nullptr, where, in, 1.0f, nullptr, nullptr, nullptr, ids, key}, one_thread());
        }
      }
    }
    Random r{5};
    const Message none({Kind::kMaxMin, 4, 512}, {{1000, DType::kF32}}, 3, 0, r);
    const Memory payload = encode(none, one_thread());
    CHECK(payload.size() == 0, isa);
    CHECK(decode(none.layout, 0, payload, one_thread())[0].size() == 0, isa);
  }
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  for (const char* isa : kIsas)
    std::printf("%s: %s\n", isa, jaxcgx::cpu::select_kernels(isa) ? "runs" : "not on this processor");
  CHECK(!jaxcgx::cpu::select_kernels("mmx"), "");
  nothing();
  single_leaves();
  small_sizes();
  large_sizes();
  streamed();
  return finish();
}
