// Patches give the new words back. Altered ones are refused, or give some words, without an access outside of buffers.
// The CUDA kernels, on the CPU by cuda_emulator/, do the same as the CPU's.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "cpu/patch.h"
#include "cuda_message.h"

using namespace jaxcgx;
using Bytes = std::vector<uint8_t>;

// Returns the heads and the blocks of a leaf, as the CUDA kernels make them.
std::pair<Bytes, Bytes> encode_by_cuda(const cpu::PatchLeaf& x) {
  const auto count = static_cast<size_t>(cpu::patch_blocks(x)), slot = static_cast<size_t>(kPatchBlock * x.width);
  std::vector<PatchHead> heads(count);
  Bytes slots(count * slot, 0xCD), blocks;
  test::run(cuda::encode_patch, {x.words, x.width, x.old, x.now, heads.data(), slots.data()});
  for (size_t i = 0; i < count; ++i) {
    const int64_t n = std::min(kPatchBlock, x.words - static_cast<int64_t>(i) * kPatchBlock);
    const auto first = slots.begin() + static_cast<int64_t>(i * slot);
    blocks.insert(blocks.end(), first, first + patch_bytes(heads[i], n, x.width));
  }
  const auto* const bytes = reinterpret_cast<const uint8_t*>(heads.data());
  return {Bytes(bytes, bytes + count * sizeof(PatchHead)), blocks};
}

// Overwrites the words of a leaf by its patch. Returns false if the patch is not what an encoder writes.
bool apply_by_cuda(const cpu::PatchLeaf& x, void* words) {
  std::vector<PatchHead> heads(static_cast<size_t>(cpu::patch_blocks(x)));
  if (x.heads.size() != heads.size() * sizeof(PatchHead)) return false;
  std::memcpy(heads.data(), x.heads.data(), x.heads.size());
  std::vector<int64_t> begins;
  int64_t end = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    begins.push_back(end);
    end += patch_bytes(heads[i], std::min(kPatchBlock, x.words - static_cast<int64_t>(i) * kPatchBlock), x.width);
  }
  if (end != static_cast<int64_t>(x.blocks.size())) return false;
  Bytes fits(heads.size(), 0xCD);
  const auto* const blocks = reinterpret_cast<const uint8_t*>(x.blocks.data());
  test::run(cuda::apply_patch, {x.words, x.width, words, heads.data(), begins.data(), blocks, end, words, fits.data()});
  return std::find(fits.begin(), fits.end(), 0) == fits.end();
}

int main() {
  std::mt19937_64 random(0);
  const auto below = [&](uint64_t n) { return random() % n; };
  const cpu::Pool pool{1, nullptr};
  for (int round = 0; round < 3000; ++round) {
    const char* const isas[] = {"portable", "avx2", "avx512"};
    cpu::select_kernels(isas[round % 3]);  // stays the last one that this processor has
    // Of the large leaves a few, which take seconds.
    const bool emulated = round % 150 == 75 || round % 600 == 0;
    std::vector<Bytes> olds, news, made;
    std::vector<cpu::PatchLeaf> there, back;
    for (const int64_t width : {1, 2, 4, 8}) {
      const auto words = static_cast<int64_t>(below(round % 50 == 0 ? 70000 : 150));
      const uint64_t share = uint64_t{1} << below(8);
      Bytes old(static_cast<size_t>(words * width));
      for (uint8_t& byte : old) byte = static_cast<uint8_t>(random());
      Bytes now = old;
      for (size_t at = 0; at < now.size(); at += static_cast<size_t>(width)) {
        if (below(share) == 0) now[at] = static_cast<uint8_t>(now[at] + (below(4) == 0 ? random() : 2 * below(2) - 1));
        if (below(4 * share) == 0) now[at + static_cast<size_t>(width) - 1] ^= 0x55;
      }
      made.emplace_back(old.size());
      olds.push_back(std::move(old)), news.push_back(std::move(now));
      there.push_back({words, width, olds.back().data(), news.back().data(), {}, {}});
      back.push_back({words, width, olds.back().data(), made.back().data(), {}, {}});
    }
    cpu::PatchParts parts;
    const cpu::PatchDigests digests = cpu::encode_patch(there, pool, &parts);
    std::vector<Bytes> sent;  // the heads, then the blocks, of each leaf
    const PatchHead* head = parts.heads.data();
    const Bytes* block = parts.blocks.data();
    for (const cpu::PatchLeaf& x : there) {
      const auto count = cpu::patch_blocks(x);
      sent.emplace_back(reinterpret_cast<const uint8_t*>(head), reinterpret_cast<const uint8_t*>(head + count));
      sent.emplace_back();
      for (const Bytes* const end = block + count; block < end; ++block)
        sent.back().insert(sent.back().end(), block->begin(), block->end());
      head += count;
    }
    cpu::PatchDigests found;
    const auto apply = [&] {
      std::vector<std::unique_ptr<char[]>> exact;
      for (size_t i = 0; i < sent.size(); ++i) {
        exact.emplace_back(new char[sent[i].size()]);  // so that a read past the end is an error
        if (!sent[i].empty()) std::memcpy(exact[i].get(), sent[i].data(), sent[i].size());
        (i % 2 ? back[i / 2].blocks : back[i / 2].heads) = {exact[i].get(), sent[i].size()};
      }
      const bool fits = cpu::apply_patch(back, pool, &found);
      if (!emulated) return fits;
      bool all = true;
      for (size_t i = 0; i < back.size(); ++i) {
        Bytes words = olds[i];
        if (words.empty() ? sent[2 * i].empty() && sent[2 * i + 1].empty() : apply_by_cuda(back[i], words.data()))
          CHECK(!fits || words == made[i], std::to_string(round));
        else
          all = false;
      }
      CHECK(all == fits, std::to_string(round));
      return fits;
    };
    for (size_t i = 0; emulated && i < there.size(); ++i) {
      if (there[i].words > 0)
        CHECK(encode_by_cuda(there[i]) == std::pair(sent[2 * i], sent[2 * i + 1]), std::to_string(round));
    }
    CHECK(apply() && made == news, std::to_string(round));
    CHECK(found.old == digests.old && found.now == digests.now, std::to_string(round));
    for (int i = 0; i < 4; ++i) {
      const Bytes kept = sent[below(sent.size())];
      Bytes& other = sent[below(sent.size())];
      const Bytes was = other;
      if (other.empty()) continue;
      if (i == 0) other[below(other.size())] ^= static_cast<uint8_t>(1 << below(8));
      if (i == 1) other.resize(below(other.size()));
      for (size_t at = 0; i == 2 && at < other.size(); ++at) other[at] = static_cast<uint8_t>(random());
      if (i == 3) other.insert(other.end(), kept.begin(), kept.end());
      CHECK(!apply() || i % 2 == 0 || other == was, std::to_string(round));
      other = was;
    }
  }
  return test::finish();
}
