// Counts the parts of some work, and calls a function when all parts are complete.
#pragma once

#include <functional>
#include <mutex>

#include "status.h"

namespace jaxcgx::tcp {

using Done = std::function<void(const Status&)>;

class Completion {
 public:
  // `done` is called once, with the first error of any part.
  Completion(int64_t parts, Done done) : left_(parts), done_(std::move(done)) {}

  // Adds a part. Other parts must still be incomplete.
  void add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++left_;
  }
  // Tells that a part is complete.
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
