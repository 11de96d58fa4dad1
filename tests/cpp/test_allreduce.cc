// Sums among processes whose devices add their leaves in memory first. Each process is a Net, and each device a thread.
#include <random>

#include "check.h"
#include "nets.h"
#include "tcp/allreduce.h"

using namespace jaxcgx;
using namespace jaxcgx::test;

namespace {

constexpr int64_t kProcesses = 2, kDevices = 3, kSize = 50'001;  // the last share is padded

// A device's sum of two leaves, whole numbers of which each sum is exact. Its buffers have exact sizes, and are freed
// as soon as they may be, so that AddressSanitizer sees a late access.
struct Sum {
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  std::vector<float> out;
  std::vector<uint16_t> half_out;
  Waiter begun, ended;
  std::shared_ptr<tcp::Running> running;

  Sum(const std::shared_ptr<Net>& net, int64_t process, int64_t device, bool two_shot, int64_t number,
      std::chrono::milliseconds timeout) {
    const std::vector<Leaf> whole{{kSize, DType::kF32}, {77, DType::kBF16}};
    std::vector<Leaf> shares;
    for (const Leaf& leaf : whole) shares.push_back({div_up(leaf.size, kDevices), DType::kF32});
    const Codec raw{};
    tcp::Allreduce a{Layout(raw, shares, two_shot ? 4 : 3), kProcesses, 1, two_shot};
    if (two_shot) a.parents = {-1, 0, 1, -1};
    a.digest = number;
    a.ids = {0, 1};
    a.whole = whole;
    a.workspace = {new uint8_t[static_cast<size_t>(a.workspace_bytes(process))], std::default_delete<uint8_t[]>()};
    for (int64_t i = 0; i < kSize; ++i) floats.push_back(static_cast<float>(i % 1000 + 7 * process + device + number));
    for (int i = 0; i < 77; ++i) halves.push_back(0x3f80);  // 1.0
    const std::vector<int64_t> mine(kProcesses, device), here(kDevices, process);
    running = tcp::begin_inside(net, {{0, 1}, mine, process, timeout}, {here, {0, 1, 2}, device, timeout}, std::move(a),
                                {{floats.data(), halves.data()}, {}, {}}, begun.done());
  }

  // Returns the error, or "wrong sums", or "".
  std::string result(int64_t number) {
    if (std::string error = begun.wait(); !error.empty()) return error;
    floats = {}, halves = {};
    out.resize(kSize), half_out.resize(77);
    tcp::end(running, {{}, {out.data(), half_out.data()}, {}}, ended.done());
    running = nullptr;
    if (std::string error = ended.wait(); !error.empty()) return error;
    bool right = true;
    for (int64_t i = 0; i < kSize; ++i)
      right &= out[static_cast<size_t>(i)] == static_cast<float>(6 * (i % 1000) + 21 + 6 + 6 * number);
    for (const uint16_t half : half_out) right &= half == 0x40c0;  // 6.0
    return right ? "" : "wrong sums";
  }
};

// Connects processes, and runs body(net, process, device) in a thread for each device. As in a process, a Net is never
// destroyed: the last function that holds it may be one that it calls itself.
void each_device(const std::function<void(const std::shared_ptr<Net>&, int64_t, int64_t)>& body) {
  static auto& all = *new std::vector<std::vector<std::shared_ptr<Net>>>;
  const std::vector<std::shared_ptr<Net>>& nets = all.emplace_back(connected(kProcesses, 30s, kDevices));
  each_rank(kProcesses * kDevices, [&](int64_t i) {
    const int64_t process = i / kDevices;
    body(nets[static_cast<size_t>(process)], process, i % kDevices);
  });
}

void test_sums() {
  each_device([](const auto& net, int64_t process, int64_t device) {
    std::mt19937 random(static_cast<uint32_t>(process * kDevices + device));
    for (int64_t number = 1; number < 30; ++number) {
      if (random() % 4 == 0) std::this_thread::sleep_for(1ms);
      Sum first(net, process, device, number % 2, number, 30s),
          second(net, process, device, number % 3, number + 1, 30s);
      CHECK_NO_ERROR(first.result(number) + second.result(number + 1));
    }
  });
}

// A device that doesn't come is named in its process. All devices get an error, and their buffers are free.
void test_a_late_device() {
  each_device([](const auto& net, int64_t process, int64_t device) {
    if (process == 0 && device == 2) return;
    CHECK_ERROR(Sum(net, process, device, true, 1, 300ms).result(1),
                process == 0 ? "device 2 of this process), which has not come within 300 ms" : "process 0");
  });
}

// A process ends at any time. The devices of the other get errors or their sums, and none waits for ever.
void test_a_process_ends() {
  for (int64_t after = 0; after < 40; ++after) {
    each_device([after](const auto& net, int64_t process, int64_t device) {
      for (int64_t number = 1; number < 5; ++number) {
        if (process == 1 && device == after % 3 && number == 2) {
          std::this_thread::sleep_for(after * 50us);
          net->leave();
        }
        const std::string error = Sum(net, process, device, number % 2, number, 30s).result(number);
        CHECK(error.empty() || has(error, "ended or left") || has(error, "this process ends"), error);
        if (!error.empty()) return;
      }
    });
  }
}

void test_devices_that_differ() {
  each_device([](const auto& net, int64_t process, int64_t device) {
    CHECK_ERROR(Sum(net, process, device, true, 1 + (device == 1), 30s).result(1), "has other arrays, or another codec",
                "gave up");
  });
}

}  // namespace

int main() {
  test_sums();
  test_a_late_device();
  test_a_process_ends();
  test_devices_that_differ();
  return finish();
}
