// Memory that processes of a host share. It has no name in any file system, so it is freed when the last process ends,
// even if the processes are killed.
#pragma once

#include <memory>
#include <string>

#include "shm/ring.h"

namespace jaxcgx::shm {

// Makes shared memory for `ranks` ranks. Returns its name, "PROCESS:DESCRIPTOR:RANDOM". The creator keeps the memory
// open until it attaches.
Or<std::string> create(int64_t ranks);

class Segment {
 public:
  // Attaches this process as `rank`. Returns when all ranks have joined. `processes` are the process ids of the ranks.
  static Or<std::shared_ptr<Segment>> attach(const std::string& name, int64_t rank,
                                             const std::vector<int64_t>& processes, std::chrono::milliseconds timeout);
  ~Segment();

  Ring& ring() { return *ring_; }

 private:
  Segment(void* memory, int64_t ranks) : memory_(memory), ranks_(ranks) {}

  void* const memory_;
  const int64_t ranks_;
  std::unique_ptr<Ring> ring_;
};

}  // namespace jaxcgx::shm
