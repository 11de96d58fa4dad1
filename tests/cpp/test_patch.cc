// Patches give the new words back. Altered ones are refused, or give some words, without an access outside of buffers.
#include <cstring>
#include <memory>
#include <random>

#include "check.h"
#include "cpu/patch.h"

using namespace jaxcgx;
using Bytes = std::vector<uint8_t>;

int main() {
  std::mt19937_64 random(0);
  const auto below = [&](uint64_t n) { return random() % n; };
  const cpu::Pool pool{1, nullptr};
  for (int round = 0; round < 3000; ++round) {
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
      there.push_back({words, width, olds.back().data(), news.back().data()});
      back.push_back({words, width, olds.back().data(), made.back().data()});
    }
    Bytes body;
    const cpu::PatchDigests digests = cpu::encode_patch(there, pool, &body);
    cpu::PatchDigests found;
    const auto apply = [&](const Bytes& bytes) {
      const std::unique_ptr<char[]> exact(new char[bytes.size()]);  // so that a read past the end is an error
      if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
      return cpu::apply_patch(back, pool, {exact.get(), bytes.size()}, &found);
    };
    CHECK(apply(body) && made == news, std::to_string(round));
    CHECK(found.old == digests.old && found.now == digests.now, std::to_string(round));
    for (int i = 0; i < 3; ++i) {
      Bytes other = body;
      if (i == 0) other[below(other.size())] ^= static_cast<uint8_t>(1 << below(8));
      if (i == 1) other.resize(below(other.size()));
      for (size_t at = 24; i == 2 && at < other.size(); ++at) other[at] = static_cast<uint8_t>(random());
      CHECK(!apply(other) || i != 1, std::to_string(round));
    }
  }
  return test::finish();
}
