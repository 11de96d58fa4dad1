// Processes many pieces in one launch. A table of pieces is a parameter of the kernel, and each thread block finds its
// piece in the table. So no copy to the device is needed.
#pragma once

#include <algorithm>
#include <tuple>

#include "cuda/arithmetic.cuh"
#include "cuda/cuda.h"

namespace jaxcgx::cuda {

template <class... Parameters, class... Arguments>
Status launch(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...), const char* name,
              Arguments&&... arguments) {
  ++launched;
  cudaFuncAttributes unused;  // asking for them loads the kernel
  const cudaError_t error =
      Loading::now ? cudaFuncGetAttributes(&unused, kernel) : cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? Status() : Status{name, error};
}
inline cudaLaunchConfig_t config_of(int64_t blocks, uint32_t threads, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return config;
}

// Adds to a counter. Releases the stores before it, and acquires the stores before the other threads' additions.
CGX_D uint32_t add_in_order(uint32_t* counter, uint32_t x) {
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
#else
  return atomicAdd(counter, x);
#endif
}

// Loads a counter, and acquires the stores before the other threads' additions.
CGX_D uint32_t load_in_order(const uint32_t* counter) {
#if defined(__CUDA_ARCH__)
  uint32_t now;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
#else
  return *counter;
#endif
}

// Waits until all thread blocks of the grid have called this. Each one then sees all stores that the others did before
// their call. All blocks must be resident (Launches). In the emulation, shared memory doesn't keep its contents.
CGX_D void wait_for_all(uint32_t* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t before = add_in_order(arrived, 1), all = before - before % gridDim.x + gridDim.x;
    while (load_in_order(arrived) < all) __nanosleep(20);
  }
  __syncthreads();
}

constexpr int kSlotBits = 30;

// A piece, or the part of a piece that a kernel processes. `slot` is row * chunks + chunk.
struct Entry {
  const void* leaf;  // the first element of the piece
  uint64_t codes;    // offset of the codes from the beginning of the chunk, in bytes
  uint32_t meta;     // offset of the metadata from the beginning of the chunk, in floats
  uint32_t slot : kSlotBits, dtype : 2;
  uint32_t tile;   // index of its first tile among the slot's tiles in this launch
  uint32_t count;  // number of items; each kernel defines the unit
};
// The row of a kernel is what it has to know about a piece beyond the Entry. Each kernel has a struct for it, which is
// made of these parts, and of fields that only this kernel has. Item fills the parts.
struct Draws {
  int64_t start;  // for noise: index in the leaf of the first element
  uint32_t id;    // for noise: id of the leaf
};
struct Residual {
  const float* old;
  float* lost;  // the new residuals
};
// Returns the new residual (codec/operations.h). Only if the error is not finite, the old one is read again.
CGX_D float new_residual(float error, const float* old) { return is_finite(error) ? error : *old; }
struct Sum {
  float* sum;  // the fp32 result
};
// For kernels that may begin before the previous one has ended (Call::early): TopK's, and those of its values.
struct Early {};
struct LargeBuckets {
  uint32_t work;  // offset in the workspace of the memory of the first bucket, in floats
};
template <class T>
struct Without {};
template <bool kIf, class T>
using If = std::conditional_t<kIf, T, Without<T>>;

// Threads of a thread block of the fast kernels. A thread has 32 elements, so a block has the largest fast bucket.
constexpr uint32_t kThreads = 128;
constexpr int64_t kTile = kThreads * kRows * 4;

// An item has at most 2^31 quads, and kernels shift their indices by log_bucket - 5.
constexpr int kMostLogBucket = 36;

// The parameters that are the same for all pieces.
struct Message {
  Codec codec;
  int32_t meta;      // floats of a bucket's metadata
  bool scales;       // blocks of codes have scales, and always all 16 lanes
  uint8_t* payload;  // the encoded payload; the chunk of slot s (with `where`: of row s) is at s * chunk_bytes
  // The payloads to decode. The chunk of slot r (with `where`: of row r) and rank i is at (r * ranks + i) *
  // chunk_bytes.
  const uint8_t* payloads;
  int64_t chunk_bytes;
  uint32_t chunks, ranks;
  // Null: every chunk is processed. Otherwise one chunk of each row: where[2 * i] is the chunk and where[2 * i + 1] the
  // own rank of rows i * lists to i * lists + lists - 1.
  const int32_t* where;
  uint32_t lists;
  const uint32_t* keys;
  float* workspace;
  float divisor, inverse;
  bool exact;          // the divisor is a power of two, so `inverse` is exact
  bool sums;           // the operation sums payloads; also true for one payload
  bool own;            // Entry::leaf has the own rank's elements, which replace its payload
  int32_t log_bucket;  // log2 of the bucket size, rounded up, for the kernels of quads
};

// The most bytes of parameters of a kernel, from sm_70 and CUDA 12.1 on. They are enough for a thousand pieces. Tests
// set fewer.
#if !defined(JAXCGX_PARAMETER_BYTES)
#define JAXCGX_PARAMETER_BYTES 32764
#endif
constexpr int64_t kParameterBytes = JAXCGX_PARAMETER_BYTES;

template <class Row>
struct Table {
  static constexpr bool kRows = !std::is_empty_v<Row>;
  static constexpr int kMost = (kParameterBytes - static_cast<int>(sizeof(Message)) - 64) /
                               static_cast<int>(sizeof(Entry) + (kRows ? sizeof(Row) : 0));
  Message message;
  uint32_t first, count;  // first: the slot (with `where`: the row) of tile (0, 0); count: number of entries
  uint32_t width, lines;  // numbers of tiles in x and y, which is the grid unless all thread blocks are resident
  Entry entries[kMost];
  Row rows[kRows ? kMost : 1];
};

constexpr uint32_t kNowhere = 0xffffffffu;

// A tile, which is the work of a thread block. Tiles with the same y share a slot.
struct Place {
  uint32_t row, slot, rank;  // rank: the own rank; m.ranks: none; kNowhere: `where` is out of range
  int index;                 // index of the entry in the table; -1: nothing to do
  uint32_t tile;             // index of the tile in the entry
};
// Waits until the previous kernel has ended, if this one may have begun before (Call::early). The next one may now be
// launched.
template <class Row>
CGX_D void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (std::is_base_of_v<Early, Row>) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
#endif
}
template <class Row>
CGX_D Place place_of(const Table<Row>& t, uint32_t x, uint32_t y) {
  const Message& m = t.message;
  Place p;
  p.index = -1;
  p.tile = 0;
  p.rank = m.ranks;
  p.row = p.slot = t.first + y;
  if (m.where != nullptr) {
    const int32_t* where = m.where + 2 * (p.row / m.lists);
    const auto chunk = static_cast<uint32_t>(where[0]);
    if (m.own) p.rank = static_cast<uint32_t>(where[1]);
    // The result is NaN, in the layout of the chunk or, if there is no such chunk, of chunk 0.
    if (chunk >= m.chunks || (m.own && p.rank >= m.ranks)) p.rank = kNowhere;
    p.slot = p.row * m.chunks + (chunk < m.chunks ? chunk : 0);
  } else if (m.keys != nullptr) {
    p.row = p.slot / m.chunks;
  }
  // Binary search for the last entry at or before (slot, x).
  int from = 0, to = static_cast<int>(t.count);
  while (from < to) {
    const int middle = (from + to) >> 1;
    const Entry& e = t.entries[middle];
    if (e.slot < p.slot || (e.slot == p.slot && e.tile <= x))
      from = middle + 1;
    else
      to = middle;
  }
  if (from > 0 && t.entries[from - 1].slot == p.slot) {
    p.index = from - 1;
    p.tile = x - t.entries[p.index].tile;
  }
  return p;
}
template <class Row>
CGX_D Place place_of(const Table<Row>& t) {
  wait_for_previous<Row>();
  return place_of(t, blockIdx.x, blockIdx.y);
}

// Returns the chunk of the encoded payload, and the first of those to decode: the payload of rank 0. The other ranks'
// payloads follow, chunk_bytes apart.
CGX_D uint8_t* chunk_of(const Message& m, const Place& p) {
  return m.payload + (m.where != nullptr ? p.row : p.slot) * m.chunk_bytes;
}
CGX_D const uint8_t* payloads_of(const Message& m, const Place& p) {
  return m.payloads + (m.where != nullptr ? p.row : p.slot) * static_cast<int64_t>(m.ranks) * m.chunk_bytes;
}
// Returns the memory in the workspace of a large bucket with so many parts.
CGX_D float* memory_of(const Message& m, const LargeBuckets& row, int64_t bucket, int64_t parts) {
  return m.workspace + row.work + bucket * workspace_floats(m.codec.kind, parts);
}

// The pointers to a message's buffers, in host memory. leaves[i] is leaf i of the first row.
struct Leaves {
  const void* const* leaves = nullptr;      // encode: the input; reduce: the own rank's leaves; decode: the output
  const float* const* residuals = nullptr;  // null: no feedback
  float* const* results = nullptr;          // with feedback: the new residuals; reduce without it: the fp32 sum
  const int64_t* ids = nullptr;
  const int64_t* starts = nullptr;  // per leaf: element 0 draws the noise of this element; null: 0
};

inline uint32_t slot_of(const Layout& l, int64_t row, int64_t chunk) {
  return static_cast<uint32_t>(row * l.chunks() + chunk) & ((1u << kSlotBits) - 1);
}

// A piece, as an item for Launches::add. The caller sets entry.count, and the fields that only this kernel's row has.
template <class Row>
struct Item {
  Entry entry = {};
  Row row = {};

  Item() = default;
  // Makes an item of the elements of a piece from element `at` on. `codes` and `meta` are the offsets of their codes
  // (in bytes) and metadata (in floats) from the piece's.
  Item(const Layout& l, const Leaves& b, int64_t row_index, const Piece& p, int64_t at = 0, int64_t codes = 0,
       int64_t meta = 0) {
    const auto i = static_cast<size_t>(p.leaf);
    const DType dtype = l.leaves[i].dtype;
    const int64_t element = row_index * l.leaves[i].size + p.start + at;
    if (b.leaves != nullptr) entry.leaf = static_cast<const char*>(b.leaves[i]) + element * size_of(dtype);
    entry.codes = static_cast<uint64_t>(p.codes + codes);
    entry.meta = static_cast<uint32_t>(p.meta / 4 + meta);
    entry.slot = slot_of(l, row_index, p.chunk);
    entry.dtype = static_cast<uint32_t>(dtype) & 3u;
    if constexpr (std::is_base_of_v<Draws, Row>) {
      row.start = p.start + at + (b.starts != nullptr ? b.starts[i] : 0);
      if (b.ids != nullptr) row.id = static_cast<uint32_t>(b.ids[i]);
    }
    if constexpr (std::is_base_of_v<Residual, Row>) {
      if (b.residuals != nullptr) row.old = b.residuals[i] + element, row.lost = b.results[i] + element;
    }
    if constexpr (std::is_base_of_v<Sum, Row>) {
      if (b.results != nullptr) row.sum = b.results[i] + element;
    }
  }
};

// Returns an error if a message overflows the fields of the table that have kSlotBits or 32 bits.
inline Status check_size(const Layout& l, int64_t batch) {
  const auto units = [](int64_t elements) { return div_up(elements, kTile) * (kTile / 32); };
  bool fits = batch <= (int64_t{1} << kSlotBits) / l.chunks() && batch * workspace_floats(l) <= UINT32_MAX;
  for (const int64_t end : l.meta_end) fits = fits && end / 4 <= UINT32_MAX;
  if (is_lossless(l.codec.kind)) {  // words of 4 bytes before the overflow, and of 2 in it, are counted in 32 bits
    for (size_t c = 0; c < l.end.size(); ++c)
      fits = fits && l.overflow[c] / 4 <= UINT32_MAX && (l.end[c] - l.overflow[c]) / 2 <= UINT32_MAX;
  }
  for (const Piece& p : l.pieces) fits = fits && units(p.coded) <= UINT32_MAX && units(p.raw) <= UINT32_MAX;
  return fits ? Status() : Status{"table of pieces", cudaErrorInvalidConfiguration};
}

inline Message message_of(const Layout& l) {
  Message m = {};
  m.codec = l.codec;
  m.meta = meta_floats(l.codec);
  m.scales = traits_of(l.codec.kind).scales;
  m.chunk_bytes = l.chunk_bytes;
  m.chunks = static_cast<uint32_t>(l.chunks());
  m.ranks = m.lists = 1;
  m.divisor = m.inverse = 1.0f;
  m.exact = true;
  for (const Piece& p : l.pieces) {
    while (m.log_bucket < kMostLogBucket && int64_t{1} << m.log_bucket < p.bucket) ++m.log_bucket;
  }
  return m;
}

// A message and its buffers: the argument of launchers.
struct Call {
  const Layout& layout;
  int64_t batch;
  Leaves leaves;
  Message message;
  cudaStream_t stream;
  bool clears_gaps = true;  // encoding sets all bytes of a chunk that no element writes to 0
  bool early = false;       // kernels of TopK may begin before the previous one has ended; place_of waits for that
};

// Returns whether kernels may begin early: whether the code that this GPU runs is code that waits. encode.cu
bool begins_early();

// Collects pieces in the order of slots. Launches a kernel whenever the table is full. `Given`: the kernel's parameters
// after the table, which are the same for all pieces.
template <class Row, class... Given>
class Launches {
 public:
  Launches(const Call& call, void (*kernel)(Table<Row>, Given...), const char* name, uint32_t threads,
           const Given&... given)
      : given_(given...), kernel_(kernel), name_(name) {
    static_assert(sizeof(Table<Row>) + (sizeof(Given) + ... + 0) <= kParameterBytes, "");
    table_.message = call.message;
    table_.count = 0;
    config_.blockDim = dim3(threads);
    config_.stream = call.stream;
    config_.attrs = &attribute_;
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.numAttrs = std::is_base_of_v<Early, Row> && call.early ? 1 : 0;
  }

  // From now on, all thread blocks of a launch run at the same time, so that they can wait for each other. They are at
  // most as many as seven eighths of the GPU have room for, and share the tiles. The kernel begins when no other kernel
  // takes this room. An eighth stays free for kernels that run for long, such as NCCL's.
  void make_resident() {
    resident_ = true;
    attribute_.id = cudaLaunchAttributeCooperative;
    attribute_.val.cooperative = 1;
    config_.numAttrs = 1;
    find_room();
  }

  // Adds a piece with so many tiles.
  void add(const Item<Row>& item, int64_t tiles) {
    Entry entry = item.entry;
    const uint32_t y = line(entry.slot);
    if (table_.count == Table<Row>::kMost || (table_.count > 0 && y - table_.first >= kMostLines)) launch();
    if (table_.count == 0)
      table_.first = y, widest_ = next_ = 0;
    else if (entry.slot != table_.entries[table_.count - 1].slot)
      next_ = 0;
    entry.tile = static_cast<uint32_t>(next_);
    next_ += tiles;
    widest_ = std::max(widest_, next_);
    const uint32_t i = table_.count++;
    table_.entries[i] = entry;
    if (Table<Row>::kRows) table_.rows[i] = item.row;
  }

  // Launches the kernel on the remaining pieces. Returns the first error of all launches.
  Status finish() {
    if (table_.count > 0) launch();
    return status_;
  }

 private:
  static constexpr uint32_t kMostLines = 65535;  // CUDA's limit of gridDim.y

  uint32_t line(uint32_t slot) const { return table_.message.where != nullptr ? slot / table_.message.chunks : slot; }

  void launch() {
    table_.width = static_cast<uint32_t>(widest_);
    table_.lines = line(table_.entries[table_.count - 1].slot) - table_.first + 1;
    const int64_t most = resident_ ? UINT32_MAX / table_.lines : INT32_MAX;  // kernels number all tiles in 32 bits
    if (status_.call == nullptr && widest_ > most) status_ = {name_, cudaErrorInvalidConfiguration};
    config_.gridDim = dim3(table_.width, table_.lines);
    if (resident_) config_.gridDim = dim3(static_cast<uint32_t>(std::min(room_, widest_ * table_.lines)));
    if (status_.call == nullptr) {
      status_ = std::apply(
          [&](const Given&... given) { return cuda::launch(config_, kernel_, name_, table_, given...); }, given_);
    }
    table_.count = 0;
  }
  // Finds the number of the kernel's thread blocks that the GPU has room for at the same time.
  void find_room() {
    int device = 0, processors = 0, of_one = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kernel_, static_cast<int>(config_.blockDim.x), 0);
    }
    room_ = int64_t{processors - processors / 8} * of_one;
    if (error != cudaSuccess) status_ = {name_, error};
  }

  Table<Row> table_;
  std::tuple<Given...> given_;
  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attribute_ = {};
  void (*kernel_)(Table<Row>, Given...);
  const char* name_;
  bool resident_ = false;
  int64_t room_ = 0;
  Status status_;
  int64_t widest_ = 0, next_ = 0;
};

}  // namespace jaxcgx::cuda
