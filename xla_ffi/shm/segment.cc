#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace jaxcgx::shm {
namespace {

// The header is before the ring. It takes a page, so that the ring is aligned.
struct Header {
  static constexpr uint64_t kMagic = 0x6a61786367780001;  // "jaxcgx", and the version of this memory's format
  static constexpr int64_t kBytes = 4096;

  uint64_t magic, random;
  int64_t ranks;
};

// With these seals, no process can shrink the memory. Otherwise an access to a mapped page could raise SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

int64_t bytes_of(int64_t ranks) { return Header::kBytes + Ring::bytes(ranks); }

struct Descriptor {
  int number;
  explicit Descriptor(int n) : number(n) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

Failure because(const std::string& call) { return {call + ": " + std::strerror(errno)}; }

}  // namespace

Or<std::string> create(int64_t ranks) {
  if (ranks < 1 || ranks > kMostRanks)
    return Failure{"expected 1 to " + std::to_string(kMostRanks) + " ranks, got " + std::to_string(ranks)};
  Descriptor memory(memfd_create("jaxcgx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.number < 0) return because("memfd_create");
  // Allocate all pages now. If a page could not be allocated later, the process that touches it would be killed.
  int error;
  do error = posix_fallocate(memory.number, 0, bytes_of(ranks));
  while (error == EINTR);
  if (error != 0) {
    return Failure{"no memory for the " + std::to_string(bytes_of(ranks)) + " bytes that " + std::to_string(ranks) +
                   " ranks share: " + std::strerror(error) + "; free some, or raise the limit of the container"};
  }
  Header header{Header::kMagic, 0, ranks};
  if (getrandom(&header.random, sizeof header.random, 0) != sizeof header.random) return because("getrandom");
  if (pwrite(memory.number, &header, sizeof header, 0) != sizeof header) return because("pwrite");
  if (fchmod(memory.number, 0600) != 0) return because("fchmod");
  if (fcntl(memory.number, F_ADD_SEALS, kSeals) != 0) return because("fcntl");
  char name[64];
  std::snprintf(name, sizeof name, "%d:%d:%llx", getpid(), memory.number,
                static_cast<unsigned long long>(header.random));
  memory.number = -1;  // attach closes it
  return std::string(name);
}

Or<std::shared_ptr<Segment>> Segment::attach(const std::string& name, int64_t rank,
                                             const std::vector<int64_t>& processes, std::chrono::milliseconds timeout) {
  const auto ranks = static_cast<int64_t>(processes.size());
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks) {
    return Failure{"expected a rank of 1 to " + std::to_string(kMostRanks) + ", got rank " + std::to_string(rank) +
                   " of " + std::to_string(ranks)};
  }
  int process, number;
  unsigned long long random;
  if (std::sscanf(name.c_str(), "%d:%d:%llx", &process, &number, &random) != 3)
    return Failure{"expected a name that create gave, got '" + name + "'"};
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  Descriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (file.number < 0) {
    return Failure{because(path).what +
                   "; the ranks must be living processes of one host and one user, in one container or in containers "
                   "that share their processes"};
  }
  Header header{};
  struct stat status{};
  const int seals = fcntl(file.number, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || pread(file.number, &header, sizeof header, 0) != sizeof header ||
      header.magic != Header::kMagic || header.random != random) {
    return Failure{"'" + name + "' is not, or no longer, the memory of ranks of this version of jaxcgx"};
  }
  if (header.ranks != ranks || fstat(file.number, &status) != 0 || status.st_size != bytes_of(ranks)) {
    return Failure{"'" + name + "' is for " + std::to_string(header.ranks) + " ranks, got rank " +
                   std::to_string(rank) + " of " + std::to_string(ranks)};
  }
  const Descriptor created(process == getpid() ? number : -1);  // stays open until all ranks have opened it
  void* memory = mmap(nullptr, bytes_of(ranks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.number, 0);
  if (memory == MAP_FAILED) return because("mmap");
  std::shared_ptr<Segment> segment(new Segment(memory, ranks));
  segment->ring_ = std::make_unique<Ring>(static_cast<uint8_t*>(memory) + Header::kBytes, rank, ranks, timeout);
  if (const Status error = segment->ring_->join(processes)) return Failure{error->message};
  return segment;
}

Segment::~Segment() {
  ring_.reset();
  munmap(memory_, bytes_of(ranks_));
}

}  // namespace jaxcgx::shm
