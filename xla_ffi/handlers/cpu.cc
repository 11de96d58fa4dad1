// XLA FFI handlers of platform CPU.
#include "handlers/cpu.h"

#include "cpu/cpu.h"
#include "handlers/operations.h"

namespace jaxcgx {
namespace {

struct Cpu {
  using Context = ffi::ThreadPool;

  static cpu::Pool pool_of(Context& pool) {
    return {pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
  }

  static int64_t workspace_bytes(const Layout&, int64_t, int64_t, bool) { return 0; }

  static ffi::Error check_where(const int32_t* where, int64_t batch, int64_t chunks, int64_t ranks, bool own) {
    for (int64_t row = 0; row < batch; ++row) {
      const int32_t chunk = where[2 * row], rank = where[2 * row + 1];
      if (chunk < 0 || chunk >= chunks)
        return invalid("reduce", "chunk " + std::to_string(chunk) + " of " + std::to_string(chunks));
      if (own && (rank < 0 || rank >= ranks))
        return invalid("reduce", "own rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    }
    return ffi::Error::Success();
  }

  template <class... Fields>
  static ffi::Error encode(Context& threads, void*, const Fields&... fields) {
    cpu::encode({fields...}, pool_of(threads));
    return ffi::Error::Success();
  }
  template <class... Fields>
  static ffi::Error decode(Context& threads, void*, const Fields&... fields) {
    cpu::decode({fields...}, pool_of(threads));
    return ffi::Error::Success();
  }
  template <class... Fields>
  static ffi::Error reduce(Context& threads, void*, const Fields&... fields) {
    cpu::reduce({fields...}, pool_of(threads));
    return ffi::Error::Success();
  }
  template <class... Fields>
  static ffi::Error clear(Context& threads, void*, const Fields&... fields) {
    cpu::clear({fields...}, pool_of(threads));
    return ffi::Error::Success();
  }
};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_encode_cpu, encode<Cpu>, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().CGX_ENCODE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_decode_cpu, decode<Cpu>, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().CGX_DECODE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_reduce_cpu, reduce<Cpu>, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().CGX_REDUCE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_clear_cpu, clear<Cpu>, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().CGX_CLEAR);

}  // namespace jaxcgx
