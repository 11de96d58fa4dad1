#include "cpu/patch.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace jaxcgx::cpu {
namespace {

// Returns what these bytes add to a digest. `first` is the number of their first group.
uint64_t digest_part(const void* data, int64_t bytes, int64_t first) {
  const int64_t groups = bytes / kDigestBytes, rest = bytes % kDigestBytes;
  const uint64_t whole = kernels().digest(data, groups, first);
  if (rest == 0) return whole;
  uint8_t padded[kDigestBytes] = {};
  std::memcpy(padded, static_cast<const uint8_t*>(data) + groups * kDigestBytes, static_cast<size_t>(rest));
  return whole + kernels().digest(padded, 1, first + groups);
}

// The memory of a thread for one block.
PatchScratch& scratch() {
  thread_local const std::unique_ptr<PatchScratch> own(new PatchScratch);
  return *own;
}

struct Block {
  size_t leaf;
  int64_t first, words;
};

std::vector<Block> blocks_of(const std::vector<PatchLeaf>& leaves) {
  std::vector<Block> blocks;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    const int64_t words = leaves[leaf].words;
    for (int64_t at = 0; at < words; at += kPatchBlock) blocks.push_back({leaf, at, std::min(kPatchBlock, words - at)});
  }
  return blocks;
}

// Calls change(number of a block, its length, width, old words, new words) for all blocks. Returns the digests. With
// kMade, the new words are there before. Otherwise the digest of old words that are overwritten is 0.
template <bool kMade, class F>
PatchDigests each_block(const std::vector<PatchLeaf>& leaves, const Pool& pool, F change) {
  const std::vector<Block> blocks = blocks_of(leaves);
  std::vector<uint64_t> olds(blocks.size()), nows(blocks.size());
  const auto run = [&](size_t i) {
    const auto [leaf, first, words] = blocks[i];
    const PatchLeaf& x = leaves[leaf];
    const int64_t at = first * x.width, bytes = words * x.width, group = at / kDigestBytes;
    const uint8_t* const old = static_cast<const uint8_t*>(x.old) + at;
    uint8_t* const now = static_cast<uint8_t*>(x.now) + at;
    if (kMade || old != now) olds[i] = digest_part(old, bytes, group);
    if (!kMade) change(i, words, x.width, old, now);
    nows[i] = digest_part(now, bytes, group);
    if (kMade) change(i, words, x.width, old, now);
  };
  constexpr size_t kTogether = 8;  // neighbours, because the kernels prefetch the next block
  parallel_for(pool, div_up(static_cast<int64_t>(blocks.size()), kTogether), [&](int64_t number) {
    const size_t begin = static_cast<size_t>(number) * kTogether;
    for (size_t i = begin; i < std::min(begin + kTogether, blocks.size()); ++i) run(i);
  });
  PatchDigests digests{std::vector<uint64_t>(leaves.size()), std::vector<uint64_t>(leaves.size())};
  for (size_t i = 0; i < blocks.size(); ++i) {
    digests.old[blocks[i].leaf] += olds[i];
    digests.now[blocks[i].leaf] += nows[i];
  }
  return digests;
}

}  // namespace

PatchDigests encode_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, PatchParts* parts) {
  parts->heads.resize(blocks_of(leaves).size());
  parts->blocks.resize(parts->heads.size());
  return each_block<true>(leaves, pool, [&](size_t i, int64_t n, int64_t width, const void* old, const void* now) {
    PatchScratch& s = scratch();
    parts->heads[i] = kernels().encode_patch_block(width, old, now, n, &s);
    parts->blocks[i].assign(s.bytes, s.bytes + s.used);
  });
}

bool apply_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, PatchDigests* digests) {
  std::vector<std::pair<PatchHead, const char*>> places;  // the head of each block, and where the block begins
  for (const PatchLeaf& x : leaves) {
    if (static_cast<int64_t>(x.heads.size()) != patch_blocks(x) * static_cast<int64_t>(sizeof(PatchHead))) return false;
    int64_t end = 0;
    for (int64_t first = 0; first < x.words; first += kPatchBlock) {
      PatchHead h;
      std::memcpy(&h, x.heads.data() + first / kPatchBlock * static_cast<int64_t>(sizeof h), sizeof h);
      const int64_t n = std::min(kPatchBlock, x.words - first), most = h.changed == kPatchWhole ? 0 : h.changed;
      if (most > n || h.small + h.raw > most) return false;
      places.emplace_back(h, x.blocks.data() + end);
      end += patch_bytes(h, n, x.width);
      if (end > static_cast<int64_t>(x.blocks.size())) return false;
    }
    if (end != static_cast<int64_t>(x.blocks.size())) return false;
  }
  std::atomic<bool> fits{true};
  *digests = each_block<false>(leaves, pool, [&](size_t i, int64_t n, int64_t width, const void* old, void* now) {
    if (now != old) std::memcpy(now, old, static_cast<size_t>(n * width));
    const auto* const in = reinterpret_cast<const uint8_t*>(places[i].second);
    if (!kernels().apply_patch_block(width, places[i].first, in, n, &scratch(), now)) fits = false;
  });
  return fits;
}

void join(const std::vector<std::string_view>& parts, const Pool& pool, uint8_t* out) {
  constexpr size_t kPiece = 1 << 18;
  std::vector<std::pair<std::string_view, uint8_t*>> pieces;
  for (const std::string_view part : parts) {
    for (size_t at = 0; at < part.size(); at += kPiece) pieces.emplace_back(part.substr(at, kPiece), out + at);
    out += part.size();
  }
  parallel_for(pool, static_cast<int64_t>(pieces.size()), [&](int64_t number) {
    const auto& [piece, to] = pieces[static_cast<size_t>(number)];
    std::memcpy(to, piece.data(), piece.size());
  });
}

uint64_t digest_of(const void* data, int64_t bytes, const Pool& pool) {
  constexpr int64_t kPart = 64 * kDigestBytes;
  std::atomic<uint64_t> sum{0};
  parallel_for(pool, div_up(bytes, kPart), [&](int64_t part) {
    const int64_t at = part * kPart;
    sum += digest_part(static_cast<const uint8_t*>(data) + at, std::min(kPart, bytes - at), at / kDigestBytes);
  });
  return sum;
}

}  // namespace jaxcgx::cpu
