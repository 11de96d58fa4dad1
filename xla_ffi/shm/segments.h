// The segments of this process, by number. Handlers have no state, so each exchange gives the number of its segment.
#pragma once

#include "shm/segment.h"

namespace jaxcgx::shm {

// Attaches this process as `rank`. Returns the segment's number when all ranks have attached. `processes` are the
// process ids of the ranks.
Or<int64_t> attach(const std::string& name, int64_t rank, const std::vector<int64_t>& processes,
                   std::chrono::milliseconds timeout);

// Leaves the other ranks of a segment.
void detach(int64_t segment);

// Leaves the other ranks of all segments, because this process ends. It may be called while an exchange is running
// here.
void leave();

// Returns a segment; null after detach.
std::shared_ptr<Segment> find(int64_t segment);

}  // namespace jaxcgx::shm
