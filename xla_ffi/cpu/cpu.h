// The native operations on a CPU: raw pointers in, bytes out. No XLA here; a Pool says how to run a task elsewhere.
//
// Every buffer may hold `batch` messages one after another. Sizes are the caller's business: handlers check them.
#pragma once

#include <functional>

#include "codec/layout.h"

namespace jaxcgx::cpu {

struct Pool {
  int64_t threads;  // that can run tasks, the calling one among them
  std::function<void(std::function<void()>)> schedule;
};

struct Encode {
  const Layout& layout;
  int64_t batch;
  const void* const* leaves;
  const int64_t* leaf_ids;        // what the noise of a leaf is keyed by
  const uint32_t* keys;           // [batch, 2]; null where the codec draws no noise
  const float* const* residuals;  // null without feedback: added to the leaves before encoding,
  float* const* new_residuals;    // and what encoding lost; may be the same memory
  uint8_t* payload;               // [batch, chunks, chunk_bytes]
  int64_t only = -1;              // of the chunks this one alone, payload [batch, chunk_bytes]; -1: all
};
void encode(const Encode& args, const Pool& pool);

struct Decode {
  const Layout& layout;
  int64_t batch;
  const uint8_t* payload;  // [batch, chunks, chunk_bytes]
  void* const* leaves;
  int64_t only = -1;  // as of Encode
};
void decode(const Decode& args, const Pool& pool);

// Sums one chunk of `ranks` messages in rank order, in fp32, and divides by `divisor`.
struct Reduce {
  const Layout& layout;
  int64_t batch, ranks;
  const uint8_t* payloads;  // [batch, ranks, chunk_bytes]
  const int32_t* where;     // [batch, 2]: which chunk the payloads are, and which rank's is replaced by `own`
  const void* const* own;   // that rank's leaves, whole and raw; null: every payload counts
  float divisor;
  // Either the sum itself (one chunk only),
  float* const* leaves;
  // or the sum as a new payload [batch, of_sum(layout, ranks).chunk_bytes].
  uint8_t* payload;
  float* const* residuals;  // null without feedback: of whole leaves; the chunk's are added to the sum before it is
                            // divided, and become what encoding lost
  const int64_t* leaf_ids;
  const uint32_t* keys;
};
void reduce(const Reduce& args, const Pool& pool);

// 0 where the payload of TopK has an element.
struct Clear {
  const Layout& layout;
  int64_t batch;
  const uint8_t* payload;  // [batch, chunks, chunk_bytes]
  void* const* arrays;     // of the leaves' sizes and dtypes
};
void clear(const Clear& args, const Pool& pool);

}  // namespace jaxcgx::cpu
