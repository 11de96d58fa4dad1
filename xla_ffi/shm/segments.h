// The segments of this process, by number: handlers have no state, so an exchange names its segment.
#pragma once

#include "shm/segment.h"

namespace jaxcgx::shm {

// Returns when all ranks, which are these processes, have attached.
Or<int64_t> attach(const std::string& name, int64_t rank, const std::vector<int64_t>& processes,
                   std::chrono::milliseconds timeout);

// Leaves the other ranks.
void detach(int64_t segment);

// Leaves the other ranks of all segments, because this process ends. May be called while an exchange is running here.
void leave();

// Null after detach.
std::shared_ptr<Segment> find(int64_t segment);

}  // namespace jaxcgx::shm
