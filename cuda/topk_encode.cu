// TopK's encoding: writes the selected elements (topk_threshold.cu, topk_select.cu) as a list of indices, and a message
// of values in another codec.
#include "cuda/launchers.cuh"
#include "cuda/topk_selection.cuh"

namespace jaxcgx::cuda {
namespace {

// Sets two stretches of memory to 0.
__global__ void __launch_bounds__(kSelectThreads) clear_kernel(uint4* a, int64_t a_count, uint4* b, int64_t b_count) {
  const int64_t first = int64_t{blockIdx.x} * kSelectThreads + threadIdx.x,
                stride = int64_t{gridDim.x} * kSelectThreads;
  for (int64_t i = first; i < a_count; i += stride) a[i] = {0, 0, 0, 0};
  for (int64_t i = first; i < b_count; i += stride) b[i] = {0, 0, 0, 0};
}

// Writes the elements that are not sent to the residuals. The old residuals of the others are still needed.
__global__ void __launch_bounds__(kSelectThreads, 2) unsent_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t begin = p.tile * kSelectTile, left = s.n - begin;
  if (left <= 0) return;
  const auto end = static_cast<uint32_t>(left < kSelectTile ? s.n : begin + kSelectTile);
  const uint64_t cut = s.state->cut;
  const auto lost_of = [&](uint32_t i, float undivided, float old) {
    const bool unsent = s.key_of(magnitude_of(s.divided(undivided)), i) < cut;
    return unsent && is_finite(undivided) ? undivided : old;
  };
  const auto dtype = static_cast<DType>(s.e.dtype);
  auto i = static_cast<uint32_t>(begin);
  with_quads(s, [&](auto row) {
    if (!aligned(s.row.lost, 16)) return;
    using Row = decltype(row);
    constexpr uint32_t kAhead = 4;
    const uint32_t last = end / 4;
    auto* const lost = reinterpret_cast<float4*>(s.row.lost);
    for (uint32_t first = i / 4 + threadIdx.x; first < last; first += kAhead * kSelectThreads) {
      Row rows[kAhead];
      float4 old[kAhead];
      const auto at = [&](uint32_t a) { return first + a * kSelectThreads; };
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) {
        if (at(a) >= last) continue;
        rows[a] = __ldcs(static_cast<const Row*>(s.e.leaf) + at(a));
        old[a] = __ldcs(reinterpret_cast<const float4*>(s.row.old) + at(a));
      }
#pragma unroll
      for (uint32_t a = 0; a < kAhead; ++a) {
        if (at(a) >= last) continue;
        const float4 x = four(dtype, rows[a]), y = old[a];
        const uint32_t j = 4 * at(a);
        __stcs(lost + at(a), float4{lost_of(j, x.x + y.x, y.x), lost_of(j + 1, x.y + y.y, y.y),
                                    lost_of(j + 2, x.z + y.z, y.z), lost_of(j + 3, x.w + y.w, y.w)});
      }
    }
    i = 4 * last;
  });
  for (i += threadIdx.x; i < end; i += kSelectThreads) {
    const float old = s.row.old[i];
    s.row.lost[i] = lost_of(i, load_element(s.e.leaf, dtype, i) + old, old);
  }
}

// Writes the encoding errors of the sent elements to the residuals.
__global__ void __launch_bounds__(kSelectThreads, 2) lost_kernel(const __grid_constant__ Pieces t) {
  const Place p = place_of(t);
  if (p.index < 0) return;
  const Selection s(t, p);
  const int64_t j = int64_t{p.tile} * kSelectThreads + threadIdx.x;
  if (j >= s.k || j >= s.taken()) return;
  const uint32_t i = s.memory[s.words.indices + j];
  const float lost = s.undivided(i) - s.m.divisor * float_of(s.memory[s.words.decoded + j]);
  s.row.lost[i] = new_residual(lost, s.row.old + i);
}

}  // namespace

TopkWork::TopkWork(const Layout& l, int64_t batch, int64_t payloads, bool encodes)
    : to(payloads > 0 ? of_sum(l, payloads) : l),
      states(encodes ? times(batch, static_cast<int64_t>(to.pieces.size()) * kStateWords) : 0),
      lists(l, batch * payloads, encodes, states,
            [&](const Piece& p) { return ListWords(IndexList(p.coded, capacity(l.codec.sparse, p.coded))).all; }),
      sums(l, encodes && payloads > 0 ? batch : 0, true, lists.end, [](const Piece& p) { return p.coded; }),
      selection(to, encodes ? batch : 0, payloads > 0, sums.end,
                [&](const Piece& p) {
                  const Sparse& sparse = to.codec.sparse;
                  return SelectionWords(sparse, static_cast<uint32_t>(p.coded),
                                        static_cast<uint32_t>(capacity(sparse, p.coded)))
                      .all;
                }),
      end(selection.end) {
  if (!encodes) return;
  for (const Piece& p : to.pieces) {
    for (const Piece& v : values_layout(to.codec, p.coded).pieces)
      end += times(batch, workspace_floats(values_of(to.codec), v));
  }
}

Status encode_topk(const TopkWork& work, const Call& given) {
  const Layout& l = work.to;
  const Sparse& sparse = l.codec.sparse;
  const int64_t batch = given.batch;
  if (work.end > UINT32_MAX) return too_large();
  if (batch == 0 || l.pieces.empty()) return {};
  Call call{l, batch, given.leaves, given.message, given.stream};
  Message& m = call.message;
  m.codec = l.codec;
  m.chunk_bytes = l.chunk_bytes;
  m.payloads = nullptr;
  m.own = false;
  call.early = begins_early();
  const int64_t bytes = batch * (m.where != nullptr ? 1 : l.chunks()) * l.chunk_bytes;
  constexpr int64_t kMostBlocks = 1024;
  const int64_t blocks = std::min(kMostBlocks, div_up(std::max(bytes / 16, work.states / 4), kSelectThreads));
  Status status =
      launch(config_of(blocks, kSelectThreads, call.stream), clear_kernel, "clear kernel",
             reinterpret_cast<uint4*>(m.payload), bytes / 16, reinterpret_cast<uint4*>(m.workspace), work.states / 4);
  if (status.call != nullptr) return status;
  SelectionLaunches launches(work, call);
  if (sparse.select == Select::kExponential) launch_threshold(launches);
  launch_selection(launches);
  const bool feedback = call.leaves.residuals != nullptr;
  if (feedback)
    launches.launch(unsent_kernel, "unsent kernel",
                    [](int64_t n, int64_t, SelectionRow&) { return div_up(n, kSelectTile); });
  status = launches.status;
  const bool raw = is_raw(values_of(l.codec).kind);  // raw: written
  if (status.call != nullptr || (raw && !feedback)) return status;

  const auto part = [&](int64_t SelectionWords::* of) {
    return [&sparse, of](int64_t n, int64_t k) {
      return SelectionWords(sparse, static_cast<uint32_t>(n), static_cast<uint32_t>(k)).*of;
    };
  };
  const Values values(l, work.selection, m.workspace, call.leaves.ids, part(&SelectionWords::values));
  if (status = check_size(values.layout, batch); status.call != nullptr) return status;
  const Leaves encoded{values.leaves.data(), nullptr, nullptr, values.ids.data(), values.starts.data()};
  Call encode_values{values.layout, batch, encoded, message_of(values.layout), call.stream, false, call.early};
  Message& of_values = encode_values.message;
  of_values.payload = m.payload;
  of_values.where = m.where;
  of_values.keys = m.keys;
  of_values.workspace = m.workspace + work.selection.end;
  if (!raw) status = encode_all(encode_values);
  if (!feedback || status.call != nullptr) return status;
  const Values decoded(l, work.selection, m.workspace, nullptr, part(&SelectionWords::decoded));
  of_values.payloads = m.payload;
  status = decode_all({decoded.layout, batch, {decoded.leaves.data()}, of_values, call.stream, true, call.early});
  if (status.call != nullptr) return status;
  launches.launch(lost_kernel, "lost kernel",
                  [](int64_t, int64_t k, SelectionRow&) { return div_up(k, kSelectThreads); });
  return launches.status;
}

}  // namespace jaxcgx::cuda
