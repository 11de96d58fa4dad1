#include "shm/segments.h"

#include <map>
#include <mutex>

namespace jaxcgx::shm {
namespace {

struct Segments {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Segment>> by_number;
  int64_t last = 0;
};

Segments& segments() {
  // Never destroyed: an XLA program may still be running when the process ends.
  static Segments& all = *new Segments;
  return all;
}

}  // namespace

Or<int64_t> attach(const std::string& name, int64_t rank, const std::vector<int64_t>& processes,
                   std::chrono::milliseconds timeout) {
  auto attached = Segment::attach(name, rank, processes, timeout);
  if (const auto* failure = std::get_if<Failure>(&attached)) return *failure;
  std::lock_guard<std::mutex> lock(segments().mutex);
  segments().by_number[++segments().last] = std::get<0>(attached);
  return segments().last;
}

void detach(int64_t segment) {
  std::shared_ptr<Segment> detached;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(segments().mutex);
  const auto found = segments().by_number.find(segment);
  if (found == segments().by_number.end()) return;
  detached.swap(found->second);
  segments().by_number.erase(found);
}

void leave() {
  std::lock_guard<std::mutex> lock(segments().mutex);
  for (const auto& [number, segment] : segments().by_number) segment->ring().leave();
}

std::shared_ptr<Segment> find(int64_t segment) {
  std::lock_guard<std::mutex> lock(segments().mutex);
  const auto found = segments().by_number.find(segment);
  return found == segments().by_number.end() ? nullptr : found->second;
}

}  // namespace jaxcgx::shm
