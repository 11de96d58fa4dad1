// The Python module: handlers as capsules, and what this build is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "cpu/kernels.h"
#include "handlers/cpu.h"

namespace nb = nanobind;

namespace {

template <class Handler>
nb::capsule capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>, "an FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("handlers", [] {
    nb::dict cpu;
    cpu["jaxcgx_encode"] = capsule(jaxcgx::jaxcgx_encode_cpu);
    cpu["jaxcgx_decode"] = capsule(jaxcgx::jaxcgx_decode_cpu);
    cpu["jaxcgx_reduce"] = capsule(jaxcgx::jaxcgx_reduce_cpu);
    nb::dict platforms;
    platforms["cpu"] = cpu;
    return platforms;
  }, "FFI handlers by platform and target name.");
  m.def("build_info", [] {
    nb::dict info;
    info["version"] = JAXCGX_VERSION;
    info["jaxlib"] = JAXCGX_JAXLIB;
    info["compiler"] = JAXCGX_COMPILER;
    info["kernels"] = jaxcgx::cpu::kernels().name;
    return info;
  }, "The version, what it was built with, and the CPU kernels in use.");
  m.def("select_kernels", [](const std::string& name) {
    if (!jaxcgx::cpu::select_kernels(name.c_str())) {
      throw nb::value_error(("select_kernels: expected 'avx512', 'avx2' or 'portable', as far as this processor runs them; got '" + name + "'").c_str());
    }
  }, nb::arg("name"), "Chooses the CPU kernels by name; the best that the processor runs are the default.");
}
