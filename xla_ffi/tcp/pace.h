// Paces the bytes that a process sends, like a link with a fixed rate. An idle link accumulates no credit.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace jaxcgx::tcp {

// Limits sent bytes to the number that the link has passed since it became busy.
class Pace {
 public:
  explicit Pace(double rate) : rate_(rate) {}

  bool limits() const { return rate_ > 0; }
  // Tells that an idle link becomes busy.
  void wake() { since_ = Clock::now(); }
  // Returns how many of `wanted` bytes may be sent now. It returns 0 if they are too few to be worth a system call.
  int64_t allows(int64_t wanted) {
    if (!limits()) return wanted;
    const auto now = Clock::now();
    since_ = std::max(since_, now - kMostBehind);
    const double passed = std::chrono::duration<double>(now - since_).count() * rate_;
    const auto most = static_cast<int64_t>(std::min(passed, static_cast<double>(wanted)));
    return most == wanted || static_cast<double>(most) >= rate_ * kWorth ? most : 0;
  }
  // Tells that `bytes` bytes were sent.
  void sent(int64_t bytes) {
    if (!limits()) return;
    const std::chrono::duration<double> took(static_cast<double>(bytes) / rate_);
    since_ += std::chrono::duration_cast<Clock::duration>(took);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kWorth = 1e-3;                        // seconds of the link's rate that are worth a call
  static constexpr std::chrono::milliseconds kMostBehind{100};  // a thread that ran late makes up for at most this

  double rate_;
  Clock::time_point since_;
};

}  // namespace jaxcgx::tcp
