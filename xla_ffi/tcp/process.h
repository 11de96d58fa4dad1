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

// The sums of this process that have begun. A program holds a ticket of each until it ends it.
int64_t keep(std::shared_ptr<Running> running);
// Null for a ticket that isn't out.
std::shared_ptr<Running> take(int64_t ticket);

// Takes over the connections of this process, once. See Net::make.
std::optional<Failure> start(int64_t process, std::vector<Connection> connections, std::chrono::milliseconds silence);

// Before this process ends: the others learn at once that it takes part no longer.
void leave();

}  // namespace jaxcgx::tcp
