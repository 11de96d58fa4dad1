// The sum of messages over ranks, in pieces: while some are under way, others are encoded, summed or decoded. The time
// is little more than that on the wire. The bits are those of the operations one after another.
//
// one_shot: every rank sends its message to all, which sum them. The pieces are the layout's chunks.
// two_shot: piece p of rank r's part is chunk r * pieces + p of the layout. Every rank sends it to its owner, which
// sums, encodes the sum and sends it to all, which decode it.
//
// A sum has two calls, begin and end. Between them it uses memory of its own alone, so the program goes on with the
// buffers, and if it fails, with nothing that a sum still writes to.
#pragma once

#include "cpu/cpu.h"
#include "tcp/completion.h"
#include "tcp/net.h"

namespace jaxcgx::tcp {

struct Allreduce {
  // The buffers of one message, by leaf.
  struct Inputs {
    std::vector<const void*> leaves;
    std::vector<const float*> residuals;  // with feedback
    std::vector<float*> new_residuals;    // of the first encoding
    const uint32_t *first_key = nullptr, *sum_key = nullptr;
  };
  struct Outputs {
    std::vector<float*> sums;       // of one_shot
    std::vector<void*> results;     // of two_shot
    std::vector<float*> residuals;  // with sum_feedback: those of the first encoding, which become the sum's, too
  };

  Layout layout;
  int64_t ranks, batch;
  bool two_shot;
  bool own = false;           // two_shot: an owner adds its own part as it is
  bool feedback = false;      // with residuals of the first encoding,
  bool sum_feedback = false;  // and of the sum's
  float divisor = 1.0f;
  bool overtakes = false;  // earlier exchanges
  int64_t digest = 0;      // of what all ranks must have in common
  std::vector<int64_t> ids = {};
  std::shared_ptr<uint8_t> workspace = {};  // workspace_bytes()

  int64_t pieces() const { return two_shot ? layout.chunks() / ranks : layout.chunks(); }  // of a part of a message
  int64_t workspace_bytes() const { return (two_shot ? 3 : 1) * batch * pieces() * ranks * layout.chunk_bytes; }
};

class Running;

// Returns when this rank's messages are encoded, by the pool. `first`: the buffers of the first message; those of the
// others follow each of them.
std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first,
                               const cpu::Pool& pool);

// All buffers are in use until `done` is called.
void end(const std::shared_ptr<Running>& running, Allreduce::Outputs first, Done done);

// The layout and the batch that a sum began with.
const Allreduce& asked(const Running& running);

}  // namespace jaxcgx::tcp
