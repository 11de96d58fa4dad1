// Counts the parts of some work, and says when all are complete.
#pragma once

#include <functional>
#include <mutex>

#include "status.h"

namespace jaxcgx::tcp {

using Done = std::function<void(const Status&)>;

class Completion {
 public:
  // Calls `done` once, with the first error of any part.
  Completion(int64_t parts, Done done) : left_(parts), done_(std::move(done)) {}

  // One more part, while others are incomplete.
  void add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++left_;
  }
  void part(const Status& status = std::nullopt) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (status && !error_) error_ = status;
      if (--left_ > 0) return;
    }
    done_(error_);
  }

 private:
  std::mutex mutex_;
  int64_t left_;
  Status error_;
  const Done done_;
};

}  // namespace jaxcgx::tcp
