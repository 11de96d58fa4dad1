// The CUDA kernels, run on the CPU by cuda_emulator/, give the bytes of the CPU kernels. They write all of these bytes
// and nothing else.
#include "cuda_message.h"

namespace jaxcgx::test {
namespace {

// One in `step` codecs is tested. It is an argument of the program, because all codecs take long if PTX is run.
int64_t step = 1;

// `make test` takes every second codec of a bucket size, the others of the next one.
void every_codec() {
  Random r{1};
  int64_t turn = 0, pass = 0;
  const auto run = [&](const Codec& codec, int64_t largest) {
    if (++turn % step != 0) return;
    Case k{codec, {}};
    const int64_t bucket = std::max<int64_t>(codec.bucket_size, 1);
    for (int64_t i = r.below(3); i >= 0; --i) {
      // Whole buckets, whole buckets and a short one, and less than one bucket.
      const int64_t size = r.below(3) == 0   ? r.below(2 * bucket)
                           : r.below(3) == 0 ? bucket * (1 + r.below(bucket > 2048 ? 2 : 4))
                                             : r.below(largest);
      k.shapes.push_back({size, r.pick(kDTypes)});
    }
    k.chunks = turn % 2 == 0 ? 1 : r.pick({1, 2, 3, 7});
    k.batch = 1 + (r.below(4) == 0);
    k.ranks = r.below(8) == 0 ? 9 : 1 + r.below(4);
    k.feedback = turn % 3 == 0;
    k.shift = turn % 4 == 3 ? 1 + r.below(7) : 0;
    compare(k, r);
  };
  const auto each = [&](const std::vector<int64_t>& buckets, int64_t largest) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      turn = ++pass;  // each codec with and without feedback, and in one chunk
      const std::vector<Codec> all = codecs(buckets[i]);
      for (size_t j = 0; j < all.size(); ++j) {
        if (everything() || (i + j) % 2 == 0) run(all[j], largest);
      }
    }
  };
  each({32, 64, 128, 256, 512, 1024, 2048, 4096}, 1500);
  each({1, 7, 16, 100, 121, 300, 1000}, 1500);
  for (int i = 0; i < 6; ++i) {
    for (const Codec& codec : codecs_without_buckets()) run(codec, 5000);
  }
}

// Buckets of a whole block, and larger ones that several blocks share. 33000 is more than a group of a sum's blocks.
void large_buckets() {
  Random r{2};
  size_t turn = 0;
  for (const int64_t bucket : {8192, 9000, 33000}) {
    for (const Codec& codec : codecs(bucket)) {
      const bool rare = codec.kind == Kind::kSign || codec.kind == Kind::kByteGrad || codec.kind == Kind::kFloat8;
      if (!rare && ++turn % 16 != 0) continue;  // to save time
      Case k{codec, {{bucket + 1 + r.below(bucket / 4), r.pick(kDTypes)}, {17, DType::kF32}}};
      k.chunks = 1 + r.below(2);
      k.feedback = r.below(2) == 0;
      k.shift = r.below(2);
      compare(k, r);
    }
  }
  for (const Codec& codec : {Codec{Kind::kMicro, kNvfp4, 0}, Codec{Kind::kMicro, kMxfp8, 9000}, Codec{Kind::kByteGrad},
                             Codec{Kind::kByteGrad, 0, 0, false, false, true}})
    compare({codec, {{20000, DType::kF32}, {9000, DType::kBF16}}, 2, 2, 3, true, 0}, r);
}

// Leaves that end near a block, a tile (4096) or a part (8192) of a bucket: one bucket of a leaf, buckets of a power of
// two, and buckets of other multiples of a block.
void blocks_of_large_buckets() {
  Random r{5};
  int64_t turn = 0;
  const auto run = [&](const Codec& codec) {
    if (++turn % step != 0) return;
    const int64_t bucket = codec.bucket_size;
    Case k{codec, {}};
    for (const DType dtype : kDTypes) {
      const int64_t near = r.pick<int64_t>({8192, 8320, 12288, 16384, bucket, bucket + 4096, 2 * bucket});
      k.shapes.push_back({std::max(r.below(200), near + r.pick({-1, 0, 0, 1, 3, 127, 128, 129})), dtype});
    }
    std::swap(k.shapes[0], k.shapes[static_cast<size_t>(r.below(3))]);
    k.chunks = 1 + r.below(3);
    k.batch = 1 + (r.below(4) == 0) * 2;
    k.ranks = 1 + r.below(3);
    k.feedback = turn % 2 == 0;
    k.shift = turn % 3 == 2 ? 1 + r.below(7) : 0;
    k.alike = r.below(4) != 0;
    compare(k, r);
  };
  for (int i = 0; i < 24; ++i) run({Kind::kByteGrad, 0, 0, false, false, i % 4 == 3});
  for (const int64_t bucket : {16384, 9088}) {
    turn = bucket == 9088;  // each codec with and without feedback
    for (const Codec& codec : codecs(bucket)) run(codec);
  }
  if (step > 1) return;
  for (const Codec& values : {Codec{Kind::kByteGrad}, Codec{Kind::kMaxMin, 4, 16384, true}}) {
    const Codec codec = topk(0.6, Select::kExact, values);
    compare({codec, {{60001, DType::kF32}, {15000, DType::kBF16}}, 2, 1, 2, true, 0, true}, r);
  }
}

// Leaves that end near a block of Lossless or of codec/pack.h. Numbers of a similar size have few further digits, and
// others so many that exponents are stored directly.
void blocks_of_lossless() {
  Random r{6};
  for (const DType dtype : kDTypes) {
    for (const int64_t near : {0, 128, 384, 512, 1024, 2048}) {
      for (const bool alike : {false, true}) {
        Case k{{Kind::kLossless}, {{near + r.below(10), dtype}}};
        if (near > 0) k.shapes.push_back({near - r.below(10), dtype});
        k.shift = r.below(2);
        k.alike = alike;
        compare(k, r);
      }
    }
  }
}

// More blocks than one step of the sum of their lengths takes.
void many_blocks_of_lossless() {
  Random r{7};
  Case k{{Kind::kLossless}, {}};
  for (int i = 0; i < 4200; ++i) k.shapes.push_back({1 + r.below(3), r.pick(kDTypes)});
  compare(k, r);
}

// More pieces than a table holds, with many rows and chunks.
void many_leaves() {
  Random r{3};
  for (const Codec& codec : {Codec{Kind::kMaxMin, 4, 64, false, true}, Codec{Kind::kMaxMin, 4, 128, true},
                             Codec{Kind::kCast, 1, 0, true}, Codec{Kind::kLossless}}) {
    Case k{codec, {}, 5, 3};
    for (int i = 0; i < 90; ++i) k.shapes.push_back({r.below(200), r.pick(kDTypes)});
    compare(k, r);
  }
}

// Empty calls also launch a kernel, because a graph must not be empty.
void nothing() {
  const void* const in[2] = {};
  void* const out[2] = {};
  const int64_t ids[2] = {};
  const auto run_alone = [](auto operation, const auto& args) {
    const uint64_t before = cuda::launched;
    run(operation, args);
    CHECK(cuda::launched == before + 2, describe(args.layout));  // it was also loaded
  };
  const uint32_t key[kKeyWords] = {};
  const int32_t where[2] = {2, 1};
  for (const Codec& codec : {Codec{Kind::kMaxMin, 4, 512}, topk(0.5, Select::kExact, {Kind::kRaw})}) {
    for (const auto& shapes : {std::vector<Leaf>{}, std::vector<Leaf>{{0, DType::kF32}, {0, DType::kBF16}}}) {
      const Layout l(codec, shapes, 3);
      for (const int64_t batch : {0, 1}) {
        CHECK(cuda::workspace_bytes(l, batch, 2, true) == 0, describe(l));
        run_alone(cuda::encode, Encode{l, batch, in, ids, key});
        run_alone(cuda::decode, Decode{l, batch, nullptr, out});
        run_alone(cuda::reduce, Reduce{l, batch, 2, nullptr, where, in, 1.0f, nullptr, nullptr, nullptr, ids, key});
        if (is_sparse(codec.kind)) run_alone(cuda::clear, Clear{l, batch, nullptr, out});
      }
    }
  }
  const Layout of_no_element(topk(0.0, Select::kExact, {Kind::kRaw}), {{1000, DType::kF32}}, 2);
  const Memory workspace(cuda::workspace_bytes(of_no_element, 1, 1, false));
  run_alone(cuda::clear, Clear{of_no_element, 1, nullptr, out, workspace.data()});
}

// `where` is device memory that nobody has checked, and may name a chunk or an own rank that is out of range. Then the
// whole result is NaN, and residuals stay as they were.
void nowhere() {
  Random r{4};
  std::vector<Codec> all = codecs_without_buckets();
  for (const int64_t bucket : {64, 100, 9000}) {
    const std::vector<Codec> some = codecs(bucket);
    // Emulating blocks that wait for each other is slow.
    for (size_t i = 0; i < some.size(); i += bucket == 9000 ? 9 : 3) all.push_back(some[i]);
  }
  size_t turn = 0;
  for (const Codec& codec : all) {
    const int64_t chunks = 1 + turn % 2;
    const Message m(codec, {{std::max<int64_t>(codec.bucket_size, 4096) + 1000, DType::kF32}, {77, DType::kBF16}},
                    chunks, 2, r);
    const Layout& l = m.layout;
    const Memory payloads(4 * l.chunk_bytes, 0), workspace(cuda::workspace_bytes(l, 2, 2, true));
    const int32_t bad = r.pick({-1, 2, 3, INT32_MAX, INT32_MIN});
    const bool rank = turn++ % 4 < 2;
    const auto chunk = static_cast<int32_t>(rank ? chunks - 1 : 0);              // whose layout the result has
    const std::vector<int32_t> where{rank ? chunk : bad, rank ? bad : 0, 0, 1};  // the second row is right
    const auto own = pointers<const void>(m.leaves);
    const auto reduce = [&](const std::vector<int32_t>& at, float* const* to, uint8_t* payload,
                            float* const* residuals) {
      run(cuda::reduce, {l, 2, 2, payloads.data(), at.data(), own.data(), 1.0f, to, payload, residuals, m.ids.data(),
                         m.keys.data(), workspace.data()});
    };
    std::vector<Memory> old;
    for (const Leaf& leaf : l.leaves)
      old.push_back(as_leaf(DType::kF32, std::vector<float>(static_cast<size_t>(2 * leaf.size), 0.25f)));
    const std::vector<Memory> lost = copies(old), lost_right = copies(old);
    const Memory a(2 * l.chunk_bytes, 0x54), b(2 * l.chunk_bytes, 0xAB), right(2 * l.chunk_bytes);
    reduce(where, nullptr, a.data(), nullptr);
    reduce(where, nullptr, b.data(), nullptr);
    reduce({0, 1, 0, 1}, nullptr, right.data(), nullptr);
    CHECK(a == b, describe(l));
    reduce({0, 1, 0, 1}, nullptr, b.data(), pointers<float>(lost_right).data());
    reduce(where, nullptr, b.data(), pointers<float>(lost).data());
    CHECK(std::memcmp(a.data(), b.data(), static_cast<size_t>(l.chunk_bytes)) == 0, describe(l));
    for (size_t i = 0; i < lost.size(); ++i) {
      const auto half = lost[i].size() / 2;
      CHECK(std::memcmp(lost[i].data(), old[i].data(), half) == 0, describe(l));
      CHECK(std::memcmp(lost[i].data() + half, lost_right[i].data() + half, half) == 0, describe(l));
    }
    const auto row = static_cast<size_t>(l.chunk_bytes);
    CHECK(std::memcmp(a.data() + row, right.data() + row, row) == 0, describe(l));
    Memory message(chunks * l.chunk_bytes, 0);
    std::memcpy(message.data() + chunk * l.chunk_bytes, a.data(), row);
    const std::vector<Memory> decoded = decode(l, 1, message, one_thread());
    for (const Piece& p : l.pieces_of(chunk)) {
      for (int64_t i = p.start; i < p.start + p.coded + p.raw; ++i) {
        const uint8_t* leaf = decoded[static_cast<size_t>(p.leaf)].data();
        uint16_t half[2] = {};
        if (p.leaf == 0)
          std::memcpy(half, leaf + 4 * i, 4);
        else
          std::memcpy(half + 1, leaf + 2 * i, 2);
        CHECK((half[1] & 0x7fff) >= 0x7f80 && (half[1] & 0x7f) != 0, describe(l));
      }
    }
    if (chunks > 1) continue;
    std::vector<Memory> sums;
    for (const Leaf& leaf : l.leaves) sums.emplace_back(2 * leaf.size * 4, 0);
    reduce(where, pointers<float>(sums).data(), nullptr, nullptr);
    for (size_t i = 0; i < sums.size(); ++i) {
      for (int64_t j = 0; j < l.leaves[i].size; ++j) CHECK(std::isnan(sums[i].floats()[j]), describe(l));
    }
  }
}

// Messages that overflow a table are refused before any kernel runs.
void too_large() {
  const void* const in[1] = {};
  const int64_t ids[1] = {};
  const Codec maxmin{Kind::kMaxMin, 4, 512}, tiny{Kind::kMaxMin, 4, 32}, raw{Kind::kRaw}, lossless{Kind::kLossless};
  const auto refused = [&](const Codec& codec, int64_t size, int64_t chunks, int64_t batch) {
    const Layout l(codec, {{size, DType::kF32}}, chunks);
    Reduce r{l, batch, 1};
    r.leaf_ids = ids;
    const auto is_refused = [](const cuda::Status& s) { return s.error == cudaErrorInvalidConfiguration; };
    return is_refused(cuda::encode({l, batch, in, ids}, nullptr)) && is_refused(cuda::decode({l, batch}, nullptr)) &&
           is_refused(cuda::reduce(r, nullptr)) &&
           (!is_sparse(codec.kind) || is_refused(cuda::clear({l, batch}, nullptr)));
  };
  CHECK(refused(maxmin, 1, 1, (int64_t{1} << 30) + 1), "slots");
  CHECK(refused(maxmin, 1, 1 << 20, (1 << 10) + 1), "slots of many chunks");
  CHECK(refused(tiny, int64_t{1} << 36, 1, 1), "metadata");
  CHECK(refused(raw, int64_t{1} << 37, 1, 1), "tiles");
  CHECK(refused(lossless, int64_t{1} << 33, 1, 1), "overflow");
  CHECK(refused(topk(0.1, Select::kExact, raw), 1, 1, (int64_t{1} << 30) + 1), "rows of TopK");
  CHECK(refused(topk(0.9, Select::kExact, raw), kMostIndices, 1, 2), "workspace of TopK");
}

}  // namespace
}  // namespace jaxcgx::test

int main(int argc, char** argv) {
  using namespace jaxcgx::test;
  if (argc > 1) step = std::atoi(argv[1]);
  nothing();
  too_large();
  many_leaves();
  blocks_of_lossless();
  many_blocks_of_lossless();
  every_codec();
  blocks_of_large_buckets();
  if (step > 1) return finish();
  nowhere();
  large_buckets();
  return finish();
}
