// Runs every kernel on a large aligned leaf. The runtime then prints how many instructions its threads ran, and
// scripts/cuda_resources.py divides them by the number of elements.
#include "cuda_message.h"

namespace jaxcgx::test {
namespace {

constexpr int64_t kElements = 4096, kRanks = 4;

// Counts encode with feedback and without, decode and reduce. If `plain`, counts only encode without feedback, and
// decode.
void count(const Codec& codec, bool plain = false) {
  Random r{1};
  Message m(codec, {{kElements, DType::kF32}}, 1, 1, r);
  for (int64_t i = 0; i < kElements; ++i) m.leaves[0].floats()[i] = r.uniform();
  const Layout& l = m.layout;
  const Memory residual(4 * kElements, 0), out(4 * kElements), work(cuda::workspace_bytes(l, 1, 0, true)),
      sum_work(cuda::workspace_bytes(l, 1, kRanks, true));
  const Memory payload(kRanks * l.chunk_bytes, 0), sum(of_sum(l, kRanks).chunk_bytes);
  const void* const leaf = m.leaves[0].data();
  float* const residuals[] = {residual.floats()};
  float* const result[] = {out.floats()};
  void* const decoded = out.data();
  const int32_t where[] = {0, -1};
  for (const bool feedback : {true, false}) {
    if (plain && feedback) continue;
    run(cuda::encode, {l, 1, &leaf, m.ids.data(), m.keys.data(), feedback ? residuals : nullptr,
                       feedback ? residuals : nullptr, payload.data(), work.data()});
  }
  for (int64_t i = 1; i < kRanks; ++i)
    std::memcpy(payload.data() + i * l.chunk_bytes, payload.data(), static_cast<size_t>(l.chunk_bytes));
  run(cuda::decode, {l, 1, payload.data(), &decoded, sum_work.data()});
  if (plain) return;
  const auto reduce = [&](float* const* to, uint8_t* to_payload, float* const* lost) {
    run(cuda::reduce, {l, 1, kRanks, payload.data(), where, nullptr, 4.0f, to, to_payload, lost, m.ids.data(),
                       m.keys.data(), sum_work.data()});
  };
  reduce(result, nullptr, nullptr);
  reduce(nullptr, sum.data(), nullptr);
  reduce(nullptr, sum.data(), residuals);
  if (is_sparse(codec.kind)) run(cuda::clear, {l, 1, payload.data(), &decoded, sum_work.data()});
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx::test;
  for (const int64_t bucket : {512, 1000}) {
    for (const auto& codec : codecs(bucket)) {
      if (!codec.skip_incomplete && !is_rotated(codec)) count(codec);  // the others have the same kernels
    }
  }
  // A reduce runs the kernels of rotated buckets and of Lossless for each payload. Those of rotated buckets have all
  // widths, and their work depends on the bucket.
  count({{jaxcgx::Kind::kEden, 4, 4096, true}}, true);
  count({{jaxcgx::Kind::kMaxMin, 4, 4096, false, false, false, true}}, true);
  for (const auto& codec : codecs_without_buckets()) count(codec, is_lossless(codec.kind));
  for (const auto& codec : sparse_codecs()) count(codec);
  std::printf("%lld elements\n", static_cast<long long>(kElements));
  return finish();
}
