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

// The sums of this process that have begun and have not been ended. Each has a ticket, which a program ends, the same
// one or a later one. Tickets are not 0, and those of one process mean nothing to another.
constexpr int64_t kMostBegun = 10'000;
int64_t begun();
uint64_t keep(std::shared_ptr<Running> running);
// Null for a ticket that isn't out.
std::shared_ptr<Running> take(uint64_t ticket);

// Takes over the connections of this process, once. See Net::make.
std::optional<Failure> start(int64_t process, std::vector<Connection> connections, std::chrono::milliseconds silence,
                             double pace);

// Before this process ends: the others learn at once that it takes part no longer.
void leave();

}  // namespace jaxcgx::tcp
