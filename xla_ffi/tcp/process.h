// The connections of this process, which all of its exchanges share.
#pragma once

#include <variant>

#include "tcp/allreduce.h"
#include "tcp/collectives.h"
#include "tcp/net.h"
#include "tcp/workspaces.h"

namespace jaxcgx::tcp {

// Returns the connections; null before start(). Never destroyed: an XLA program may still be running when the process
// ends.
std::shared_ptr<Net>& the_net();

// Returns the memory for payloads. Never destroyed, either.
Workspaces& the_workspaces();

// The sums and transfers of this process that have begun and have not been ended. Each has a ticket. The program that
// began one, or a later program, ends it with the ticket. A ticket is not 0, and is valid only in its process.
using Begun = std::variant<std::shared_ptr<Running>, std::shared_ptr<Transfer>>;
constexpr int64_t kMostBegun = 10'000;
// Returns the number of these.
int64_t begun();
// Adds one of a device and returns its ticket.
uint64_t keep(Begun begun, int32_t device);
// Removes the one of a device with this ticket and returns it. If there is none, the pointer is null.
Begun take(uint64_t ticket, int32_t device);

// A ticket in the arrays of a program: two words, the same for each message of a batch.
constexpr int64_t kTicketBytes = 8;
inline void write_ticket(uint64_t ticket, int64_t batch, uint32_t* words) {
  for (int64_t i = 0; i < batch; ++i) {
    words[2 * i] = static_cast<uint32_t>(ticket);
    words[2 * i + 1] = static_cast<uint32_t>(ticket >> 32);
  }
}
inline uint64_t ticket_of(const uint32_t* words) { return words[0] | uint64_t{words[1]} << 32; }

// Takes over the connections of this process. It can be called only once. See Net::make.
std::optional<Failure> start(int64_t process, std::vector<Connection> connections, int64_t devices,
                             std::chrono::milliseconds silence, double pace);

// Names the devices of this process: XLA's ordinals for them, in the order of their numbers.
void name_devices(std::vector<int64_t> ordinals);
// Returns the number of a device; -1 if it has no name.
int64_t number_of(int64_t ordinal);

// Tells the other processes at once that this process has left. Call it before the process ends.
void leave();

// Ends the exchanges that are under way, if any, and tells the other processes that this process has left.
void interrupt();

}  // namespace jaxcgx::tcp
