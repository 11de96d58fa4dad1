#include "cpu/patch.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "cpu/parallel.h"

namespace jaxcgx::cpu {
namespace {

constexpr int64_t kWords = 1 << 15;  // of a block
constexpr int64_t kTail = 8;         // bytes after all blocks: decoders may read 8 bytes at a time
constexpr int kWhole = 65535;        // in place of the number of changed words: the block has all words as they are

struct Head {
  uint16_t changed, small, raw;
};
static_assert(sizeof(Head) == 6, "as in the wire format");

template <class T>
T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
void store(void* p, T value) {
  std::memcpy(p, &value, sizeof(T));
}

// Digests

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
constexpr int64_t kGroup = 512;  // words of 64 bits

constexpr uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

struct Factors {
  uint64_t of[kGroup];
  constexpr Factors() : of{} {
    for (int64_t j = 0; j < kGroup; ++j) of[j] = mix(static_cast<uint64_t>(j + 1) * kGolden) | 1;
  }
};
constexpr Factors kFactors;

// Returns what these bytes add to a digest. `first` is the number of their first group.
uint64_t digest_part(const void* data, int64_t bytes, int64_t first) {
  uint64_t total = 0, padded[kGroup] = {};
  for (int64_t at = 0; at < bytes; at += 8 * kGroup) {
    const uint8_t* group = static_cast<const uint8_t*>(data) + at;
    if (bytes - at < 8 * kGroup) {
      std::memcpy(padded, group, static_cast<size_t>(bytes - at));
      group = reinterpret_cast<const uint8_t*>(padded);
    }
    uint64_t sum = static_cast<uint64_t>(++first) * kGolden;
    for (int64_t j = 0; j < kGroup; ++j) {
      const auto x = load<uint64_t>(group + 8 * j);
      sum += (x ^ x >> 32) * kFactors.of[j];
    }
    total += mix(sum);
  }
  return total;
}

// Rows of bits

int64_t row_bytes(int64_t bits) { return div_up(bits, 8); }

// Writes the low `bits` bits of each number. Returns the end of the row; it may write 3 bytes more.
uint8_t* put_row(const uint16_t* numbers, int64_t count, int bits, uint8_t* out) {
  uint64_t row = 0;
  int used = 0;
  for (int64_t j = 0; j < count; ++j) {
    row |= static_cast<uint64_t>(numbers[j] & ((1 << bits) - 1)) << used;
    used += bits;
    if (used < 32) continue;
    store(out, static_cast<uint32_t>(row));
    out += 4, used -= 32, row >>= 32;
  }
  store(out, static_cast<uint32_t>(row));
  return out + row_bytes(used);
}

// Returns the bits of a row from bit `at` on, a multiple of 8: 64 of them, or those up to `end` and zeros.
uint64_t bits_at(const uint8_t* row, int64_t at, int64_t end) {
  const auto bits = load<uint64_t>(row + at / 8);
  return end - at < 64 ? bits & ((uint64_t{1} << (end - at)) - 1) : bits;
}

// How k of n indices are written.
struct Indices {
  int64_t n, k, row = 0;  // bits of the first row
  int low = 0;            // bits of an index in the second row
  bool split = false;

  Indices(int64_t n, int64_t k) : n(n), k(k) {
    if (k == 0 || k == n) return;
    while (n / k >> (low + 1) > 0) ++low;
    row = (n >> low) + k;
    split = row_bytes(row) + row_bytes(k * low) < row_bytes(n);
    if (!split) row = n, low = 0;
  }

  int64_t bytes() const { return row_bytes(row) + row_bytes(k * low); }
};

// Blocks

// The memory of a thread for one block.
struct Scratch {
  uint64_t marks[kWords / 64];  // a bit for each word: whether it changes
  uint16_t index[kWords];
  uint8_t codes[kWords + 4], rows[kWords / 2], small[4 * kWords + 8], raw[8 * kWords + 8];
};

Scratch& scratch() {
  thread_local const std::unique_ptr<Scratch> own(new Scratch);
  return *own;
}

template <class T>
struct Small {  // half a word, at least a byte
  using type = std::conditional_t<sizeof(T) == 8, uint32_t, std::conditional_t<sizeof(T) == 4, uint16_t, uint8_t>>;
};

// Finds the words that change. Returns their number.
template <class T>
int64_t find_changes(const T* old, const T* now, int64_t n, Scratch* s) {
  int64_t k = 0;
  for (int64_t at = 0; at < n; at += 64) {
    uint8_t differ[64] = {};
    for (int64_t i = 0; i < std::min<int64_t>(64, n - at); ++i) differ[i] = old[at + i] != now[at + i];
    uint64_t marks = 0;
    for (int i = 0; i < 8; ++i) {  // the product gathers the low bits of 8 bytes in its highest byte
      marks |= (load<uint64_t>(differ + 8 * i) * 0x0102040810204080 >> 56) << 8 * i;
    }
    s->marks[at / 64] = marks;
    for (; marks != 0; marks &= marks - 1) s->index[k++] = static_cast<uint16_t>(at + __builtin_ctzll(marks));
  }
  return k;
}

// Returns the end of what it writes.
uint8_t* put_indices(const Indices& l, const Scratch& s, uint8_t* out) {
  uint8_t* const lows = out + row_bytes(l.row);
  if (!l.split) {
    std::memcpy(out, s.marks, static_cast<size_t>(lows - out));
    return lows;
  }
  std::memset(out, 0, static_cast<size_t>(lows - out));
  for (int64_t j = 0; j < l.k; ++j) {
    const int64_t one = (s.index[j] >> l.low) + j;
    out[one / 8] = static_cast<uint8_t>(out[one / 8] | 1 << one % 8);
  }
  return put_row(s.index, l.k, l.low, lows);
}

template <class T>
Head encode_block(const T* old, const T* now, int64_t n, std::vector<uint8_t>* out) {
  using S = typename Small<T>::type;
  constexpr uint64_t kRaw = 2 + (uint64_t{1} << 8 * sizeof(S));  // the first rank that is no small step
  Scratch& s = scratch();
  const int64_t k = find_changes(old, now, n, &s);
  uint8_t* rows = put_indices(Indices(n, k), s, s.rows);
  uint8_t *small = s.small, *raw = s.raw;
  for (int64_t j = 0; j < k; ++j) {
    const T word = now[s.index[j]];
    const int64_t step = static_cast<std::make_signed_t<T>>(word - old[s.index[j]]);
    const uint64_t rank = (static_cast<uint64_t>(step) << 1 ^ static_cast<uint64_t>(step >> 63)) - 1;
    const bool is_raw = rank >= kRaw, is_small = rank >= 2 && !is_raw;
    s.codes[j] = static_cast<uint8_t>(std::min<uint64_t>(rank, 2) + is_raw);
    store(small, static_cast<S>(rank - 2));
    store(raw, word);
    small += is_small * sizeof(S);
    raw += is_raw * sizeof(T);
  }
  store(s.codes + k, uint32_t{0});
  for (int64_t j = 0; j < k; j += 4) {  // the product gathers the low bits of 4 bytes in its highest byte
    *rows++ = static_cast<uint8_t>(load<uint32_t>(s.codes + j) * 0x01041040 >> 24);
  }
  const auto *whole = reinterpret_cast<const uint8_t*>(now), *end = reinterpret_cast<const uint8_t*>(now + n);
  if ((rows - s.rows) + (small - s.small) + (raw - s.raw) >= end - whole) {
    out->assign(whole, end);
    return {kWhole, 0, 0};
  }
  out->assign(+s.rows, rows);
  out->insert(out->end(), s.small, small);
  out->insert(out->end(), s.raw, raw);
  return {static_cast<uint16_t>(k), static_cast<uint16_t>((small - s.small) / sizeof(S)),
          static_cast<uint16_t>((raw - s.raw) / sizeof(T))};
}

int64_t block_bytes(const Head& h, int64_t n, int64_t width) {
  if (h.changed == kWhole) return n * width;
  const int64_t rows = Indices(n, h.changed).bytes() + row_bytes(2 * h.changed);
  return rows + h.small * std::max<int64_t>(1, width / 2) + h.raw * width;
}

// Returns false if there are not k ascending indices below n.
bool read_indices(const Indices& l, const uint8_t* in, uint16_t* index) {
  const uint8_t* lows = in + row_bytes(l.row);
  int64_t found = 0, last = -1;
  for (; l.row == 0 && found < l.k; ++found) index[found] = static_cast<uint16_t>(found);
  for (int64_t at = 0; at < l.row; at += 64) {
    uint64_t bits = bits_at(in, at, l.row);
    if (found + __builtin_popcountll(bits) > l.k) return false;
    for (; bits != 0; bits &= bits - 1) index[found++] = static_cast<uint16_t>(at + __builtin_ctzll(bits));
  }
  for (int64_t j = 0; l.split && j < found; ++j) {
    const uint64_t low = load<uint64_t>(lows + j * l.low / 8) >> j * l.low % 8 & ((1u << l.low) - 1);
    const int64_t i = int64_t{index[j] - j} << l.low | static_cast<int64_t>(low);
    if (i <= last || i >= l.n) return false;
    index[j] = static_cast<uint16_t>(last = i);
  }
  return found == l.k;
}

// Makes new words of the old ones, in place. Returns false if the bytes don't fit the head.
template <class T>
bool apply_block(const Head& h, const uint8_t* in, int64_t n, T* words) {
  using S = typename Small<T>::type;
  if (h.changed == kWhole) {
    std::memcpy(words, in, static_cast<size_t>(n) * sizeof(T));
    return true;
  }
  uint16_t* const index = scratch().index;
  const Indices list(n, h.changed);
  const uint8_t *codes = in + list.bytes(), *small = codes + row_bytes(2 * h.changed);
  const uint8_t* raw = small + h.small * sizeof(S);
  int smalls = 0, raws = 0;
  for (int64_t at = 0; at < 2 * h.changed; at += 64) {
    const uint64_t bits = bits_at(codes, at, 2 * h.changed), high = bits >> 1 & 0x5555555555555555;
    smalls += __builtin_popcountll(high & ~bits), raws += __builtin_popcountll(high & bits);
  }
  if (smalls != h.small || raws != h.raw || !read_indices(list, in, index)) return false;
  for (int64_t j = 0; j < h.changed; ++j) {  // it reads past the last small step and the last raw word, too
    T& word = words[index[j]];
    const int code = codes[j / 4] >> 2 * (j % 4) & 3;
    const uint64_t is_small = 0 - uint64_t{code == 2}, is_raw = 0 - uint64_t{code == 3};  // masks: no branches
    const uint64_t next = code + 1 + (load<S>(small) & is_small), step = next >> 1 ^ (0 - (next & 1));
    word = static_cast<T>(((word + step) & ~is_raw) | (load<T>(raw) & is_raw));
    small += sizeof(S) & is_small;
    raw += sizeof(T) & is_raw;
  }
  return true;
}

// Leaves

struct Block {
  size_t leaf;
  int64_t first, words;
};

std::vector<Block> blocks_of(const std::vector<PatchLeaf>& leaves) {
  std::vector<Block> blocks;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    const int64_t words = leaves[leaf].words;
    for (int64_t at = 0; at < words; at += kWords) blocks.push_back({leaf, at, std::min(kWords, words - at)});
  }
  return blocks;
}

// Calls change(number of a block, its length, old words, new words) for all blocks. Returns the digests after that.
template <class F>
PatchDigests each_block(const std::vector<PatchLeaf>& leaves, const Pool& pool, F change) {
  const std::vector<Block> blocks = blocks_of(leaves);
  std::vector<uint64_t> olds(blocks.size()), nows(blocks.size());
  const auto run = [&](size_t i, auto* old, auto* now) {
    const auto [leaf, first, words] = blocks[i];
    const int64_t width = sizeof(*now), group = first * width / (8 * kGroup);
    olds[i] = digest_part(old + first, words * width, group);
    change(i, words, old + first, now + first);
    nows[i] = digest_part(now + first, words * width, group);
  };
  parallel_for(pool, static_cast<int64_t>(blocks.size()), [&](int64_t number) {
    const auto i = static_cast<size_t>(number);
    const PatchLeaf& x = leaves[blocks[i].leaf];
    if (x.width == 1) run(i, static_cast<const uint8_t*>(x.old), static_cast<uint8_t*>(x.now));
    if (x.width == 2) run(i, static_cast<const uint16_t*>(x.old), static_cast<uint16_t*>(x.now));
    if (x.width == 4) run(i, static_cast<const uint32_t*>(x.old), static_cast<uint32_t*>(x.now));
    if (x.width == 8) run(i, static_cast<const uint64_t*>(x.old), static_cast<uint64_t*>(x.now));
  });
  PatchDigests digests{std::vector<uint64_t>(leaves.size()), std::vector<uint64_t>(leaves.size())};
  for (size_t i = 0; i < blocks.size(); ++i) {
    digests.old[blocks[i].leaf] += olds[i];
    digests.now[blocks[i].leaf] += nows[i];
  }
  return digests;
}

}  // namespace

PatchDigests encode_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, std::vector<uint8_t>* body) {
  std::vector<std::vector<uint8_t>> parts(blocks_of(leaves).size());
  body->resize(parts.size() * sizeof(Head));
  const PatchDigests digests = each_block(leaves, pool, [&](size_t i, int64_t n, auto* old, auto* now) {
    store(body->data() + i * sizeof(Head), encode_block(old, static_cast<decltype(old)>(now), n, &parts[i]));
  });
  for (const auto& part : parts) body->insert(body->end(), part.begin(), part.end());
  body->resize(body->size() + kTail);
  return digests;
}

bool apply_patch(const std::vector<PatchLeaf>& leaves, const Pool& pool, std::string_view body, PatchDigests* digests) {
  const auto* data = reinterpret_cast<const uint8_t*>(body.data());
  std::vector<std::pair<Head, int64_t>> places;  // the head of each block, and where the block begins
  const std::vector<Block> blocks = blocks_of(leaves);
  auto end = static_cast<int64_t>(blocks.size() * sizeof(Head));
  if (end + kTail > static_cast<int64_t>(body.size())) return false;
  for (const Block& block : blocks) {
    const auto h = load<Head>(data + places.size() * sizeof(Head));
    if (h.changed == kWhole ? h.small + h.raw > 0 : h.changed > block.words) return false;
    places.emplace_back(h, end);
    end += block_bytes(h, block.words, leaves[block.leaf].width);
  }
  if (end + kTail != static_cast<int64_t>(body.size())) return false;
  std::atomic<bool> fits{true};
  *digests = each_block(leaves, pool, [&](size_t i, int64_t n, auto* old, auto* now) {
    if (now != old) std::memcpy(now, old, static_cast<size_t>(n) * sizeof(*now));
    if (!apply_block(places[i].first, data + places[i].second, n, now)) fits = false;
  });
  return fits;
}

uint64_t digest_of(const void* data, int64_t bytes, const Pool& pool) {
  constexpr int64_t kPart = 1 << 18;
  std::atomic<uint64_t> sum{0};
  parallel_for(pool, div_up(bytes, kPart), [&](int64_t part) {
    const int64_t at = part * kPart;
    sum += digest_part(static_cast<const uint8_t*>(data) + at, std::min(kPart, bytes - at), at / (8 * kGroup));
  });
  return sum;
}

}  // namespace jaxcgx::cpu
