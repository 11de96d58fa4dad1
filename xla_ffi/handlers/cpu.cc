#include "handlers/cpu.h"

#include "handlers/operations.h"

namespace jaxcgx {
namespace {

struct Cpu {
  using Context = ffi::ThreadPool;

  static int64_t workspace_bytes(const Layout&, int64_t, int64_t, bool) { return 0; }

  static ffi::Error check_where(const int32_t* where, const Message& m, int64_t ranks, bool own) {
    const int64_t chunks = m.layout->chunks();
    for (int64_t row = 0; row < m.batch; ++row) {
      const int32_t chunk = where[2 * row], rank = where[2 * row + 1];
      if (chunk < 0 || chunk >= chunks)
        return invalid("reduce", "chunk " + std::to_string(chunk) + " of " + std::to_string(chunks));
      if (own && (rank < 0 || rank >= ranks))
        return invalid("reduce", "own rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    }
    return ffi::Error::Success();
  }

  static ffi::Error encode(Context& threads, const Encode& args) {
    cpu::encode(args, pool_of(threads));
    return ffi::Error::Success();
  }
  static ffi::Error decode(Context& threads, const Decode& args) {
    cpu::decode(args, pool_of(threads));
    return ffi::Error::Success();
  }
  static ffi::Error reduce(Context& threads, const Reduce& args) {
    cpu::reduce(args, pool_of(threads));
    return ffi::Error::Success();
  }
  static ffi::Error clear(Context& threads, const Clear& args) {
    cpu::clear(args, pool_of(threads));
    return ffi::Error::Success();
  }
};

}  // namespace

#define CGX_ON_THREADS ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_encode_cpu, encode<Cpu>, CGX_ON_THREADS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_decode_cpu, decode<Cpu>, CGX_ON_THREADS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_reduce_cpu, reduce<Cpu>, CGX_ON_THREADS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcgx_clear_cpu, clear<Cpu>, CGX_ON_THREADS);

}  // namespace jaxcgx
