#include "tcp/allreduce.h"

#include <atomic>
#include <thread>

#include "cpu/spans.h"
#include "tcp/collectives.h"
#include "tcp/threads.h"

namespace jaxcgx::tcp {
namespace {

constexpr int64_t kKind = 16;  // of the exchange, different from all in collectives.h; two_shot's is one more
static_assert(kKind >= kOperations, "");

// Kernels that run while bytes are under way. XLA's threads can't be used after a handler has returned.
Threads& workers() {
  static auto& threads = *new Threads(std::max(1u, std::thread::hardware_concurrency()));
  return threads;
}

const cpu::Pool& alone() {
  static const cpu::Pool pool{1, [](std::function<void()> task) { task(); }};
  return pool;
}

// The buffers `row` messages behind the first's.
Allreduce::Buffers buffers_of(const Allreduce& a, int64_t row) {
  Allreduce::Buffers b = a.first;
  for (size_t i = 0; i < a.layout.leaves.size(); ++i) {
    const DType dtype = a.layout.leaves[i].dtype;
    const int64_t behind = row * a.layout.leaves[i].size;
    b.leaves[i] = cpu::at_element(b.leaves[i], dtype, behind);
    if (!b.results.empty()) b.results[i] = cpu::at_element(b.results[i], dtype, behind);
    if (!b.sums.empty()) b.sums[i] += behind;
    if (!b.residuals.empty()) b.residuals[i] += behind, b.new_residuals[i] += behind;
  }
  if (b.first_key != nullptr) b.first_key += 2 * row;
  if (b.sum_key != nullptr) b.sum_key += 2 * row;
  return b;
}

// The pieces of a batch are numbered message after message.
class Running : public std::enable_shared_from_this<Running> {
 public:
  Running(std::shared_ptr<Net> net, Allreduce a, int64_t rank, Done done)
      : net_(std::move(net)),
        a_(std::move(a)),
        rank_(rank),
        ranks_(a_.ranks),
        pieces_(a_.pieces()),
        all_(a_.batch * pieces_),
        bytes_(a_.layout.chunk_bytes),
        payloads_(a_.workspace.get()),
        outgoing_(place(payloads_, all_, 0)),
        encoded_(place(outgoing_, all_, 0)),
        missing_(static_cast<size_t>(all_)),
        completion_(2, std::move(done)) {
    for (int64_t row = 0; row < a_.batch; ++row) messages_.push_back(buffers_of(a_, row));
    for (auto& m : missing_) m = ranks_;
  }

  void begin(Group group) {
    Exchange e{};
    e.name = std::string(a_.two_shot ? "two_shot" : "one_shot") + " of " +
             std::to_string(all_ * (a_.two_shot ? ranks_ : 1) * bytes_) + " bytes";
    e.kind = kKind + a_.two_shot;
    e.digest = a_.digest;
    e.group = std::move(group);
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

  void encode(const cpu::Pool& pool) {
    for (int64_t piece = 0; piece < all_; ++piece) {
      for (int64_t i = 1; i < ranks_ && a_.two_shot; ++i) {
        const int64_t owner = (rank_ + i) % ranks_;
        uint8_t* to = place(outgoing_, piece, owner);
        encode_chunk(owner, piece, to, pool);
        net_->send(running_, owner, piece, to, bytes_);
      }
      uint8_t* mine = place(payloads_, piece, rank_);
      if (!a_.own) encode_chunk(rank_, piece, mine, pool);
      if (!a_.two_shot) send_to_all(piece, mine);
      one_less(piece);
    }
    completion_.part();
  }

 private:
  // The layout's chunk that is a piece of a part.
  int64_t chunk(int64_t part, int64_t piece) const { return (a_.two_shot ? part * pieces_ : 0) + piece % pieces_; }
  const Allreduce::Buffers& message(int64_t piece) const { return messages_[static_cast<size_t>(piece / pieces_)]; }
  uint8_t* place(uint8_t* base, int64_t piece, int64_t part) const { return base + (piece * ranks_ + part) * bytes_; }

  void encode_chunk(int64_t part, int64_t piece, uint8_t* to, const cpu::Pool& pool) {
    const Allreduce::Buffers& m = message(piece);
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
    later([this, from, piece = slot - all_] { decode(from, piece); });
  }

  void one_less(int64_t piece) {
    if (--missing_[static_cast<size_t>(piece)] == 0) later([this, piece] { reduce(piece); });
  }

  void later(std::function<void()> task) {
    completion_.add();
    workers().run([self = shared_from_this(), task = std::move(task)] {
      task();
      self->completion_.part();
    });
  }

  void reduce(int64_t piece) {
    const Allreduce::Buffers& m = message(piece);
    const int32_t where[2] = {static_cast<int32_t>(chunk(rank_, piece)), static_cast<int32_t>(rank_)};
    Reduce r{a_.layout, 1, ranks_};
    r.payloads = place(payloads_, piece, 0);
    r.where = where;
    r.own = a_.own ? m.leaves.data() : nullptr;
    r.divisor = a_.divisor;
    r.leaves = m.sums.data();
    r.payload = a_.two_shot ? place(encoded_, piece, rank_) : nullptr;
    r.residuals = a_.sum_feedback ? m.new_residuals.data() : nullptr;
    r.leaf_ids = a_.ids.data();
    r.keys = m.sum_key;
    cpu::reduce(r, alone());
    if (!a_.two_shot) return;
    send_to_all(all_ + piece, r.payload);
    decode(rank_, piece);
  }

  void decode(int64_t part, int64_t piece) {
    Decode d{a_.layout, 1};
    d.payload = place(encoded_, piece, part);
    d.leaves = message(piece).results.data();
    cpu::decode(d, alone(), chunk(part, piece));
  }

  const std::shared_ptr<Net> net_;
  const Allreduce a_;
  const int64_t rank_, ranks_, pieces_, all_, bytes_;  // pieces_: of a part of a message; all_: of the batch
  // [all, ranks, chunk_bytes] each; one_shot has only the first.
  uint8_t *const payloads_, *const outgoing_, *const encoded_;
  std::vector<Allreduce::Buffers> messages_;
  std::vector<std::atomic<int64_t>> missing_;  // by piece: payloads that its sum lacks
  std::shared_ptr<Net::Running> running_;
  Completion completion_;  // parts: the exchange, encode, and each later task
};

}  // namespace

void run(std::shared_ptr<Net> net, Group group, Allreduce allreduce, const cpu::Pool& pool, Done done) {
  const auto running = std::make_shared<Running>(std::move(net), std::move(allreduce), group.rank, std::move(done));
  running->begin(std::move(group));
  running->encode(pool);
}

}  // namespace jaxcgx::tcp
