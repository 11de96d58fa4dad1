// Memory for the payloads of exchanges. XLA does not allocate it, because XLA would reuse the memory of a call for
// later operations, and these operations would wait for the call to end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "cpu/pages.h"

namespace jaxcgx::tcp {

constexpr int64_t kLine = 64;  // bytes of a cache line

constexpr int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Gets memory of a size, or nullptr, and gives it back. Without `give_back`, a pool keeps all of its memory.
struct Memory {
  std::function<uint8_t*(int64_t bytes)> get;
  std::function<void(uint8_t*)> give_back;
};

inline Memory memory_on_the_heap() {
  const auto get = [](int64_t bytes) {
    auto* const fresh =
        static_cast<uint8_t*>(std::aligned_alloc(kLine, static_cast<size_t>(std::max(whole_lines(bytes), kLine))));
    if (fresh != nullptr) cpu::ask_for_large_pages(fresh, bytes);
    return fresh;
  };
  return {get, [](uint8_t* p) { std::free(p); }};
}

// A pool of memory blocks. A block that is given back is kept for the next request of the same size, which saves page
// faults. The kept bytes never exceed the peak of the bytes in use.
class Workspaces : public std::enable_shared_from_this<Workspaces> {
 public:
  explicit Workspaces(Memory memory = memory_on_the_heap()) : memory_(std::move(memory)) {}
  ~Workspaces() {
    for (const auto& [bytes, p] : kept_) {
      if (memory_.give_back) memory_.give_back(p);
    }
  }

  // Returns memory, or nullptr if none is left. It is given back when the last copy of the pointer is destroyed.
  std::shared_ptr<uint8_t> take(int64_t bytes) {
    uint8_t* p = find(bytes);
    if (p == nullptr) p = memory_.get(bytes);
    if (p == nullptr) return nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      in_use_ += bytes;
      most_ = std::max(most_, in_use_);
    }
    return {p, [self = shared_from_this(), bytes](uint8_t* p) { self->give_back(bytes, p); }};
  }

  int64_t kept_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kept_bytes_;
  }

 private:
  // Returns a block that is kept, or nullptr.
  uint8_t* find(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->first != bytes) continue;
      uint8_t* const found = it->second;
      kept_bytes_ -= bytes;
      kept_.erase(it);
      return found;
    }
    return nullptr;
  }

  void give_back(int64_t bytes, uint8_t* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    in_use_ -= bytes;
    kept_.emplace_back(bytes, p);
    kept_bytes_ += bytes;
    for (; memory_.give_back && kept_bytes_ > most_; kept_.pop_front()) {
      kept_bytes_ -= kept_.front().first;
      memory_.give_back(kept_.front().second);
    }
  }

  const Memory memory_;
  std::mutex mutex_;
  std::list<std::pair<int64_t, uint8_t*>> kept_;  // {bytes, memory}, the oldest first
  int64_t kept_bytes_ = 0, in_use_ = 0, most_ = 0;
};

}  // namespace jaxcgx::tcp
