// The connections of this process, which all its exchanges share.
#pragma once

#include "tcp/net.h"

namespace jaxcgx::tcp {

// Null before listen(). Never destroyed: a program may still run when the process ends.
std::shared_ptr<Net>& the_net();

// The port at which this process waits for the others. Once.
Or<int> listen();

// Returns when all processes are connected.
std::optional<Failure> connect(int64_t process, std::vector<Address> addresses, const std::string& token,
                               std::chrono::milliseconds timeout);

}  // namespace jaxcgx::tcp
