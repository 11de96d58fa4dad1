// The sum of messages over ranks, in pieces. While some pieces are on the wire, other pieces are encoded, summed or
// decoded. So a sum takes little longer than its transfer. The result is bitwise equal to that of separate operations.
//
// one_shot: every rank sends its message to all ranks, which sum the messages. The pieces are the layout's chunks.
//
// two_shot, by trees: the message has a part for each tree. Piece p of part t is chunk t * pieces + p of the layout. A
// rank without children in the tree sends its piece to its parent. Every other rank sums its own piece and the pieces
// of its children, encodes the sum and sends it to its parent. The root's sum is passed down the tree to all ranks,
// which decode it. The schedule "two_shot" has a tree for each rank, in which this rank is the parent of all other
// ranks. An overlay may have any trees.
//
// With a deadline, payloads for a parent that have not begun to leave when it passes are given up: they count as zeros
// in the sum, and with feedback they go back to the residuals of the rank that would have sent them. Payloads on the
// way down always arrive. So all ranks have the same sum, and nothing is lost.
//
// Several devices of a process may first add their leaves to one another, in memory. Then the ranks above are the
// processes: the leaves are cut into equal shares, one for each of these devices, and the layout is of a share. Each
// device adds the devices' numbers of its share while it encodes them, sums its share with the same devices of other
// processes, and writes its part of the result to the outputs of all devices.
//
// A sum takes two calls, begin and end. Between them the sum uses only memory that it owns. So the program may use its
// buffers for other data, and if the program fails, no sum writes to memory that the program has freed.
#pragma once

#include "cpu/cpu.h"
#include "tcp/completion.h"
#include "tcp/net.h"

namespace jaxcgx::tcp {

class Device;

struct Allreduce {
  // The buffers of one message, one for each leaf.
  struct Inputs {
    std::vector<const void*> leaves;
    std::vector<const float*> residuals;  // with feedback
    std::vector<float*> new_residuals;    // with feedback: the residuals of the first encoding
    const uint32_t *first_key = nullptr, *sum_key = nullptr, *hop_key = nullptr;
  };
  struct Outputs {
    std::vector<float*> sums;       // one_shot only
    std::vector<void*> results;     // two_shot, or several devices that add their leaves first
    std::vector<float*> residuals;  // with sum_feedback: from the first encoding; replaced in the parts this rank sums
  };

  Layout layout;
  int64_t ranks, batch;
  bool two_shot;              // true: two_shot, by trees; false: one_shot
  bool own = false;           // two_shot: a rank that sums adds its own part without encoding it
  bool feedback = false;      // error feedback for the first encoding
  bool sum_feedback = false;  // error feedback for the encoding of the sum, too
  float divisor = 1.0f;
  bool overtakes = false;  // Exchange::overtakes
  // two_shot: Exchange::deadline for payloads that go to a parent. None: all arrive.
  std::optional<std::chrono::microseconds> deadline = std::nullopt;
  int64_t digest = 0;  // a hash of everything else that must be the same on all ranks
  std::vector<int64_t> ids = {};
  // If several devices add their leaves first: the whole leaves, of which each device has its own. Leaf i of the layout
  // is float32, and has 1 / devices of the elements of leaf i, rounded up. The last share is padded with the leaf's
  // last number.
  std::vector<Leaf> whole = {};
  std::vector<int64_t> parents = {};        // two_shot: [trees, ranks]; -1 for a root
  std::shared_ptr<uint8_t> workspace = {};  // workspace_bytes() bytes
  std::shared_ptr<Device> device = {};      // null: the leaves are in this process's memory

  // The leaves as a device has them.
  const std::vector<Leaf>& leaves() const { return whole.empty() ? layout.leaves : whole; }
  // How the first of `batch` messages, and those behind it, are encoded.
  Encode encoding(const Inputs& first, int64_t batch, uint8_t* payload) const;
  int64_t parts() const { return two_shot ? static_cast<int64_t>(parents.size()) / ranks : 1; }
  int64_t pieces() const { return layout.chunks() / parts(); }  // of each part of a message
  int64_t parent(int64_t part, int64_t rank) const { return parents[static_cast<size_t>(part * ranks + rank)]; }
  // Returns the ranks whose payloads of a part `rank` sums, in ascending order. They include `rank`. If `rank` sums
  // nothing, there are none.
  std::vector<int64_t> summed(int64_t part, int64_t rank) const;
  // Returns whether the residuals of a part may still change when begin() has returned.
  bool keeps_residuals(int64_t part, int64_t rank) const {
    return (sum_feedback && !summed(part, rank).empty()) || (deadline && feedback && parent(part, rank) >= 0);
  }
  int64_t workspace_bytes(int64_t rank) const;
};

// A device with memory of its own, such as a GPU, that has the leaves of a sum. It encodes messages and decodes their
// sums. In between, payloads are sent and summed in this process's memory.
class Device {
 public:
  // Bytes in the device's memory, and their copy in the workspace.
  struct Copy {
    void* there;
    uint8_t* here;
    int64_t bytes;
  };
  // What the sum needs of a chunk of a message.
  struct Outgoing {
    int64_t message, chunk;
    uint8_t* payload;  // gets the chunk's payload; null if it isn't needed
    int64_t bytes;     // of the payload; zeros follow them
    std::vector<Copy> copies;
    std::function<void()> ready;  // to be called when all is in the workspace; it doesn't wait
  };
  virtual ~Device() = default;

  // Encodes messages, and brings what the sum needs to the workspace, in order.
  virtual void encode(const Allreduce& sum, const Allreduce::Inputs& first, std::vector<Outgoing> outgoing) = 0;
  // Takes the payload of a chunk of a message's sum from the workspace, with one_shot the payloads of all ranks. It is
  // called in any thread, but not after the sum is done.
  virtual void take(const Allreduce& sum, int64_t message, int64_t chunk, const uint8_t* payload, int64_t bytes) = 0;
};

class Running;

// Begins a sum. Returns when the pool has encoded this rank's messages. `first`: the buffers of the first message. In
// each buffer, the other messages of the batch follow the first.
std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first,
                               const cpu::Pool& pool);

// Begins a sum among the devices of this process first. `inside`: these devices, in the order in which their leaves are
// added. Returns at once. `begun` is called when nothing reads the buffers any more.
std::shared_ptr<Running> begin_inside(std::shared_ptr<Net> net, Group group, Group inside, Allreduce allreduce,
                                      Allreduce::Inputs first, Done begun);

// Ends a sum: lets it write its outputs, then calls `done`. All buffers are in use until then.
void end(const std::shared_ptr<Running>& running, Allreduce::Outputs first, Done done);

// Returns the arguments with which a sum began.
const Allreduce& asked(const Running& running);

// Begins a sum of messages whose leaves a device has (Allreduce::device). Returns when the device knows what to do. If
// the device fails, it doesn't call every Outgoing::ready, and the sum is never done.
std::shared_ptr<Running> begin(std::shared_ptr<Net> net, Group group, Allreduce allreduce, Allreduce::Inputs first);
// Ends it: calls `done` when the device has taken all payloads.
void end(const std::shared_ptr<Running>& running, Done done);
// Then, with sum_feedback, returns the copies of the residuals that the sum has replaced: from `here` to `there`.
std::vector<Device::Copy> replaced(const Running& running, const Allreduce::Outputs& first);

}  // namespace jaxcgx::tcp
