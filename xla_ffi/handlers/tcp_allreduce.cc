// The sum of a message over ranks, in pieces: while one is on its way, others are encoded, added up or decoded, so that little more
// than the time on the wire is left. The bits are those of the operations one after another.
//
// one_shot: every rank sends its message to all, which add them up. The pieces are the layout's chunks.
// two_shot: piece p of rank r's part is chunk r * pieces + p of the layout. Every rank sends it to its owner, who adds up, encodes
// the sum and sends it to all, which decode it.
#include <atomic>
#include <thread>

#include "cpu/cpu.h"
#include "cpu/pages.h"
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

struct Allreduce : std::enable_shared_from_this<Allreduce> {
  const Layout layout;
  const bool two_shot;
  const int64_t pieces, ranks;
  bool own = false;       // this rank's part of a sum is added as it is
  bool feedback = false;  // what is lost comes back: of the first encoding,
  bool sum_feedback = false;  // and of the sum's
  float divisor = 1.0f;
  std::vector<int64_t> ids;
  std::vector<const void*> leaves;
  std::vector<const float*> residuals;
  std::vector<float*> new_residuals, sums;  // sums: the result of one_shot,
  std::vector<void*> results;               // and that of two_shot
  const uint32_t *first_key = nullptr, *sum_key = nullptr;

  int64_t rank = 0;
  uint8_t *payloads = nullptr, *outgoing = nullptr, *encoded = nullptr;  // [pieces, ranks], [chunks], [chunks] times chunk_bytes
  std::vector<std::atomic<int64_t>> missing;                              // by piece: payloads that its sum lacks
  std::shared_ptr<tcp::Net::Running> running;
  Completion completion{2};  // the exchange, and `encode`

  Allreduce(Layout l, bool two_shot, int64_t ranks)
      : layout(std::move(l)), two_shot(two_shot), pieces(two_shot ? layout.chunks() / ranks : layout.chunks()), ranks(ranks),
        missing(static_cast<size_t>(pieces)) {}

  int64_t workspace_bytes() const { return (pieces * ranks + (two_shot ? 2 * layout.chunks() : 0)) * layout.chunk_bytes; }
  int64_t chunk(int64_t part, int64_t piece) const { return two_shot ? part * pieces + piece : piece; }
  uint8_t* payload(int64_t piece, int64_t from) const { return payloads + (piece * ranks + from) * layout.chunk_bytes; }

  void begin(tcp::Exchange e, uint8_t* workspace) {
    rank = e.rank;
    payloads = workspace;
    outgoing = payload(pieces, 0);
    encoded = outgoing + layout.chunks() * layout.chunk_bytes;
    for (auto& m : missing) m = ranks;
    e.name = std::string(two_shot ? "two_shot" : "one_shot") + " of " + std::to_string(layout.chunks() * layout.chunk_bytes) + " bytes";
    e.kind = kKind + two_shot;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      for (int64_t i = 1; i < ranks; ++i) {
        const int64_t other = (rank + i) % ranks;
        e.receives.push_back({other, piece, payload(piece, other), layout.chunk_bytes});
        if (two_shot) e.receives.push_back({other, pieces + piece, encoded + chunk(other, piece) * layout.chunk_bytes, layout.chunk_bytes});
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
      cpu::encode({layout, 1, leaves.data(), ids.data(), first_key, feedback ? residuals.data() : nullptr, new_residuals.data(), to,
                   chunk(part, piece)}, pool);
    };
    for (int64_t piece = 0; piece < pieces; ++piece) {
      for (int64_t i = 1; i < ranks && two_shot; ++i) {
        const int64_t owner = (rank + i) % ranks;
        uint8_t* to = outgoing + chunk(owner, piece) * layout.chunk_bytes;
        encode_chunk(owner, piece, to);
        the_net()->send(running, owner, piece, to, layout.chunk_bytes);
      }
      if (!own) encode_chunk(rank, piece, payload(piece, rank));
      if (!two_shot) send_to_all(piece, payload(piece, rank));
      one_less(piece);
    }
    completion.part();
  }

  void send_to_all(int64_t slot, const uint8_t* data) {
    for (int64_t i = 1; i < ranks; ++i) the_net()->send(running, (rank + i) % ranks, slot, data, layout.chunk_bytes);
  }

  void received(int64_t from, int64_t slot) {
    if (slot < pieces) return one_less(slot);
    later([this, c = chunk(from, slot - pieces)] { decode(c); });
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
    const int64_t c = chunk(rank, piece);
    const int32_t where[2] = {static_cast<int32_t>(c), static_cast<int32_t>(rank)};
    uint8_t* sum = two_shot ? encoded + c * layout.chunk_bytes : nullptr;
    cpu::reduce({layout, 1, ranks, payload(piece, 0), where, own ? leaves.data() : nullptr, divisor, sums.data(), sum,
                 sum_feedback ? new_residuals.data() : nullptr, ids.data(), sum_key}, alone());
    if (!two_shot) return;
    send_to_all(pieces + piece, sum);
    decode(c);
  }

  void decode(int64_t c) { cpu::decode({layout, 1, encoded + c * layout.chunk_bytes, results.data(), c}, alone()); }
};

// Operands: leaves, residuals (with feedback), who takes part, keys (stochastic: the first, and with two_shot the sum's). Results: the
// sums, as fp32 (one_shot) or as the leaves are (two_shot), new residuals, workspace. The tokens order a program's exchanges.
ffi::ErrorOr<std::shared_ptr<Allreduce>> prepare(ffi::RemainingArgs args, ffi::RemainingRets rets, const Layout& l, Sizes ids, int64_t ranks,
                                                 bool two_shot, bool own, bool feedback, bool sum_feedback, float divisor, const int32_t** who,
                                                 uint8_t** workspace) {
  const std::string op = "tcp_allreduce";
  const auto check = [&](Allreduce& a) -> ffi::Error {
    const size_t n = l.leaves.size(), keys = l.codec.stochastic ? 1 + two_shot : 0, inputs = (feedback ? 2 : 1) * n, outputs = inputs;
    CGX_RETURN_IF_ERROR(expect_count(op, "operands", args.size(), inputs + 1 + keys + 1));
    CGX_RETURN_IF_ERROR(expect_count(op, "results", rets.size(), outputs + 2));
    CGX_RETURN_IF_ERROR(find_leaves(op, "leaf", l, 1, args, 0, std::nullopt, &a.leaves));
    if (feedback) {
      CGX_RETURN_IF_ERROR(find_leaves(op, "residual", l, 1, args, n, DType::kF32, &a.residuals));
      CGX_RETURN_IF_ERROR(find_leaves(op, "new residual", l, 1, rets, n, DType::kF32, &a.new_residuals));
    }
    CGX_RETURN_IF_ERROR(find(op, "who", args, inputs, ffi::DataType::S32, 1, 1 + ranks, who));
    if (keys > 0) CGX_RETURN_IF_ERROR(find(op, "key", args, inputs + 1, ffi::DataType::U32, 1, 2, &a.first_key));
    if (keys > 1) CGX_RETURN_IF_ERROR(find(op, "key of the sum", args, inputs + 2, ffi::DataType::U32, 1, 2, &a.sum_key));
    if (two_shot) CGX_RETURN_IF_ERROR(find_leaves(op, "leaf", l, 1, rets, 0, std::nullopt, &a.results));
    else CGX_RETURN_IF_ERROR(find_leaves(op, "sum", l, 1, rets, 0, DType::kF32, &a.sums));
    return find(op, "workspace", rets, outputs, ffi::DataType::U8, 1, a.workspace_bytes(), workspace);
  };
  if (ranks < 1 || ranks > tcp::kMostProcesses || (two_shot && l.chunks() % ranks != 0)) {
    return ffi::Unexpected(invalid(op, std::to_string(l.chunks()) + " chunks for " + std::to_string(ranks) + " ranks"));
  }
  if ((own && (feedback || !two_shot)) || (sum_feedback && !(feedback && two_shot))) return ffi::Unexpected(invalid(op, "own, feedback: not with each other"));
  if (!(divisor >= 0x1p-126f)) return ffi::Unexpected(invalid(op, "the divisor is not a positive number, 2^-126 or more"));
  auto a = std::make_shared<Allreduce>(l, two_shot, ranks);
  if (ffi::Error error = check(*a); error.failure()) return ffi::Unexpected(std::move(error));
  a->own = own;
  a->feedback = feedback;
  a->sum_feedback = sum_feedback;
  a->divisor = divisor;
  a->ids.assign(ids.begin(), ids.end());
  return a;
}

ffi::Future allreduce(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, CodecAttr codec, Sizes sizes, Sizes dtypes,
                      Sizes ids, int64_t chunks, int64_t batch, int64_t ranks, bool two_shot, bool own, bool feedback, bool sum_feedback,
                      float divisor, int64_t timeout_ms) {
  const std::string op = "tcp_allreduce";
  if (batch != 1) return failed(invalid(op, "a batch of " + std::to_string(batch)));
  const auto layout = make_layout(op, codec, sizes, dtypes, ids, chunks, 1);
  if (layout.has_error()) return failed(layout.error());
  const int32_t* who = nullptr;
  uint8_t* workspace = nullptr;
  auto prepared = prepare(args, rets, *layout, ids, ranks, two_shot, own, feedback, sum_feedback, divisor, &who, &workspace);
  if (prepared.has_error()) return failed(prepared.error());
  auto exchange = exchange_among(op, who, ranks, timeout_ms);
  if (exchange.has_error()) return failed(exchange.error());
  Allreduce& a = **prepared;
  cpu::ask_for_large_pages(workspace, a.workspace_bytes());
  ffi::Future future = a.completion.future();
  a.begin(std::move(*exchange), workspace);
  a.encode({threads.num_threads(), [&](std::function<void()> task) { threads.Schedule(std::move(task)); }});
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
