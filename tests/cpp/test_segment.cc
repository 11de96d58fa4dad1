// Ranks are processes. Tests check the errors if one fails. test_shm.py tests what they exchange.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "check.h"
#include "exchanges.h"
#include "shm/segment.h"

using namespace jaxcgx;
using shm::Operation;
using test::has;

namespace {

// Runs a job in each of several processes, and collects what each reports. A process that hangs is killed.
class Processes {
 public:
  using Body = std::function<std::string(shm::Ring&, int64_t rank)>;

  void start(const std::function<std::string()>& body) {
    auto* message = static_cast<char*>(mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    std::strcpy(message, "killed");
    const pid_t process = fork();
    if (process == 0) {
      alarm(60);
      std::strncpy(message, body().c_str(), kMost - 1);
      raise(SIGSTOP);  // stays alive as long as other ranks may read
      _exit(0);
    }
    started_.push_back({process, message});
  }

  // The ranks of a segment that this process makes. `dies`: the rank that is killed before it attaches.
  void start(int64_t ranks, const Body& body, std::chrono::milliseconds timeout = std::chrono::seconds(30),
             int64_t dies = -1) {
    const std::string name = name_of(ranks);
    const auto bytes = static_cast<size_t>(ranks) * sizeof(pid_t);
    auto* known = static_cast<std::atomic<pid_t>*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      start([=] {
        known[rank] = getpid();
        std::vector<int64_t> processes;
        for (int64_t other = 0; other < ranks; ++other) {
          while (known[other] == 0) usleep(100);
          processes.push_back(known[other]);
        }
        if (rank == dies) raise(SIGKILL);
        auto attached = shm::Segment::attach(name, rank, processes, timeout);
        if (const auto* failure = std::get_if<Failure>(&attached)) return failure->what;
        return body(std::get<0>(attached)->ring(), rank);
      });
    }
    created_.push_back(descriptor_of(name));
  }

  std::vector<std::string> messages() {
    std::vector<std::string> all;
    for (auto& [process, message] : started_) {
      waitpid(process, nullptr, WUNTRACED);
      all.emplace_back(message);
      munmap(message, kMost);
    }
    for (auto& [process, message] : started_) {
      kill(process, SIGKILL);
      waitpid(process, nullptr, 0);
    }
    for (int descriptor : created_) close(descriptor);
    return all;
  }

  static std::string name_of(int64_t ranks) { return std::get<0>(shm::create(ranks)); }
  static int descriptor_of(const std::string& name) { return std::stoi(name.substr(name.find(':') + 1)); }

 private:
  static constexpr size_t kMost = 4096;
  std::vector<std::pair<pid_t, char*>> started_;
  std::vector<int> created_;
};

int64_t open_descriptors() {
  int64_t count = 0;
  DIR* all = opendir("/proc/self/fd");
  while (readdir(all)) ++count;
  closedir(all);
  return count;
}

// Returns the error of attaching in this process.
std::string refusal(const std::string& name, int64_t rank, int64_t ranks) {
  auto attached =
      shm::Segment::attach(name, rank, std::vector<int64_t>(ranks, getpid()), std::chrono::milliseconds(50));
  const auto* failure = std::get_if<Failure>(&attached);
  return failure ? failure->what : "";
}

void deaths() {
  // The kill comes during an exchange, or between two.
  for (const bool in_the_middle : {true, false}) {
    Processes processes;
    processes.start(3, [=](auto& ring, int64_t rank) {
      if (rank == 1) {
        std::thread killer([=] {
          if (in_the_middle) usleep(50000);
          kill(getpid(), SIGKILL);
        });
        if (!in_the_middle) killer.join();
        for (;;) test::run(ring, rank, Operation::kAllToAll, 0, 3000000);
      }
      std::string message;
      while (message.empty()) message = test::run(ring, rank, Operation::kAllToAll, 0, 3000000);
      const std::string again = test::run(ring, rank, Operation::kShift, 1, 1);
      return again == message ? message : "another error: " + again;
    });
    const auto messages = processes.messages();
    CHECK(messages[1] == "killed", messages[1]);
    for (const int64_t rank : {0, 2}) {
      CHECK(has(messages[rank], "rank 1 (process ") && has(messages[rank], "has ended"), messages[rank]);
      CHECK(has(messages[rank], "all_to_all of 3000000 bytes"), messages[rank]);
    }
  }
}

void deaths_before_they_attach() {
  Processes processes;
  processes.start(3, [](auto&, int64_t) { return std::string("attached"); }, std::chrono::minutes(10), 1);
  const auto messages = processes.messages();
  for (const int64_t rank : {0, 2})
    CHECK(has(messages[rank], "rank 1 (process ") && has(messages[rank], ") has ended"), messages[rank]);
}

void lateness() {
  Processes processes;
  processes.start(
      2,
      [](auto& ring, int64_t rank) {
        if (rank == 1) usleep(600000);
        std::string message;
        while (message.empty()) message = test::run(ring, rank, Operation::kBroadcast, 1, 10);
        return message;
      },
      std::chrono::milliseconds(300));
  const auto messages = processes.messages();
  CHECK(has(messages[0], "broadcast from rank 1 of 10 bytes: rank 0 waits for rank 1") &&
            has(messages[0], "has not come within 300 ms"),
        messages[0]);
  CHECK(has(messages[1], "rank 0 (process ") && has(messages[1], "gave up"), messages[1]);
}

void disagreements() {
  for (const int64_t operation : {0, 1, 2, 3}) {
    Processes processes;
    processes.start(3, [=](auto& ring, int64_t rank) {
      const auto same = static_cast<Operation>(operation),
                 other = operation == 3 ? Operation::kShift : Operation::kBroadcast;
      if (rank == 2) return test::run(ring, rank, other, 1, 500000);
      return test::run(ring, rank, same, operation >= 2 ? 2 : 0, 1000000);
    });
    for (const std::string& message : processes.messages())
      CHECK_ERROR(message, "every rank must run the same exchanges", "gave up");
  }
  // In a broadcast from rank 0, ranks 1 and 2 receive nothing from each other.
  Processes processes;
  processes.start(
      3, [](auto& ring, int64_t rank) { return test::run(ring, rank, Operation::kBroadcast, 0, rank == 2 ? 11 : 10); });
  for (const std::string& message : processes.messages()) CHECK_ERROR(message, "10 bytes", "gave up");
}

// Random bytes fill all of the memory. The exchanges of the others end, with an error or with wrong bytes.
void garbage() {
  for (int seed = 0; seed < 20; ++seed) {
    const auto bytes = static_cast<size_t>(shm::Ring::bytes(2));
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Processes processes;
    for (int64_t rank = 0; rank < 2; ++rank) {
      processes.start([=] {
        shm::Ring ring(memory, rank, 2, std::chrono::milliseconds(500));
        if (ring.join({getpid(), getpid()})) return std::string("not joined");
        std::string message;
        if (rank == 0) {
          for (int64_t i = 0; i < 100 && message.empty(); ++i)
            message = test::run(ring, rank, Operation::kAllToAll, 0, 1000000, i);
          return "ended: " + message;
        }
        std::mt19937_64 random(seed);
        for (int i = 0; i < 3; ++i) test::run(ring, rank, Operation::kAllToAll, 0, 1000000, i);
        for (size_t at = 0; at < bytes / 8; ++at) static_cast<uint64_t*>(memory)[at] = random();
        return std::string("scribbled");
      });
    }
    const auto messages = processes.messages();
    CHECK(has(messages[0], "ended: ") && messages[0] != "ended: ", messages[0]);
    CHECK(messages[1] == "scribbled", messages[1]);
    munmap(memory, bytes);
  }
}

void names() {
  const int64_t before = open_descriptors();
  for (const char* bad : {"", "x", "1:2", "jaxcgx"})
    CHECK_ERROR(refusal(bad, 0, 1), "expected a name that create gave");
  CHECK_ERROR(refusal("2147483647:3:1", 0, 1), "No such file or directory; the ranks must be living processes");
  for (const int64_t ranks : {0, 1025})
    CHECK_ERROR(std::get<1>(shm::create(ranks)).what, "expected 1 to 1024 ranks, got " + std::to_string(ranks));
  // As if there were too little memory.
  struct rlimit limit;
  getrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small{1 << 20, limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto failed = shm::create(2);
  setrlimit(RLIMIT_FSIZE, &limit);
  CHECK_ERROR(std::get<1>(failed).what, "bytes that 2 ranks share: File too large; free some");
  const std::string name = Processes::name_of(2);
  CHECK(name != Processes::name_of(2), name);
  CHECK_ERROR(refusal(name, 2, 2), "got rank 2 of 2");
  CHECK_ERROR(refusal(name, -1, 2), "got rank -1 of 2");
  CHECK_ERROR(refusal(name, 0, 3), "is for 2 ranks, got rank 0 of 3");
  CHECK_ERROR(refusal(name + "0", 0, 2), "is not, or no longer, the memory");
  // A file that is not the segment's stays open.
  const int file = open("/dev/null", O_RDWR);
  CHECK_ERROR(refusal(std::to_string(getpid()) + ":" + std::to_string(file) + ":1", 0, 1),
              "is not, or no longer, the memory");
  CHECK(fcntl(file, F_GETFD) >= 0, "");
  close(file);
  // No process can make the memory smaller or larger.
  const int memory = Processes::descriptor_of(name);
  CHECK(ftruncate(memory, 1) != 0 && ftruncate(memory, 1 << 30) != 0, "");
  CHECK_ERROR(refusal(name, 0, 2), "rank 1 has not come within 50 ms");
  CHECK(fcntl(memory, F_GETFD) < 0, "the creator, having attached, closes it");
  close(memory + 1);  // of the second name
  CHECK(open_descriptors() == before,
        std::to_string(before) + " before, " + std::to_string(open_descriptors()) + " after");
}

void doubles() {
  const std::string name = Processes::name_of(2);
  Processes processes;
  for (int i = 0; i < 2; ++i) processes.start([=] { return refusal(name, 1, 2); });
  const auto messages = processes.messages();
  for (const std::string& message : messages)
    CHECK_ERROR(message, "there already is a rank 1 (process ", "rank 0 has not come");
  CHECK_ERROR(messages[0] + messages[1], "there already is a rank 1");
  close(Processes::descriptor_of(name));
}

}  // namespace

int main() {
  names();
  doubles();
  deaths();
  deaths_before_they_attach();
  lateness();
  disagreements();
  garbage();
  return test::finish();
}
