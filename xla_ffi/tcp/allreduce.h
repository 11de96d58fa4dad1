// The sum of messages over ranks, in pieces: while some are under way, others are encoded, summed or decoded. So it
// takes little more time than the wire does. The result has the same bits as the operations one after another.
//
// one_shot: every rank sends its message to all ranks, which sum the messages. The pieces are the layout's chunks.
// two_shot, by trees: the message has a part for each tree. Piece p of part t is chunk t * pieces + p of the layout.
// A rank without children in the tree sends it to its parent. Every other rank sums its own piece and those of its
// children, encodes the sum and sends it to its parent. The root's sum goes back along the tree to all ranks, which
// decode it. The schedule "two_shot" has a tree for each rank, where that rank is the parent of all others; an overlay
// may have any trees.
//
// A sum has two calls, begin and end. Between them it uses only its own memory. So the program may use its buffers, and
// if it fails, no sum writes to memory that the program has freed.
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
    const uint32_t *first_key = nullptr, *sum_key = nullptr, *hop_key = nullptr;
  };
  struct Outputs {
    std::vector<float*> sums;       // of one_shot
    std::vector<void*> results;     // of two_shot
    std::vector<float*> residuals;  // with sum_feedback: of the first encoding; replaced where this rank sums
  };

  Layout layout;
  int64_t ranks, batch;
  bool two_shot;              // by trees, else one_shot
  bool own = false;           // two_shot: a rank that sums adds its own part without encoding it
  bool feedback = false;      // with residuals of the first encoding
  bool sum_feedback = false;  // with residuals of the sum's encoding, too
  float divisor = 1.0f;
  bool overtakes = false;  // earlier exchanges
  int64_t digest = 0;      // of everything else that must be the same on all ranks
  std::vector<int64_t> ids = {};
  std::vector<int64_t> parents = {};        // two_shot: [trees, ranks], -1 of a root
  std::shared_ptr<uint8_t> workspace = {};  // workspace_bytes()

  int64_t parts() const { return two_shot ? static_cast<int64_t>(parents.size()) / ranks : 1; }
  int64_t pieces() const { return layout.chunks() / parts(); }  // of a part of a message
  int64_t parent(int64_t part, int64_t rank) const { return parents[static_cast<size_t>(part * ranks + rank)]; }
  // The ranks whose payloads of a part this rank sums, itself among them, in order; none if it sums nothing.
  std::vector<int64_t> summed(int64_t part, int64_t rank) const;
  int64_t workspace_bytes(int64_t rank) const;
};

class Running;

// Returns when this rank's messages are encoded, by the pool. `first`: the buffers of the first message. In each
// buffer, the other messages follow the first.
std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first,
                               const cpu::Pool& pool);

// All buffers are in use until `done` is called.
void end(const std::shared_ptr<Running>& running, Allreduce::Outputs first, Done done);

// The layout and the batch that a sum began with.
const Allreduce& asked(const Running& running);

}  // namespace jaxcgx::tcp
