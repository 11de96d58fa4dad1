// The arguments of the four operations on messages, the same on every platform. cpu/cpu.h and cuda/cuda.h run them.
//
// Every buffer has `batch` messages, one after another. The operations do not check sizes: handlers do.
//
// A new residual is the error of encoding. An error that is not finite (an overflow, a NaN) is not a rounding error, so
// the old residual is kept.
#pragma once

#include "codec/layout.h"

namespace jaxcgx {

struct Encode {
  const Layout& layout;
  int64_t batch;
  const void* const* leaves = nullptr;
  const int64_t* leaf_ids = nullptr;        // per leaf: a number on which its noise depends
  const uint32_t* keys = nullptr;           // [batch, kKeyWords]; null if the codec draws no noise
  const float* const* residuals = nullptr;  // with feedback: added to the leaves before encoding
  float* const* new_residuals = nullptr;    // with feedback; may be the memory of `residuals`
  uint8_t* payload = nullptr;               // [batch, chunks, chunk_bytes]
  void* workspace = nullptr;                // CUDA only: workspace_bytes() bytes, aligned to 16
};

struct Decode {
  const Layout& layout;
  int64_t batch;
  const uint8_t* payload = nullptr;  // [batch, chunks, chunk_bytes]
  void* const* leaves = nullptr;
  void* workspace = nullptr;
};

// Sums one chunk of `ranks` messages in rank order, in fp32, and divides the sum by `divisor`. The result is either
// fp32 leaves (only if the layout has one chunk) or a new payload.
struct Reduce {
  const Layout& layout;
  int64_t batch, ranks;
  const uint8_t* payloads = nullptr;  // [batch, ranks, chunk_bytes]
  const int32_t* where = nullptr;     // [batch, 2]: the chunk of the payloads; the rank whose payload `own` replaces
  const void* const* own = nullptr;   // the raw, whole leaves of that rank; null: all payloads are summed
  float divisor = 1.0f;
  float* const* leaves = nullptr;
  uint8_t* payload = nullptr;         // [batch, of_sum(layout, ranks).chunk_bytes]
  float* const* residuals = nullptr;  // with feedback: the residuals of whole leaves. The chunk's residuals are added
                                      // to the sum before the division, then replaced by the encoding errors
  const int64_t* leaf_ids = nullptr;
  const uint32_t* keys = nullptr;
  void* workspace = nullptr;
};

// Sets the elements of arrays whose indices are in a TopK payload to 0.
struct Clear {
  const Layout& layout;
  int64_t batch;
  const uint8_t* payload = nullptr;  // [batch, chunks, chunk_bytes]
  void* const* arrays = nullptr;     // with the sizes and dtypes of the leaves
  void* workspace = nullptr;
};

}  // namespace jaxcgx
