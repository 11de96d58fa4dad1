// The sum of a message over ranks, in pieces: while one is on its way, others are encoded, added up or decoded, so that
// little more than the time on the wire is left. The bits are those of the operations one after another.
//
// one_shot: every rank sends its message to all, which add them up. The pieces are the layout's chunks.
// two_shot: piece p of rank r's part is chunk r * pieces + p of the layout. Every rank sends it to its owner, who adds
// up, encodes the sum and sends it to all, which decode it.
#include <atomic>
#include <thread>

#include "cpu/cpu.h"
#include "cpu/pages.h"
#include "cpu/spans.h"
#include "handlers/operations.h"
#include "handlers/tcp.h"
#include "tcp/threads.h"

namespace jaxcgx {
namespace {

constexpr int64_t kKind = 16;  // of the exchange, behind the operations of tcp.cc; two_shot's is one more

// Kernels that run while bytes are on their way. (XLA's own threads are not to be had when a handler has returned.)
tcp::Threads& workers() {
  static auto& threads = *new tcp::Threads(std::max(1u, std::thread::hardware_concurrency()));
  return threads;
}

const cpu::Pool& alone() {
  static const cpu::Pool pool{1, [](std::function<void()> task) { task(); }};
  return pool;
}

// Where one message's leaves are.
struct Message {
  std::vector<const void*> leaves;
  std::vector<const float*> residuals;
  std::vector<float*> new_residuals, sums;  // sums: the result of one_shot,
  std::vector<void*> results;               // and that of two_shot
  const uint32_t *first_key, *sum_key;

  // The message that lies `row` messages behind the first.
  Message at(int64_t row, const Layout& l) const {
    Message m = *this;
    for (size_t i = 0; i < l.leaves.size(); ++i) {
      const int64_t behind = row * l.leaves[i].size;
      m.leaves[i] = cpu::at_element(leaves[i], l.leaves[i].dtype, behind);
      if (!results.empty()) m.results[i] = cpu::at_element(results[i], l.leaves[i].dtype, behind);
      if (!sums.empty()) m.sums[i] += behind;
      if (!residuals.empty()) m.residuals[i] += behind, m.new_residuals[i] += behind;
    }
    if (first_key != nullptr) m.first_key += 2 * row;
    if (sum_key != nullptr) m.sum_key += 2 * row;
    return m;
  }
};

// Of a batch of messages the pieces follow one another.
struct Allreduce : std::enable_shared_from_this<Allreduce> {
  const Layout layout;
  const bool two_shot;
  const int64_t pieces, all, ranks;  // pieces: of a part of a message; all: of the batch
  bool own = false;                  // this rank's part of a sum is added as it is
  bool feedback = false;             // what is lost comes back: of the first encoding,
  bool sum_feedback = false;         // and of the sum's
  float divisor = 1.0f;
  std::vector<int64_t> ids;
  std::vector<Message> messages;

  int64_t rank = 0;
  uint8_t *payloads = nullptr, *outgoing = nullptr,
          *encoded = nullptr;                 // [all, ranks], [all, ranks], [all, ranks] times chunk_bytes
  std::vector<std::atomic<int64_t>> missing;  // by piece: payloads that its sum lacks
  std::shared_ptr<tcp::Net::Running> running;
  Completion completion{2};  // the exchange, and `encode`

  Allreduce(Layout l, bool two_shot, int64_t ranks, int64_t batch)
      : layout(std::move(l)),
        two_shot(two_shot),
        pieces(two_shot ? layout.chunks() / ranks : layout.chunks()),
        all(batch * pieces),
        ranks(ranks),
        missing(static_cast<size_t>(all)) {}

  int64_t workspace_bytes() const { return (two_shot ? 3 : 1) * all * ranks * layout.chunk_bytes; }
  // Which of the layout's chunks piece `piece` of a part is.
  int64_t chunk(int64_t part, int64_t piece) const { return (two_shot ? part * pieces : 0) + piece % pieces; }
  const Message& message(int64_t piece) const { return messages[static_cast<size_t>(piece / pieces)]; }
  uint8_t* place(uint8_t* base, int64_t piece, int64_t part) const {
    return base + (piece * ranks + part) * layout.chunk_bytes;
  }

  void begin(tcp::Exchange e, uint8_t* workspace) {
    rank = e.rank;
    payloads = workspace;
    outgoing = place(payloads, all, 0);
    encoded = place(outgoing, all, 0);
    for (auto& m : missing) m = ranks;
    e.name = std::string(two_shot ? "two_shot" : "one_shot") + " of " +
             std::to_string(all * (two_shot ? ranks : 1) * layout.chunk_bytes) + " bytes";
    e.kind = kKind + two_shot;
    for (int64_t piece = 0; piece < all; ++piece) {
      for (int64_t i = 1; i < ranks; ++i) {
        const int64_t other = (rank + i) % ranks;
        e.receives.push_back({other, piece, place(payloads, piece, other), layout.chunk_bytes});
        if (two_shot) e.receives.push_back({other, all + piece, place(encoded, piece, other), layout.chunk_bytes});
      }
    }
    e.sends = static_cast<int64_t>(e.receives.size());
    const auto self = shared_from_this();
    e.received = [self, receives = e.receives](size_t i) { self->received(receives[i].rank, receives[i].slot); };
    e.done = [self](const tcp::Status& status) { self->completion.part(status); };
    running = the_net()->begin(std::move(e));
  }

  void encode(const cpu::Pool& pool) {
    const auto encode_chunk = [&](int64_t part, int64_t piece, uint8_t* to) {
      const Message& m = message(piece);
      cpu::encode({layout, 1, m.leaves.data(), ids.data(), m.first_key, feedback ? m.residuals.data() : nullptr,
                   m.new_residuals.data(), to, chunk(part, piece)},
                  pool);
    };
    for (int64_t piece = 0; piece < all; ++piece) {
      for (int64_t i = 1; i < ranks && two_shot; ++i) {
        const int64_t owner = (rank + i) % ranks;
        uint8_t* to = place(outgoing, piece, owner);
        encode_chunk(owner, piece, to);
        the_net()->send(running, owner, piece, to, layout.chunk_bytes);
      }
      uint8_t* mine = place(payloads, piece, rank);
      if (!own) encode_chunk(rank, piece, mine);
      if (!two_shot) send_to_all(piece, mine);
      one_less(piece);
    }
    completion.part();
  }

  void send_to_all(int64_t slot, const uint8_t* data) {
    for (int64_t i = 1; i < ranks; ++i) the_net()->send(running, (rank + i) % ranks, slot, data, layout.chunk_bytes);
  }

  void received(int64_t from, int64_t slot) {
    if (slot < all) return one_less(slot);
    later([this, from, piece = slot - all] { decode(from, piece); });
  }

  void one_less(int64_t piece) {
    if (--missing[static_cast<size_t>(piece)] == 0) later([this, piece] { reduce(piece); });
  }

  void later(std::function<void()> task) {
    completion.add();
    workers().run([self = shared_from_this(), task = std::move(task)] {
      task();
      self->completion.part();
    });
  }

  void reduce(int64_t piece) {
    const Message& m = message(piece);
    const int32_t where[2] = {static_cast<int32_t>(chunk(rank, piece)), static_cast<int32_t>(rank)};
    uint8_t* sum = two_shot ? place(encoded, piece, rank) : nullptr;
    cpu::reduce({layout, 1, ranks, place(payloads, piece, 0), where, own ? m.leaves.data() : nullptr, divisor,
                 m.sums.data(), sum, sum_feedback ? m.new_residuals.data() : nullptr, ids.data(), m.sum_key},
                alone());
    if (!two_shot) return;
    send_to_all(all + piece, sum);
    decode(rank, piece);
  }

  void decode(int64_t part, int64_t piece) {
    cpu::decode({layout, 1, place(encoded, piece, part), message(piece).results.data(), chunk(part, piece)}, alone());
  }
};

// Operands: leaves, residuals (with feedback), who takes part, keys (stochastic: the first, and with two_shot the
// sum's). Results: the sums, as fp32 (one_shot) or as the leaves are (two_shot), new residuals, workspace. The tokens
// order a program's exchanges.
ffi::Error find_all(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch, Allreduce& a, const int32_t** who,
                    uint8_t** workspace) {
  const std::string op = "tcp_allreduce";
  const Layout& l = a.layout;
  const size_t n = l.leaves.size(), keys = l.codec.stochastic ? 1 + a.two_shot : 0, inputs = (a.feedback ? 2 : 1) * n,
               outputs = inputs;
  Message m{};
  CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), inputs + 1 + keys + 1));
  CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), outputs + 2));
  CGX_RETURN_IF_ERROR(find_leaves(op, "leaf", l, batch, args, 0, std::nullopt, &m.leaves));
  if (a.feedback) {
    CGX_RETURN_IF_ERROR(find_leaves(op, "residual", l, batch, args, n, DType::kF32, &m.residuals));
    CGX_RETURN_IF_ERROR(find_leaves(op, "new residual", l, batch, rets, n, DType::kF32, &m.new_residuals));
  }
  CGX_RETURN_IF_ERROR(find(op, "who", args, inputs, ffi::DataType::S32, 1, 1 + a.ranks, who));
  if (keys > 0) CGX_RETURN_IF_ERROR(find(op, "key", args, inputs + 1, ffi::DataType::U32, batch, 2, &m.first_key));
  if (keys > 1)
    CGX_RETURN_IF_ERROR(find(op, "key of the sum", args, inputs + 2, ffi::DataType::U32, batch, 2, &m.sum_key));
  if (a.two_shot)
    CGX_RETURN_IF_ERROR(find_leaves(op, "result", l, batch, rets, 0, std::nullopt, &m.results));
  else
    CGX_RETURN_IF_ERROR(find_leaves(op, "sum", l, batch, rets, 0, DType::kF32, &m.sums));
  CGX_RETURN_IF_ERROR(find(op, "workspace", rets, outputs, ffi::DataType::U8, 1, a.workspace_bytes(), workspace));
  for (int64_t row = 0; row < batch; ++row) a.messages.push_back(m.at(row, l));
  return ffi::Error::Success();
}

ffi::Future allreduce(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec,
                      Sizes sizes, Sizes dtypes, Sizes ids, int64_t chunks, int64_t batch, int64_t ranks, bool two_shot,
                      bool own, bool feedback, bool sum_feedback, float divisor, int64_t timeout_ms) {
  const std::string op = "tcp_allreduce";
  const auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, batch);
  if (layout.has_error()) return failed(layout.error());
  if (ranks < 1 || ranks > tcp::kMostProcesses || (two_shot && chunks % ranks != 0)) {
    return failed(invalid(op, std::to_string(chunks) + " chunks for " + std::to_string(ranks) + " ranks"));
  }
  if (batch > (1 << 20)) return failed(invalid(op, "batch out of range: " + std::to_string(batch)));
  if ((own && (feedback || !two_shot)) || (sum_feedback && !(feedback && two_shot)))
    return failed(invalid(op, "own and feedback don't go together"));
  // Of a smaller one 1 / divisor may be infinite.
  if (!(divisor >= 0x1p-126f)) return failed(invalid(op, "the divisor is not a positive number, 2^-126 or more"));
  const auto a = std::make_shared<Allreduce>(*layout, two_shot, ranks, batch);
  a->own = own;
  a->feedback = feedback;
  a->sum_feedback = sum_feedback;
  a->divisor = divisor;
  a->ids.assign(ids.begin(), ids.end());
  const int32_t* who = nullptr;
  uint8_t* workspace = nullptr;
  if (ffi::Error error = find_all(args, rets, batch, *a, &who, &workspace); error.failure()) return failed(error);
  auto exchange = exchange_among(op, who, ranks, timeout_ms);
  if (exchange.has_error()) return failed(exchange.error());
  cpu::ask_for_large_pages(workspace, a->workspace_bytes());
  ffi::Future future = a->completion.future();
  a->begin(std::move(*exchange), workspace);
  a->encode({threads.num_threads(), [&](std::function<void()> task) { threads.Schedule(std::move(task)); }});
  return future;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_tcp_allreduce_cpu, allreduce,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .CGX_MESSAGE.Attr<int64_t>("ranks")
                                  .Attr<bool>("two_shot")
                                  .Attr<bool>("own")
                                  .Attr<bool>("feedback")
                                  .Attr<bool>("sum_feedback")
                                  .Attr<float>("divisor")
                                  .Attr<int64_t>("timeout_ms"));

}  // namespace jaxcgx
