#include "tcp/allreduce.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "cpu/spans.h"
#include "tcp/collectives.h"
#include "tcp/slice.h"
#include "tcp/threads.h"

namespace jaxcgx::tcp {
namespace {

constexpr int64_t kKind = 16;  // of the exchange, different from all in collectives.h; two_shot's is one more
static_assert(kKind >= kOperations, "");

// Kernels that run while bytes are under way. XLA's threads can't be used after a handler has returned.
Threads& workers() {
  static auto& threads = *new Threads(std::max(1u, std::thread::hardware_concurrency()), run_soon);
  return threads;
}

const cpu::Pool& alone() {
  static const cpu::Pool pool{1, [](std::function<void()> task) { task(); }};
  return pool;
}

// The buffers `row` messages behind the first's. `dtype`: of all of them, else that of each leaf.
template <class T>
std::vector<T*> behind(const Layout& l, int64_t row, std::vector<T*> first, std::optional<DType> dtype = std::nullopt) {
  using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
  for (size_t i = 0; i < first.size(); ++i) {
    const DType type = dtype.value_or(l.leaves[i].dtype);
    first[i] = static_cast<T*>(cpu::at_element<Void>(first[i], type, row * l.leaves[i].size));
  }
  return first;
}
Allreduce::Inputs behind(const Layout& l, int64_t row, const Allreduce::Inputs& first) {
  return {behind(l, row, first.leaves), behind(l, row, first.residuals, DType::kF32),
          behind(l, row, first.new_residuals, DType::kF32), first.first_key ? first.first_key + 2 * row : nullptr,
          first.sum_key ? first.sum_key + 2 * row : nullptr};
}
Allreduce::Outputs behind(const Layout& l, int64_t row, const Allreduce::Outputs& first) {
  return {behind(l, row, first.sums, DType::kF32), behind(l, row, first.results),
          behind(l, row, first.residuals, DType::kF32)};
}

// Memory for the elements that some chunks of a message have of its leaves.
class Part {
 public:
  Part() = default;
  // `dtype`: of all leaves, else each has its own.
  Part(const Layout& l, int64_t first, int64_t chunks, std::optional<DType> dtype = std::nullopt)
      : layout_(&l), dtype_(dtype), stretches_(l.leaves.size()) {
    for (int64_t k = l.first[static_cast<size_t>(first)]; k < l.first[static_cast<size_t>(first + chunks)]; ++k) {
      const Piece& p = l.pieces[static_cast<size_t>(k)];
      Stretch& s = stretches_[static_cast<size_t>(p.leaf)];
      if (s.bytes == 0) s.begin = p.start * size(p.leaf);
      s.bytes = (p.start + p.coded + p.raw) * size(p.leaf) - s.begin;
    }
    constexpr int64_t kLine = 64;
    int64_t bytes = 0;
    for (Stretch& s : stretches_) s.at = bytes, bytes += (s.bytes + kLine - 1) / kLine * kLine;
    memory_.reset(new char[static_cast<size_t>(bytes)]);
    // Where kernels find elements at the places that they have in whole leaves.
    for (const Stretch& s : stretches_)
      whole_.push_back(reinterpret_cast<void*>(reinterpret_cast<intptr_t>(memory_.get()) + s.at - s.begin));
  }

  // For kernels; empty without memory.
  const std::vector<void*>& whole() const { return whole_; }

  // Copies the elements of a chunk.
  template <class T>
  void copy(int64_t chunk, const std::vector<T*>& leaves) const {
    if (layout_ == nullptr) return;
    const std::vector<int64_t>& first = layout_->first;
    for (int64_t k = first[static_cast<size_t>(chunk)]; k < first[static_cast<size_t>(chunk) + 1]; ++k) {
      const Piece& p = layout_->pieces[static_cast<size_t>(k)];
      const auto i = static_cast<size_t>(p.leaf);
      const int64_t at = p.start * size(p.leaf), bytes = (p.coded + p.raw) * size(p.leaf);
      std::memcpy(static_cast<char*>(whole_[i]) + at, reinterpret_cast<const char*>(leaves[i]) + at,
                  static_cast<size_t>(bytes));
    }
  }

  template <class T>
  void copy_back(const std::vector<T*>& leaves) const {
    for (size_t i = 0; i < stretches_.size(); ++i) {
      const Stretch& s = stretches_[i];
      std::memcpy(reinterpret_cast<char*>(leaves[i]) + s.begin, memory_.get() + s.at, static_cast<size_t>(s.bytes));
    }
  }

 private:
  struct Stretch {
    int64_t begin = 0, bytes = 0;  // in the leaf
    int64_t at = 0;                // in the memory
  };
  int64_t size(int32_t leaf) const {
    return size_of(dtype_.value_or(layout_->leaves[static_cast<size_t>(leaf)].dtype));
  }

  const Layout* layout_ = nullptr;
  std::optional<DType> dtype_;
  std::vector<Stretch> stretches_;
  std::unique_ptr<char[]> memory_;
  std::vector<void*> whole_;
};

// What a message's sum needs between begin and end.
struct Kept {
  Part own, residuals;
  uint32_t key[2] = {0, 0};  // of the sum
};

}  // namespace

// The pieces of a batch are numbered message after message.
class Running : public std::enable_shared_from_this<Running> {
 public:
  Running(std::shared_ptr<Net> net, Allreduce a, int64_t rank)
      : a_(std::move(a)),
        net_(std::move(net)),
        rank_(rank),
        ranks_(a_.ranks),
        pieces_(a_.pieces()),
        all_(a_.batch * pieces_),
        bytes_(a_.layout.chunk_bytes),
        payloads_(a_.workspace.get()),
        outgoing_(place(payloads_, all_, 0)),
        encoded_(place(outgoing_, all_, 0)),
        missing_(static_cast<size_t>(all_)),
        unsummed_(all_),
        kept_(static_cast<size_t>(a_.batch)),
        completion_(3, [this](const Status& status) { done_(status); }) {
    for (auto& m : missing_) m = ranks_;
    for (auto& kept : kept_) {
      if (a_.own) kept.own = Part(a_.layout, rank_ * pieces_, pieces_);
      if (a_.sum_feedback) kept.residuals = Part(a_.layout, rank_ * pieces_, pieces_, DType::kF32);
    }
  }

  void begin(Group group) {
    Exchange e{};
    e.name = std::string(a_.two_shot ? "two_shot" : "one_shot") + " of " +
             std::to_string(all_ * (a_.two_shot ? ranks_ : 1) * bytes_) + " bytes";
    e.kind = kKind + a_.two_shot;
    e.digest = a_.digest;
    e.group = std::move(group);
    e.overtakes = a_.overtakes;
    for (int64_t piece = 0; piece < all_; ++piece) {
      for (int64_t i = 1; i < ranks_; ++i) {
        const int64_t other = (rank_ + i) % ranks_;
        e.receives.push_back({other, piece, place(payloads_, piece, other), bytes_});
        if (a_.two_shot) e.receives.push_back({other, all_ + piece, place(encoded_, piece, other), bytes_});
      }
    }
    e.sends = static_cast<int64_t>(e.receives.size());
    const auto self = shared_from_this();
    e.received = [self, receives = e.receives](size_t i) { self->received(receives[i].rank, receives[i].slot); };
    e.done = [self](const Status& status) { self->completion_.part(status); };
    running_ = net_->begin(std::move(e));
  }

  void encode(const Allreduce::Inputs& first, const cpu::Pool& pool) {
    for (int64_t piece = 0; piece < all_; ++piece) {
      const auto m = behind(a_.layout, piece / pieces_, first);
      for (int64_t i = 1; i < ranks_ && a_.two_shot; ++i) {
        const int64_t owner = (rank_ + i) % ranks_;
        uint8_t* to = place(outgoing_, piece, owner);
        encode_chunk(m, owner, piece, to, pool);
        net_->send(running_, owner, piece, to, bytes_);
      }
      uint8_t* mine = place(payloads_, piece, rank_);
      if (!a_.own) encode_chunk(m, rank_, piece, mine, pool);
      if (!a_.two_shot) send_to_all(piece, mine);
      Kept& kept = kept_[row(piece)];
      kept.own.copy(chunk(rank_, piece), m.leaves);
      kept.residuals.copy(chunk(rank_, piece), m.new_residuals);
      if (m.sum_key != nullptr && piece % pieces_ == 0) std::copy_n(m.sum_key, 2, kept.key);
      one_less(piece);
    }
    completion_.part();
  }

  void end(const Allreduce::Outputs& first, Done done) {
    done_ = std::move(done);
    for (int64_t row = 0; row < a_.batch; ++row) outputs_.push_back(behind(a_.layout, row, first));
    std::vector<std::function<void()>> tasks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      tasks.swap(last_);
    }
    for (auto& task : tasks) later(std::move(task));
    completion_.part();
  }

  const Allreduce& asked() const { return a_; }

 private:
  // The layout's chunk that is a piece of a part.
  int64_t chunk(int64_t part, int64_t piece) const { return (a_.two_shot ? part * pieces_ : 0) + piece % pieces_; }
  size_t row(int64_t piece) const { return static_cast<size_t>(piece / pieces_); }
  uint8_t* place(uint8_t* base, int64_t piece, int64_t part) const { return base + (piece * ranks_ + part) * bytes_; }

  void encode_chunk(const Allreduce::Inputs& m, int64_t part, int64_t piece, uint8_t* to, const cpu::Pool& pool) const {
    Encode e{a_.layout, 1};
    e.leaves = m.leaves.data();
    e.leaf_ids = a_.ids.data();
    e.keys = m.first_key;
    e.residuals = a_.feedback ? m.residuals.data() : nullptr;
    e.new_residuals = m.new_residuals.data();
    e.payload = to;
    cpu::encode(e, pool, chunk(part, piece));
  }

  void send_to_all(int64_t slot, const uint8_t* data) {
    for (int64_t i = 1; i < ranks_; ++i) net_->send(running_, (rank_ + i) % ranks_, slot, data, bytes_);
  }

  void received(int64_t from, int64_t slot) {
    if (slot < all_) return one_less(slot);
    at_last([this, from, piece = slot - all_] { decode(from, piece); });
  }

  void one_less(int64_t piece) {
    if (--missing_[static_cast<size_t>(piece)] > 0) return;
    if (a_.two_shot)
      later([this, piece] { sum(piece); });
    else
      at_last([this, piece] { sum_to_leaves(piece); });
  }

  void later(std::function<void()> task) {
    completion_.add();
    workers().run([self = shared_from_this(), task = std::move(task)] {
      task();
      self->completion_.part();
    });
  }

  // What writes to the outputs.
  void at_last(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!ended_) return last_.push_back(std::move(task));
    }
    later(std::move(task));
  }

  Reduce reduction(int64_t piece, const int32_t* where) {
    Reduce r{a_.layout, 1, ranks_};
    r.payloads = place(payloads_, piece, 0);
    r.where = where;
    r.divisor = a_.divisor;
    r.leaf_ids = a_.ids.data();
    return r;
  }

  void sum(int64_t piece) {
    const int32_t where[2] = {static_cast<int32_t>(chunk(rank_, piece)), static_cast<int32_t>(rank_)};
    const Kept& kept = kept_[row(piece)];
    std::vector<float*> residuals;
    for (void* p : kept.residuals.whole()) residuals.push_back(static_cast<float*>(p));
    Reduce r = reduction(piece, where);
    r.own = a_.own ? kept.own.whole().data() : nullptr;
    r.payload = place(encoded_, piece, rank_);
    r.residuals = a_.sum_feedback ? residuals.data() : nullptr;
    r.keys = kept.key;
    cpu::reduce(r, alone());
    send_to_all(all_ + piece, r.payload);
    at_last([this, piece] { decode(rank_, piece); });
  }

  void sum_to_leaves(int64_t piece) {
    const int32_t where[2] = {static_cast<int32_t>(chunk(rank_, piece)), static_cast<int32_t>(rank_)};
    Reduce r = reduction(piece, where);
    r.leaves = outputs_[row(piece)].sums.data();
    cpu::reduce(r, alone());
  }

  void decode(int64_t part, int64_t piece) {
    const Allreduce::Outputs& m = outputs_[row(piece)];
    Decode d{a_.layout, 1};
    d.payload = place(encoded_, piece, part);
    d.leaves = m.results.data();
    cpu::decode(d, alone(), chunk(part, piece));
    if (part == rank_ && a_.sum_feedback && --unsummed_ == 0) {
      for (size_t i = 0; i < kept_.size(); ++i) kept_[i].residuals.copy_back(outputs_[i].residuals);
    }
  }

  const Allreduce a_;
  const std::shared_ptr<Net> net_;
  const int64_t rank_, ranks_, pieces_, all_, bytes_;  // pieces_: of a part of a message; all_: of the batch
  // [all, ranks, chunk_bytes] each; one_shot has only the first.
  uint8_t *const payloads_, *const outgoing_, *const encoded_;
  std::vector<std::atomic<int64_t>> missing_;  // by piece: payloads that its sum lacks
  std::atomic<int64_t> unsummed_;              // own pieces
  std::vector<Kept> kept_;                     // by message
  std::vector<Allreduce::Outputs> outputs_;
  std::shared_ptr<Net::Running> running_;
  std::mutex mutex_;
  bool ended_ = false;                       // whether there are outputs
  std::vector<std::function<void()>> last_;  // that wait for them
  Done done_;
  Completion completion_;  // parts: the exchange, encode, end, and each later task
};

std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first,
                               const cpu::Pool& pool) {
  const auto running = std::make_shared<Running>(std::move(net), std::move(allreduce), group.rank);
  running->begin(std::move(group));
  running->encode(first, pool);
  return running;
}

void end(const std::shared_ptr<Running>& running, Allreduce::Outputs first, Done done) {
  running->end(first, std::move(done));
}

const Allreduce& asked(const Running& running) { return running.asked(); }

}  // namespace jaxcgx::tcp
