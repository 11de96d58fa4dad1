// The connections of this process, which all its exchanges share.
#pragma once

#include "tcp/allreduce.h"
#include "tcp/net.h"
#include "tcp/workspaces.h"

namespace jaxcgx::tcp {

// Null before start(). Never destroyed: a program may still run when the process ends.
std::shared_ptr<Net>& the_net();

// Never destroyed, either.
Workspaces& the_workspaces();

// The sums of this process that have begun and have not been ended. Each has a ticket. The program that began it, or a
// later one, ends it with the ticket. A ticket is not 0, and is valid only in its process.
constexpr int64_t kMostBegun = 10'000;
int64_t begun();
uint64_t keep(std::shared_ptr<Running> running);
// Null if no sum has this ticket.
std::shared_ptr<Running> take(uint64_t ticket);

// Takes over the connections of this process, once. See Net::make.
std::optional<Failure> start(int64_t process, std::vector<Connection> connections, std::chrono::milliseconds silence,
                             double pace);

// Call this before the process ends. It tells the others at once that this process has left.
void leave();

}  // namespace jaxcgx::tcp
