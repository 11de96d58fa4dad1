// TopK's selection finds the largest elements among candidates. These tests look into its workspace, so they run only
// with the kernels that are compiled as C++.
#include "cuda/topk_selection.cuh"
#include "cuda_message.h"

namespace jaxcgx::test {
namespace {

// Usual numbers are read twice: enough of them reach the first threshold, and there is room for all candidates. The
// bytes would be the same without that, so only the time would show it.
void usual() {
  Random r{6};
  constexpr uint32_t n = 70000;
  for (const auto& [select, zeros] :
       {std::pair(Select::kExact, false), {Select::kExact, true}, {Select::kQuantile, false}}) {
    Codec c = topk(0.01, select, {Kind::kRaw});
    c.sparse.share = 0.2, c.sparse.lower = 0.7;
    Message m(c, {{n, DType::kF32}}, 1, 1, r);
    for (uint32_t i = 0; i < n; ++i) {
      float& x = m.leaves[0].floats()[i] = 0.0f;
      for (int j = 0; j < 6 && (!zeros || i % 89 == 0); ++j) x += r.uniform() - r.uniform();
    }
    const Layout& l = m.layout;
    const Memory work = compare_encoded(m);
    const auto k = static_cast<uint32_t>(capacity(c.sparse, n));
    const cuda::SelectionWords words(c.sparse, n, k);
    const auto& state = *reinterpret_cast<const cuda::State*>(work.data());
    const auto* const found =
        reinterpret_cast<const uint32_t*>(work.data()) + cuda::TopkWork(l, 1, 0, true).selection.begin[0] + words.found;
    CHECK(state.reread == 0 && state.reached > 0.7 * k && state.reached < 3 * k, std::to_string(state.reached));
    for (int64_t i = 0; i < div_up(n, cuda::kSegment); ++i) CHECK(found[i] <= words.room, std::to_string(found[i]));
  }
}

// A piece that is ready before another one is not written again.
void once() {
  Random r{7};
  Codec c = topk(0.01, Select::kQuantile, {Kind::kRaw});
  c.sparse.share = 0.2, c.sparse.lower = 0.1;
  const Message m(c, {{50000, DType::kF32}, {3000, DType::kF32}}, 1, 1, r);  // the first one's sample takes 3 turns
  const Layout& l = m.layout;
  const Memory work = compare_encoded(m);
  const auto* const small = reinterpret_cast<const cuda::State*>(work.data() + 4 * cuda::kStateWords);
  for (const cuda::Progress& p : small->progress) CHECK(p.done == cuda::Done::kPicked, describe(l));
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  jaxcgx::test::usual();
  jaxcgx::test::once();
  return jaxcgx::test::finish();
}
