// Threads that run tasks. A thread is started if a task finds no idle thread, up to `most` threads or to the limit of
// the system. Tasks start in the order of the calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace jaxcgx::tcp {

class Threads {
 public:
  // Each thread calls `first` before its first task.
  explicit Threads(int64_t most, std::function<void()> first = [] {}) : most_(most), first_(std::move(first)) {}

  void run(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (static_cast<int64_t>(tasks_.size()) <= idle_ || begun_ == most_ || !start()) wake_.notify_one();
  }

 private:
  // Starts a thread. Returns false if there are too many threads, and some of these are ours.
  bool start() {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      if (begun_ == 0) throw;
      return false;
    }
    ++begun_;
    return true;
  }

  void work() {
    first_();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      while (!tasks_.empty()) {
        {
          const auto task = std::move(tasks_.front());  // destroyed without the lock, as it may own much
          tasks_.pop_front();
          lock.unlock();
          task();
        }
        lock.lock();
      }
      ++idle_;
      wake_.wait(lock, [&] { return !tasks_.empty(); });
      --idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  const int64_t most_;
  const std::function<void()> first_;
  int64_t begun_ = 0, idle_ = 0;
};

}  // namespace jaxcgx::tcp
