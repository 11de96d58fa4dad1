// The segments of this process, by number: handlers have no state, so an exchange names its segment.
#pragma once

#include "shm/segment.h"

namespace jaxcgx::shm {

// Returns when all ranks have attached.
Or<int64_t> attach(const std::string& name, int64_t rank, int64_t ranks, std::chrono::milliseconds timeout);

// Leaves the other ranks.
void detach(int64_t segment);

// Null after detach.
std::shared_ptr<Segment> find(int64_t segment);

}  // namespace jaxcgx::shm
