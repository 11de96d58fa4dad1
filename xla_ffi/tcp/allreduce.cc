#include "tcp/allreduce.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "codec/rng.h"
#include "cpu/pages.h"
#include "cpu/spans.h"
#include "tcp/collectives.h"
#include "tcp/slice.h"
#include "tcp/threads.h"
#include "tcp/workspaces.h"

namespace jaxcgx::tcp {
namespace {

// The kind of one_shot, different from all in collectives.h. two_shot: kKind + 1. A meeting of devices: kKind + 2.
constexpr int64_t kKind = 16;
static_assert(kKind >= kOperations, "");

// Threads for kernels that run while bytes are on the wire. XLA's threads can't be used after a handler has returned.
Threads& workers() {
  static auto& threads = *new Threads(std::max(1u, std::thread::hardware_concurrency()), run_soon);
  return threads;
}

// Returns a pool without other threads: each task of workers() runs its kernel alone.
const cpu::Pool& alone() {
  static const auto& pool = *new cpu::Pool{1, [](std::function<void()> task) { task(); }};
  return pool;
}

// Returns the buffers of message `row`, given the buffers of the first message. `dtype`: the dtype of all buffers, by
// default each leaf's.
template <class T>
std::vector<T*> behind(const std::vector<Leaf>& leaves, int64_t row, std::vector<T*> first,
                       std::optional<DType> dtype = std::nullopt) {
  using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
  for (size_t i = 0; i < first.size(); ++i) {
    const DType type = dtype.value_or(leaves[i].dtype);
    first[i] = static_cast<T*>(cpu::at_element<Void>(first[i], type, row * leaves[i].size));
  }
  return first;
}
Allreduce::Inputs behind(const Allreduce& a, int64_t row, const Allreduce::Inputs& first) {
  const std::vector<Leaf>& leaves = a.layout.leaves;
  return {behind(a.leaves(), row, first.leaves),
          behind(leaves, row, first.residuals, DType::kF32),
          behind(leaves, row, first.new_residuals, DType::kF32),
          first.first_key ? first.first_key + kKeyWords * row : nullptr,
          first.sum_key ? first.sum_key + kKeyWords * row : nullptr,
          first.hop_key ? first.hop_key + kKeyWords * row : nullptr};
}
Allreduce::Outputs behind(const Allreduce& a, int64_t row, const Allreduce::Outputs& first) {
  const std::vector<Leaf>& leaves = a.layout.leaves;
  return {behind(leaves, row, first.sums, DType::kF32), behind(a.leaves(), row, first.results),
          behind(leaves, row, first.residuals, DType::kF32)};
}

// Returns the group of a device that adds its leaves to no others first.
Group alone_inside() { return {{0}, {0}, 0, {}}; }

// A copy of the elements in some chunks of a message.
class Part {
 public:
  Part() = default;
  // The copy is of `chunks` chunks from chunk `first` on. `dtype`: the dtype of all elements, by default each leaf's.
  Part(const Layout& l, int64_t first, int64_t chunks, std::optional<DType> dtype = std::nullopt)
      : layout_(&l), dtype_(dtype), stretches_(l.leaves.size()) {
    for (const Piece& p : l.pieces_of(first, chunks)) {
      Stretch& s = stretches_[static_cast<size_t>(p.leaf)];
      if (s.bytes == 0) s.begin = p.start * size(p.leaf);
      s.bytes = (p.start + p.coded + p.raw) * size(p.leaf) - s.begin;
    }
    for (Stretch& s : stretches_) s.at = bytes_, bytes_ += whole_lines(s.bytes);
  }

  // The memory that the copy needs.
  int64_t bytes() const { return bytes_; }
  void put(uint8_t* memory) {
    memory_ = memory;
    // Kernels index whole leaves. So these pointers are to the first element of each leaf, which may be outside of the
    // memory.
    for (const Stretch& s : stretches_)
      whole_.push_back(reinterpret_cast<void*>(reinterpret_cast<intptr_t>(memory) + s.at - s.begin));
  }

  // Returns pointers to whole leaves, for kernels; empty without memory.
  const std::vector<void*>& whole() const { return whole_; }

  // Copies the elements of a chunk from whole leaves.
  template <class T>
  void copy(int64_t chunk, const std::vector<T*>& leaves) const {
    if (layout_ == nullptr) return;
    for (const Piece& p : layout_->pieces_of(chunk)) {
      const auto i = static_cast<size_t>(p.leaf);
      const int64_t at = p.start * size(p.leaf), bytes = (p.coded + p.raw) * size(p.leaf);
      std::memcpy(static_cast<char*>(whole_[i]) + at, reinterpret_cast<const char*>(leaves[i]) + at,
                  static_cast<size_t>(bytes));
    }
  }

  // Copies the elements of a chunk from a source of float32 numbers.
  void copy(int64_t chunk, const cpu::Source& source) const {
    if (layout_ == nullptr) return;
    const cpu::IeeeMode mode;
    for (const Piece& p : layout_->pieces_of(chunk)) {
      const auto i = static_cast<size_t>(p.leaf);
      for (int64_t at = p.start, end = p.start + p.coded + p.raw; at < end; at += cpu::kTile) {
        alignas(64) float buffer[cpu::kTile];
        const int64_t n = std::min(cpu::kTile, end - at);
        std::memcpy(static_cast<float*>(whole_[i]) + at, source(i, at, n, buffer),
                    sizeof(float) * static_cast<size_t>(n));
      }
    }
  }

  // Adds the finite elements of a chunk of whole float32 leaves to this copy, which is float32, too.
  void add(int64_t chunk, const std::vector<float*>& leaves) const {
    const cpu::IeeeMode mode;
    for (const Piece& p : layout_->pieces_of(chunk)) {
      const auto i = static_cast<size_t>(p.leaf);
      for (int64_t at = p.start; at < p.start + p.coded + p.raw; ++at) {
        const float x = leaves[i][at];
        if (std::isfinite(x)) static_cast<float*>(whole_[i])[at] += x;
      }
    }
  }

  // Returns the copies of all elements between whole leaves and this memory.
  template <class T>
  std::vector<Device::Copy> copies(const std::vector<T*>& leaves) const {
    std::vector<Device::Copy> found;
    for (size_t i = 0; i < stretches_.size(); ++i) {
      const Stretch& s = stretches_[i];
      char* const leaf = const_cast<char*>(reinterpret_cast<const char*>(leaves[i]));
      if (s.bytes > 0) found.push_back({leaf + s.begin, memory_ + s.at, s.bytes});
    }
    return found;
  }

 private:
  struct Stretch {
    int64_t begin = 0, bytes = 0;  // byte range in the leaf
    int64_t at = 0;                // byte offset in the memory
  };
  int64_t size(int32_t leaf) const {
    return size_of(dtype_.value_or(layout_->leaves[static_cast<size_t>(leaf)].dtype));
  }

  const Layout* layout_ = nullptr;
  std::optional<DType> dtype_;
  std::vector<Stretch> stretches_;
  int64_t bytes_ = 0;
  uint8_t* memory_ = nullptr;
  std::vector<void*> whole_;
};

// Inputs of a message's sum that it needs after begin() has returned.
struct Kept {
  std::vector<Part> own, residuals;  // by part of the message; empty where they aren't needed
  uint32_t *sum_key = nullptr, *hop_key = nullptr;

  Kept(const Allreduce& a, int64_t rank) : own(static_cast<size_t>(a.parts())), residuals(own.size()) {
    for (int64_t part = 0; part < a.parts(); ++part) {
      const auto p = static_cast<size_t>(part);
      if (a.own && !a.summed(part, rank).empty()) own[p] = Part(a.layout, part * a.pieces(), a.pieces());
      if (a.keeps_residuals(part, rank)) residuals[p] = Part(a.layout, part * a.pieces(), a.pieces(), DType::kF32);
    }
  }

  int64_t bytes() const {
    int64_t all = 2 * kKeyBytes;
    for (const auto* parts : {&own, &residuals}) {
      for (const Part& part : *parts) all += part.bytes();
    }
    return all;
  }
  void put(uint8_t* memory) {
    sum_key = reinterpret_cast<uint32_t*>(memory), hop_key = reinterpret_cast<uint32_t*>(memory + kKeyBytes);
    memory += 2 * kKeyBytes;
    for (auto* parts : {&own, &residuals}) {
      for (Part& part : *parts) part.put(memory), memory += part.bytes();
    }
  }

 private:
  static constexpr int64_t kKeyBytes = whole_lines(kKeyWords * int64_t{sizeof(uint32_t)});
};

}  // namespace

std::vector<int64_t> Allreduce::summed(int64_t part, int64_t rank) const {
  std::vector<int64_t> found;
  for (int64_t r = 0; r < ranks; ++r) {
    if (r == rank || !two_shot || parent(part, r) == rank) found.push_back(r);
  }
  if (two_shot && found.size() == 1 && parent(part, rank) >= 0) found.clear();  // a rank without children
  return found;
}

int64_t Allreduce::workspace_bytes(int64_t rank) const {
  int64_t rows = two_shot ? 2 * parts() : 0;
  for (int64_t part = 0; part < parts(); ++part) rows += static_cast<int64_t>(summed(part, rank).size());
  return whole_lines(rows * batch * pieces() * layout.chunk_bytes) + batch * Kept(*this, rank).bytes();
}

Encode Allreduce::encoding(const Inputs& first, int64_t batch, uint8_t* payload) const {
  Encode e{layout, batch};
  e.leaves = first.leaves.data();
  e.leaf_ids = ids.data();
  e.keys = first.first_key;
  e.residuals = feedback ? first.residuals.data() : nullptr;
  e.new_residuals = first.new_residuals.data();
  e.payload = payload;
  return e;
}

// A sum that has begun. The pieces of all messages of the batch are numbered, message after message.
class Running : public std::enable_shared_from_this<Running> {
 public:
  // `inside`: the devices of this process that add their leaves first; else only this device.
  Running(std::shared_ptr<Net> net, Allreduce a, int64_t rank, const Group& inside)
      : a_(std::move(a)),
        net_(std::move(net)),
        rank_(rank),
        parts_(a_.parts()),
        pieces_(a_.pieces()),
        all_(a_.batch * pieces_),
        bytes_(a_.layout.chunk_bytes),
        missing_(static_cast<size_t>(parts_ * all_)),
        kept_(static_cast<size_t>(a_.batch), Kept(a_, rank_)),
        place_(inside.rank),
        members_(static_cast<size_t>(inside.size())),
        addresses_(members_.size()),
        reading_(1, [this](const Status& status) { begun_(status); }),
        share_(2, [this](const Status& status) { end_share(status); }),
        completion_(1 + inside.size(), [this](const Status& status) { done_(status); }) {
    int64_t at = 0;
    for (int64_t part = 0; part < parts_; ++part) {
      summed_.push_back(a_.summed(part, rank_));
      const auto rows = static_cast<int64_t>(summed_.back().size());
      payloads_.push_back(a_.workspace.get() + at);
      at += rows * all_ * bytes_;
      for (int64_t piece = 0; piece < all_; ++piece) missing_[index(part, piece)] = rows;
      if (rows > 0 && a_.sum_feedback) unsettled_ += all_;
    }
    if (a_.deadline && a_.feedback) ++unsettled_;
    outgoing_ = a_.workspace.get() + at;
    encoded_ = outgoing_ + parts_ * all_ * bytes_;
    if (a_.two_shot) at += 2 * parts_ * all_ * bytes_;
    uint8_t* memory = a_.workspace.get() + whole_lines(at);
    for (auto& kept : kept_) {
      kept.put(memory);
      memory += kept.bytes();
    }
  }

  void begin(Group group) {
    Exchange e{};
    e.name = name();
    e.kind = kKind + a_.two_shot;
    e.digest = a_.digest;
    e.group = std::move(group);
    e.overtakes = a_.overtakes;
    if (a_.deadline) e.deadline = *a_.deadline;
    e.trims = true;
    for (int64_t piece = 0; piece < all_; ++piece) {
      for (int64_t part = 0; part < parts_; ++part) {
        const int64_t bytes = sent_bytes(part, piece);
        if (bytes == 0) continue;
        const std::vector<int64_t> from = children(part);
        for (const int64_t other : from) {
          e.receives.push_back({other, slot(false, part, piece), row(part, piece, other), bytes});
        }
        e.sends += static_cast<int64_t>(from.size());
        if (!a_.two_shot) continue;  // one_shot: each rank sends as many messages as it receives
        const int64_t parent = a_.parent(part, rank_);
        if (parent < 0) continue;
        e.receives.push_back({parent, slot(true, part, piece), place(encoded_, part, piece), bytes});
        ++e.sends;
      }
    }
    const auto self = shared_from_this();
    e.received = [self, receives = e.receives](size_t i) { self->received(receives[i].slot); };
    e.late = [self](int64_t slot) { self->late(slot); };
    e.done = [self](const Status& status) {
      if (self->a_.deadline && self->a_.feedback) self->settle();  // no more payloads are late
      self->share_.part(status);
    };
    running_ = net_->begin(std::move(e));
  }

  // Lets the devices of this process know where each has its leaves. Then each encodes its share and begins its
  // exchange with the same devices of other processes.
  void meet(Group group, Group inside, Allreduce::Inputs first, Done begun) {
    first_ = std::move(first);
    begun_ = std::move(begun);
    Exchange e{};
    e.name = name();
    e.kind = kKind + 2;
    e.digest = a_.digest;
    e.sends = inside.size() - 1;
    for (int64_t member = 0; member < inside.size(); ++member) {
      if (member == place_) continue;
      auto* const address = reinterpret_cast<uint8_t*>(&addresses_[static_cast<size_t>(member)]);
      e.receives.push_back({member, 0, address, sizeof(Running*)});
    }
    e.group = std::move(inside);
    const auto self = shared_from_this();
    e.received = [self, receives = e.receives](size_t i) { self->know(receives[i].rank); };
    e.done = [self, group = std::move(group)](const Status& status) { self->met(status, group); };
    const auto receives = e.receives;
    const auto meeting = net_->begin(std::move(e));
    for (const auto& receive : receives)
      net_->send(meeting, receive.rank, 0, reinterpret_cast<const uint8_t*>(&address_), sizeof(Running*));
  }

  // Encodes this device's messages, or its share of them.
  void encode(const Allreduce::Inputs& first, const cpu::Pool& pool) {
    for (int64_t piece = 0; piece < all_; ++piece) {
      const auto m = behind(a_, piece / pieces_, first);
      Kept& kept = kept_[static_cast<size_t>(piece / pieces_)];
      if (piece % pieces_ == 0) {
        if (m.sum_key != nullptr) std::copy_n(m.sum_key, kKeyWords, kept.sum_key);
        if (m.hop_key != nullptr) std::copy_n(m.hop_key, kKeyWords, kept.hop_key);
      }
      const cpu::Source source = a_.whole.empty() ? cpu::Source() : sums_of(piece);
      in_order([&](int64_t part) {
        const auto p = static_cast<size_t>(part);
        const bool sums = !summed_[p].empty();
        if (!sums || !a_.own) {
          uint8_t* const to = sums ? row(part, piece, rank_) : place(outgoing_, part, piece);
          cpu::encode(a_.encoding(m, 1, to), pool, chunk(part, piece), source);
        }
        if (source)
          kept.own[p].copy(chunk(part, piece), source);
        else
          kept.own[p].copy(chunk(part, piece), m.leaves);
        kept.residuals[p].copy(chunk(part, piece), m.new_residuals);
        ready(part, piece);
      });
    }
  }

  // Lets the device encode its messages.
  void encode_there(const Allreduce::Inputs& first) {
    std::vector<Device::Outgoing> outgoing;
    for (int64_t piece = 0; piece < all_; ++piece) {
      const int64_t message = piece / pieces_;
      const auto m = behind(a_, message, first);
      const Kept& kept = kept_[static_cast<size_t>(message)];
      bool keyed = piece % pieces_ != 0;  // the keys are needed by all parts, which their first copy precedes
      in_order([&](int64_t part) {
        const auto p = static_cast<size_t>(part);
        const bool sums = !summed_[p].empty();
        std::vector<Device::Copy> copies;
        if (piece % pieces_ == 0) {
          const auto add = [&](std::vector<Device::Copy> more) {
            copies.insert(copies.end(), more.begin(), more.end());
          };
          add(kept.own[p].copies(m.leaves));
          add(kept.residuals[p].copies(m.new_residuals));
          const bool first_part = sums && !std::exchange(keyed, true);
          for (const auto& [from, to] : {std::pair{m.sum_key, kept.sum_key}, {m.hop_key, kept.hop_key}}) {
            if (from != nullptr && first_part)
              add({{const_cast<uint32_t*>(from), reinterpret_cast<uint8_t*>(to), kKeyWords * int64_t{sizeof *from}}});
          }
        }
        uint8_t* const to = !sums ? place(outgoing_, part, piece) : a_.own ? nullptr : row(part, piece, rank_);
        share_.add();
        outgoing.push_back({message, chunk(part, piece), to, sent_bytes(part, piece), std::move(copies),
                            [self = shared_from_this(), part, piece] {
                              self->ready(part, piece);
                              self->share_.part();
                            }});
      });
    }
    a_.device->encode(a_, first, std::move(outgoing));
  }

  // Tells that encode() has been called.
  void encoded() { share_.part(); }

  void end(const Allreduce::Outputs& first, Done done) {
    done_ = std::move(done);
    for (int64_t row = 0; row < a_.batch; ++row) outputs_.push_back(behind(a_, row, first));
    for (size_t i = 0; i < a_.leaves().size(); ++i) {
      const Leaf& leaf = a_.leaves()[i];
      void* const out = first.results.empty() ? first.sums[i] : first.results[i];
      cpu::ask_for_large_pages(out, a_.batch * leaf.size * (first.results.empty() ? 4 : size_of(leaf.dtype)));
    }
    std::vector<std::function<void()>> tasks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      tasks.swap(last_);
    }
    for (auto& task : tasks) later(completion_, std::move(task));
    completion_.part();
  }

  void end_there(Done done) {
    done_ = std::move(done);
    completion_.part();
  }

  const Allreduce& asked() const { return a_; }

  // Returns the copies of the residuals that the sum has replaced, to its outputs.
  std::vector<Device::Copy> replaced(const Allreduce::Outputs& first) const {
    std::vector<Device::Copy> found;
    for (size_t message = 0; message < kept_.size(); ++message) {
      const auto outputs = behind(a_, static_cast<int64_t>(message), first);
      for (const Part& part : kept_[message].residuals) {
        const auto more = part.copies(outputs.residuals);
        found.insert(found.end(), more.begin(), more.end());
      }
    }
    return found;
  }

 private:
  std::string name() const {
    return std::string(a_.two_shot ? "two_shot" : "one_shot") + " of " + std::to_string(all_ * parts_ * bytes_) +
           " bytes";
  }

  // know and met are called in the thread that moves the bytes. So they are ordered: when a device has met the others,
  // all of them know it.

  // Gets to know another device of this process. It must not end while its address arrives, nor give up its buffers
  // while this device reads them.
  void know(int64_t member) {
    auto& other = members_[static_cast<size_t>(member)];
    other = addresses_[static_cast<size_t>(member)]->shared_from_this();
    other->members_[static_cast<size_t>(place_)] = shared_from_this();
    other->reading_.add();
  }

  // All devices know each other, unless there is an error.
  void met(const Status& status, const Group& group) {
    if (status) {
      share_.part(status);  // in place of the exchange
      return stop_reading(status);
    }
    begin(group);
    workers().run([self = shared_from_this()] {
      self->encode(self->first_, alone());
      self->stop_reading(std::nullopt);
    });
  }

  // Tells that this device does not read the leaves of others any more: its share is encoded, or never will be.
  void stop_reading(const Status& status) {
    for (size_t i = 0; i < members_.size(); ++i) {
      if (addresses_[i] != nullptr) members_[i]->reading_.part();
    }
    reading_.part(status);
    share_.part(status);
  }

  // Tells all devices of this process that their parts of this share are written, or will not be.
  void end_share(const Status& status) {
    for (const auto& member : std::exchange(members_, {})) {
      if (member != nullptr) member->completion_.part(status);
    }
    completion_.part(status);
  }

  // chunk returns the layout's chunk of a piece of a part. sent_bytes returns the number of its bytes that are sent.
  int64_t chunk(int64_t part, int64_t piece) const { return part * pieces_ + piece % pieces_; }
  int64_t sent_bytes(int64_t part, int64_t piece) const {
    return a_.layout.end[static_cast<size_t>(chunk(part, piece))];
  }
  size_t index(int64_t part, int64_t piece) const { return static_cast<size_t>(part * all_ + piece); }
  int64_t slot(bool back, int64_t part, int64_t piece) const { return (back * parts_ + part) * all_ + piece; }
  uint8_t* place(uint8_t* base, int64_t part, int64_t piece) const { return base + (part * all_ + piece) * bytes_; }
  // Returns the position of a rank's payload among the payloads that this rank sums.
  int64_t row_of(int64_t part, int64_t rank) const {
    const std::vector<int64_t>& all = summed_[static_cast<size_t>(part)];
    return std::lower_bound(all.begin(), all.end(), rank) - all.begin();
  }
  uint8_t* row(int64_t part, int64_t piece, int64_t rank) const {
    const auto p = static_cast<size_t>(part);
    return payloads_[p] + (piece * static_cast<int64_t>(summed_[p].size()) + row_of(part, rank)) * bytes_;
  }
  // Returns the ranks from which this rank gets payloads, the next rank first.
  std::vector<int64_t> children(int64_t part) const {
    std::vector<int64_t> found = summed_[static_cast<size_t>(part)];
    if (found.empty()) return found;
    std::rotate(found.begin(), found.begin() + row_of(part, rank_), found.end());
    found.erase(found.begin());
    return found;
  }

  // Calls f for each part. The parts that other ranks sum come first. Each rank begins with a different part, so that
  // the ranks do not all send to the same rank at once.
  template <class F>
  void in_order(F f) const {
    for (const bool sums : {false, true}) {
      for (int64_t i = 1; i <= parts_; ++i) {
        const int64_t part = (rank_ + i) % parts_;
        if (summed_[static_cast<size_t>(part)].empty() != sums) f(part);
      }
    }
  }

  // Tells that this rank's own payload of a piece is in the workspace, and what it keeps.
  void ready(int64_t part, int64_t piece) {
    if (summed_[static_cast<size_t>(part)].empty()) {
      send_up(part, piece);
      return;
    }
    if (!a_.two_shot) {
      for (int64_t i = 1; i < a_.ranks; ++i)
        send((rank_ + i) % a_.ranks, slot(false, part, piece), row(part, piece, rank_), sent_bytes(part, piece));
    }
    if (sent_bytes(part, piece) == 0) missing_[index(part, piece)] = 1;  // an empty piece is not sent
    one_less(part, piece);
  }

  // Returns the source of this device's share: the sums of the devices' numbers, which are added in float32.
  cpu::Source sums_of(int64_t piece) const {
    return [this, row = piece / pieces_](size_t leaf, int64_t at, int64_t n, float* buffer) -> const float* {
      const Leaf& whole = a_.whole[leaf];
      const int64_t begin = place_ * a_.layout.leaves[leaf].size + at,
                    own = std::clamp(whole.size - begin, int64_t{0}, n);
      add_devices(row, leaf, begin, own, buffer);
      if (own < n) {
        float last;
        add_devices(row, leaf, whole.size - 1, 1, &last);
        std::fill(buffer + own, buffer + n, last);
      }
      return buffer;
    };
  }
  void add_devices(int64_t row, size_t leaf, int64_t begin, int64_t n, float* out) const {
    const cpu::Kernels& k = cpu::kernels();
    const Leaf& whole = a_.whole[leaf];
    alignas(64) float other[cpu::kMostTogether];
    const float* sum = nullptr;
    for (size_t i = 0; i < members_.size(); ++i) {
      const Running& device = static_cast<int64_t>(i) == place_ ? *this : *members_[i];
      const void* const numbers = cpu::at_element(device.first_.leaves[leaf], whole.dtype, row * whole.size + begin);
      const auto* x = static_cast<const float*>(numbers);
      if (whole.dtype != DType::kF32) {
        float* const loaded = i == 0 ? out : other;
        k.load(whole.dtype, numbers, n, loaded);
        x = loaded;
      }
      if (i > 0) k.add(sum, x, n, out);
      sum = i > 0 ? out : x;
    }
  }

  void send(int64_t rank, int64_t slot, const uint8_t* data, int64_t bytes) {
    if (bytes > 0) net_->send(running_, rank, slot, data, bytes);
  }
  void send_up(int64_t part, int64_t piece) {
    const int64_t bytes = sent_bytes(part, piece), to = slot(false, part, piece);
    if (bytes > 0)
      net_->send(running_, a_.parent(part, rank_), to, place(outgoing_, part, piece), bytes, a_.deadline.has_value());
  }
  // Sends a root's sum to this rank's children.
  void send_on(int64_t part, int64_t piece) {
    const uint8_t* sum = place(encoded_, part, piece);
    for (const int64_t child : children(part)) send(child, slot(true, part, piece), sum, sent_bytes(part, piece));
  }

  void received(int64_t slot) {
    const int64_t piece = slot % all_, part = slot / all_ % parts_;
    if (slot < parts_ * all_) return one_less(part, piece);
    send_on(part, piece);
    decode_at_last(part, piece);
  }

  // Counts a payload that is ready. After the last one, the piece is summed.
  void one_less(int64_t part, int64_t piece) {
    if (--missing_[index(part, piece)] > 0) return;
    if (a_.two_shot)
      later(share_, [this, part, piece] { sum(part, piece); });
    else if (a_.device)
      give(piece, chunk(part, piece), row(part, piece, summed_[0][0]), a_.ranks * bytes_);
    else
      each_device([&](Running& to) {
        to.at_last([self = shared_from_this(), &to, piece] { self->sum_to_leaves(piece, to); });
      });
  }
  // Gives payloads of a sum to the device.
  void give(int64_t piece, int64_t chunk, const uint8_t* payload, int64_t bytes) {
    later(share_, [=] { a_.device->take(a_, piece / pieces_, chunk, payload, bytes); });
  }
  void decode_at_last(int64_t part, int64_t piece) {
    if (a_.device) return give(piece, chunk(part, piece), place(encoded_, part, piece), bytes_);
    each_device([&](Running& to) {
      to.at_last([self = shared_from_this(), &to, part, piece] { self->decode(part, piece, to); });
    });
  }

  // Calls f(device) for all devices of this process that get this share.
  template <class F>
  void each_device(F f) {
    for (size_t i = 0; i < members_.size(); ++i) f(static_cast<int64_t>(i) == place_ ? *this : *members_[i]);
  }

  // Runs a task in workers(). `of`, a completion of this sum, is not complete before the task is.
  void later(Completion& of, std::function<void()> task) {
    of.add();
    workers().run([self = shared_from_this(), &of, task = std::move(task)] {
      task();
      of.part();
    });
  }

  // Runs a task that writes to this device's outputs. If end() has not been called, the task waits for it.
  void at_last(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!ended_) return last_.push_back(std::move(task));
    }
    later(completion_, std::move(task));
  }

  Reduce reduction(int64_t part, int64_t piece, const int32_t* where) {
    const std::vector<int64_t>& from = summed_[static_cast<size_t>(part)];
    Reduce r{a_.layout, 1, static_cast<int64_t>(from.size())};
    r.payloads = row(part, piece, from[0]);
    r.where = where;
    r.leaf_ids = a_.ids.data();
    return r;
  }

  void sum(int64_t part, int64_t piece) {
    const auto p = static_cast<size_t>(part);
    const int64_t parent = a_.parent(part, rank_);
    const int32_t where[2] = {static_cast<int32_t>(chunk(part, piece)), static_cast<int32_t>(row_of(part, rank_))};
    const Kept& kept = kept_[static_cast<size_t>(piece / pieces_)];
    const std::vector<float*> residuals = floats(kept.residuals[p].whole());
    Reduce r = reduction(part, piece, where);
    r.divisor = parent < 0 ? a_.divisor : 1.0f;
    r.own = a_.own ? kept.own[p].whole().data() : nullptr;
    r.payload = place(parent < 0 ? encoded_ : outgoing_, part, piece);
    r.residuals = a_.sum_feedback ? residuals.data() : nullptr;
    r.keys = parent < 0 ? kept.sum_key : kept.hop_key;
    cpu::reduce(r, alone());
    if (parent < 0)
      send_on(part, piece);
    else
      send_up(part, piece);
    if (parent < 0) decode_at_last(part, piece);
    if (a_.sum_feedback) settle();
  }

  // Counts something that the residuals waited for. After the last one, the new residuals of the parts that this rank
  // sums are copied to the outputs.
  void settle() {
    if (a_.device) return;
    at_last([this] {
      if (--unsettled_ != 0) return;
      for (const Device::Copy& copy : replaced(outputs_[0]))
        std::memcpy(copy.there, copy.here, static_cast<size_t>(copy.bytes));
    });
  }

  // Takes back a payload that has been given up.
  void late(int64_t slot) {
    if (!a_.feedback) return;
    ++unsettled_;
    later(share_, [this, part = slot / all_, piece = slot % all_] {
      take_back(part, piece);
      settle();
    });
  }

  // Adds the numbers of a payload, those that are finite, to this rank's residuals.
  void take_back(int64_t part, int64_t piece) {
    Part part_of(a_.layout, chunk(part, piece), 1, DType::kF32);
    std::vector<uint8_t> memory(static_cast<size_t>(part_of.bytes()));
    part_of.put(memory.data());
    const std::vector<float*> numbers = floats(part_of.whole());
    const int32_t where[2] = {static_cast<int32_t>(chunk(part, piece)), 0};
    Reduce r{a_.layout, 1, 1};
    r.payloads = place(outgoing_, part, piece);
    r.where = where;
    r.leaves = numbers.data();
    r.leaf_ids = a_.ids.data();
    cpu::reduce(r, alone());
    const Kept& kept = kept_[static_cast<size_t>(piece / pieces_)];
    kept.residuals[static_cast<size_t>(part)].add(chunk(part, piece), numbers);
  }

  void sum_to_leaves(int64_t piece, const Running& to) {
    const int32_t where[2] = {static_cast<int32_t>(piece % pieces_), static_cast<int32_t>(rank_)};
    Reduce r = reduction(0, piece, where);
    r.divisor = a_.divisor;
    const Allreduce::Outputs& out = to.outputs_[static_cast<size_t>(piece / pieces_)];
    if (a_.whole.empty()) {
      r.leaves = out.sums.data();
      return cpu::reduce(r, alone());
    }
    write_share(chunk(0, piece), out.results, [&](void* const* leaves) {
      const std::vector<float*> sums = floats({leaves, leaves + a_.whole.size()});
      r.leaves = sums.data();
      cpu::reduce(r, alone());
    });
  }

  void decode(int64_t part, int64_t piece, const Running& to) {
    Decode d{a_.layout, 1};
    d.payload = place(encoded_, part, piece);
    const Allreduce::Outputs& out = to.outputs_[static_cast<size_t>(piece / pieces_)];
    const auto write = [&](void* const* leaves) {
      d.leaves = leaves;
      cpu::decode(d, alone(), chunk(part, piece));
    };
    a_.whole.empty() ? write(out.results.data()) : write_share(chunk(part, piece), out.results, write);
  }

  static std::vector<float*> floats(const std::vector<void*>& pointers) {
    std::vector<float*> found;
    for (void* p : pointers) found.push_back(static_cast<float*>(p));
    return found;
  }

  // Lets `write` write a chunk of this device's share to whole leaves. Its argument points to the share in each leaf.
  // Where a leaf is not float32, or shorter than the shares, the numbers are written elsewhere first.
  void write_share(int64_t chunk, const std::vector<void*>& whole,
                   const std::function<void(void* const*)>& write) const {
    const Layout& l = a_.layout;
    const auto pieces = l.pieces_of(chunk);
    const auto start = [&](const Piece& p) { return place_ * l.leaves[static_cast<size_t>(p.leaf)].size + p.start; };
    const auto count = [&](const Piece& p) {
      return std::clamp(a_.whole[static_cast<size_t>(p.leaf)].size - start(p), int64_t{0}, p.coded + p.raw);
    };
    const auto elsewhere = [&](const Piece& p) {
      return a_.whole[static_cast<size_t>(p.leaf)].dtype != DType::kF32 || count(p) < p.coded + p.raw;
    };
    int64_t needed = 0;
    for (const Piece& p : pieces) needed += elsewhere(p) ? p.coded + p.raw : 0;
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < needed) memory.resize(static_cast<size_t>(needed));
    std::vector<void*> leaves(l.leaves.size());
    float* next = memory.data();
    for (const Piece& p : pieces) {
      const auto i = static_cast<size_t>(p.leaf);
      float* const numbers = elsewhere(p) ? next : static_cast<float*>(whole[i]) + start(p);
      if (elsewhere(p)) next += p.coded + p.raw;
      leaves[i] = reinterpret_cast<void*>(reinterpret_cast<intptr_t>(numbers) - p.start * int64_t{sizeof(float)});
    }
    write(leaves.data());
    const cpu::IeeeMode mode;
    for (const Piece& p : pieces) {
      const auto i = static_cast<size_t>(p.leaf);
      if (!elsewhere(p)) continue;
      const DType dtype = a_.whole[i].dtype;
      cpu::kernels().store(dtype, static_cast<float*>(leaves[i]) + p.start, count(p),
                           cpu::at_element(whole[i], dtype, start(p)));
    }
  }

  const Allreduce a_;
  const std::shared_ptr<Net> net_;
  // pieces_: number of pieces of a part of a message. all_: number of pieces of a part of all messages.
  const int64_t rank_, parts_, pieces_, all_, bytes_;
  std::vector<std::vector<int64_t>> summed_;  // by part: Allreduce::summed
  // Pointers to the workspace. payloads_: by part, [all_, summed, chunk_bytes]. The other two: [parts_, all_,
  // chunk_bytes] each, for payloads to the parent and for the root's sums.
  std::vector<uint8_t*> payloads_;
  uint8_t *outgoing_, *encoded_;
  std::vector<std::atomic<int64_t>> missing_;  // by part and piece: number of payloads that are not ready
  std::atomic<int64_t> unsettled_{0};          // number of sums and late payloads that the residuals wait for
  std::vector<Kept> kept_;                     // by message
  std::vector<Allreduce::Outputs> outputs_;
  std::shared_ptr<Net::Running> running_;
  std::mutex mutex_;
  bool ended_ = false;                       // end() was called, so outputs_ is set
  std::vector<std::function<void()>> last_;  // tasks that wait for end()
  // The devices of this process that add their leaves first, or this device alone.
  const int64_t place_;                            // of this device among them
  std::vector<std::shared_ptr<Running>> members_;  // by place, this one null; empty after end_share()
  std::vector<Running*> addresses_;                // by place: what the others have sent; null before
  Running* const address_ = this;
  Allreduce::Inputs first_;
  Done begun_, done_;
  Completion reading_;     // its parts: this device and each other device that reads its leaves
  Completion share_;       // its parts: the exchange, encode, and each sum
  Completion completion_;  // its parts: end, each device's share, and each task of at_last()
};

std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first,
                               const cpu::Pool& pool) {
  const auto running = std::make_shared<Running>(std::move(net), std::move(allreduce), group.rank, alone_inside());
  running->begin(std::move(group));
  running->encode(first, pool);
  running->encoded();
  return running;
}

std::shared_ptr<Running> begin_inside(std::shared_ptr<Net> net, Group group, Group inside, Allreduce allreduce,
                                      Allreduce::Inputs first, Done begun) {
  const auto running = std::make_shared<Running>(std::move(net), std::move(allreduce), group.rank, inside);
  running->meet(std::move(group), std::move(inside), std::move(first), std::move(begun));
  return running;
}

void end(const std::shared_ptr<Running>& running, Allreduce::Outputs first, Done done) {
  running->end(first, std::move(done));
}

const Allreduce& asked(const Running& running) { return running.asked(); }

std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first) {
  const auto running = std::make_shared<Running>(std::move(net), std::move(allreduce), group.rank, alone_inside());
  running->begin(std::move(group));
  running->encode_there(first);
  running->encoded();
  return running;
}

void end(const std::shared_ptr<Running>& running, Done done) { running->end_there(std::move(done)); }

std::vector<Device::Copy> replaced(const Running& running, const Allreduce::Outputs& first) {
  return running.replaced(first);
}

}  // namespace jaxcgx::tcp
