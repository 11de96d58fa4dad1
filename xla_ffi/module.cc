// The Python module: the handlers as capsules, information about this build, and the other functions of the engines.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "cpu/kernels.h"
#include "cpu/pages.h"
#include "cpu/patch.h"
#include "handlers/cpu.h"
#include "handlers/shm.h"
#include "handlers/tcp.h"
#include "tcp/process.h"
#ifdef JAXCGX_CUDA
#include "cuda/cuda.h"
#include "handlers/cuda.h"
#include "handlers/message.h"
#endif

namespace nb = nanobind;

namespace {

template <class Handler>
nb::capsule capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>, "an FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

#ifdef JAXCGX_CUDA
// A handler that launches kernels, and `kLoaded`, the one whose kernels are loaded first.
template <XLA_FFI_Handler* kHandler, XLA_FFI_Handler* kLoaded = kHandler>
nb::dict stages() {
  nb::dict all;
  all["initialize"] = capsule(jaxcgx::load<kLoaded>);
  all["execute"] = capsule(kHandler);
  return all;
}
#endif

template <class T>
T value_of(jaxcgx::Or<T> value) {
  if (const auto* failure = std::get_if<jaxcgx::Failure>(&value)) throw std::runtime_error(failure->what);
  return std::get<0>(value);
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// Words of leaves: unsigned integers.
using Words = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Digests = std::vector<uint64_t>;

std::vector<jaxcgx::cpu::PatchLeaf> leaves_of(const std::vector<Words>& olds, const std::vector<Words>& news) {
  std::vector<jaxcgx::cpu::PatchLeaf> leaves;
  if (olds.size() != news.size()) throw nb::value_error("patch: expected as many old as new arrays");
  for (size_t i = 0; i < olds.size(); ++i) {
    const size_t width = olds[i].itemsize();
    if (olds[i].size() != news[i].size() || width != news[i].itemsize() || (width & (width - 1)) != 0 || width > 8)
      throw nb::value_error("patch: expected old and new words of the same number and of 1, 2, 4 or 8 bytes");
    leaves.push_back({static_cast<int64_t>(olds[i].size()),
                      static_cast<int64_t>(width),
                      olds[i].data(),
                      const_cast<void*>(news[i].data()),
                      {},
                      {}});
  }
  return leaves;
}

// Threads that end before it does.
struct Threads : std::vector<std::thread> {
  ~Threads() {
    for (std::thread& thread : *this) thread.join();
  }
};

// Calls f without the GIL, with a pool of threads that end with it.
template <class F>
auto on_threads(F f) {
  nb::gil_scoped_release released;
  Threads threads;
  const auto start = [&](std::function<void()> task) {
    try {
      threads.emplace_back(std::move(task));
    } catch (const std::system_error&) {  // there are too many threads: those that run do its part
    }
  };
  return f(jaxcgx::cpu::Pool{std::max<int64_t>(1, std::thread::hardware_concurrency()), start});
}

std::string_view view_of(const Words& bytes) { return {static_cast<const char*>(bytes.data()), bytes.nbytes()}; }

uint8_t* memory_of(const nb::bytes& bytes) { return reinterpret_cast<uint8_t*>(const_cast<char*>(bytes.c_str())); }

// Returns bytes that are not written yet.
nb::bytes new_bytes(size_t size) {
  const auto bytes = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!bytes.is_valid()) throw nb::python_error();
  jaxcgx::cpu::ask_for_large_pages(memory_of(bytes), static_cast<int64_t>(size));
  return bytes;
}
using PatchOfLeaf = std::tuple<nb::bytes, nb::bytes, uint64_t, uint64_t>;

std::vector<PatchOfLeaf> encode_patch(const std::vector<Words>& olds, const std::vector<Words>& news) {
  jaxcgx::cpu::PatchParts parts;
  const auto leaves = leaves_of(olds, news);
  const auto digests = on_threads([&](const auto& pool) { return jaxcgx::cpu::encode_patch(leaves, pool, &parts); });
  std::vector<PatchOfLeaf> found;
  std::vector<std::string_view> blocks;
  size_t first = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto count = static_cast<size_t>(jaxcgx::cpu::patch_blocks(leaves[i]));
    blocks.clear();
    size_t size = 0;
    for (size_t block = first; block < first + count; ++block) {
      const auto& bytes = parts.blocks[block];
      blocks.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      size += bytes.size();
    }
    const nb::bytes joined = new_bytes(size);
    on_threads([&](const auto& pool) { jaxcgx::cpu::join(blocks, pool, memory_of(joined)); });
    found.emplace_back(nb::bytes(parts.heads.data() + first, count * sizeof(jaxcgx::PatchHead)), joined, digests.old[i],
                       digests.now[i]);
    first += count;
  }
  return found;
}

std::tuple<Digests, Digests> apply_patch(const std::vector<Words>& heads, const std::vector<Words>& blocks,
                                         const std::vector<Words>& olds, const std::vector<Words>& news) {
  auto leaves = leaves_of(olds, news);
  if (heads.size() != leaves.size() || blocks.size() != leaves.size())
    throw nb::value_error("patch: expected heads and blocks of each array");
  for (size_t i = 0; i < leaves.size(); ++i) leaves[i].heads = view_of(heads[i]), leaves[i].blocks = view_of(blocks[i]);
  jaxcgx::cpu::PatchDigests digests;
  if (!on_threads([&](const auto& pool) { return jaxcgx::cpu::apply_patch(leaves, pool, &digests); }))
    throw nb::value_error(
        "patch.apply: argument 'patch': expected blocks as jaxcgx.patch.encode writes them, got others");
  return {digests.old, digests.now};
}

nb::bytes seal_patch(const std::vector<Words>& parts, int64_t at) {
  std::vector<std::string_view> views;
  size_t size = 0;
  for (const Words& part : parts) views.push_back(view_of(part)), size += part.nbytes();
  const auto begin = static_cast<size_t>(at);
  if (begin < sizeof(uint64_t) || size < begin) throw nb::value_error("patch: expected the place of the digest");
  const nb::bytes sealed = new_bytes(size);
  on_threads([&](const auto& pool) {
    uint8_t* const out = memory_of(sealed);
    jaxcgx::cpu::join(views, pool, out);
    const uint64_t digest = jaxcgx::cpu::digest_of(out + begin, static_cast<int64_t>(size - begin), pool);
    std::memcpy(out + begin - sizeof digest, &digest, sizeof digest);
  });
  return sealed;
}

uint64_t digest_of(const Words& words) {
  const auto bytes = static_cast<int64_t>(words.nbytes());
  return on_threads([&](const auto& pool) { return jaxcgx::cpu::digest_of(words.data(), bytes, pool); });
}

}  // namespace

NB_MODULE(_native, m) {
  jaxcgx::cpu::kernels();  // throws if there are none for this processor, and the import fails
  m.def(
      "handlers",
      [] {
        nb::dict cpu;
        cpu["jaxcgx_encode"] = capsule(jaxcgx::jaxcgx_encode_cpu);
        cpu["jaxcgx_decode"] = capsule(jaxcgx::jaxcgx_decode_cpu);
        cpu["jaxcgx_reduce"] = capsule(jaxcgx::jaxcgx_reduce_cpu);
        cpu["jaxcgx_clear"] = capsule(jaxcgx::jaxcgx_clear_cpu);
        cpu["jaxcgx_exchange"] = capsule(jaxcgx::jaxcgx_exchange_cpu);
        cpu["jaxcgx_tcp_allreduce"] = capsule(jaxcgx::jaxcgx_tcp_allreduce_cpu);
        cpu["jaxcgx_tcp_allreduce_end"] = capsule(jaxcgx::jaxcgx_tcp_allreduce_end_cpu);
        cpu["jaxcgx_tcp_exchange"] = capsule(jaxcgx::jaxcgx_tcp_exchange_cpu);
        cpu["jaxcgx_tcp_exchange_begin"] = capsule(jaxcgx::jaxcgx_tcp_exchange_begin_cpu);
        cpu["jaxcgx_tcp_exchange_end"] = capsule(jaxcgx::jaxcgx_tcp_exchange_end_cpu);
        nb::dict platforms;
        platforms["cpu"] = cpu;
#ifdef JAXCGX_CUDA
        nb::dict cuda;
        cuda["jaxcgx_encode"] = stages<jaxcgx::jaxcgx_encode_cuda>();
        cuda["jaxcgx_decode"] = stages<jaxcgx::jaxcgx_decode_cuda>();
        cuda["jaxcgx_reduce"] = stages<jaxcgx::jaxcgx_reduce_cuda>();
        cuda["jaxcgx_clear"] = stages<jaxcgx::jaxcgx_clear_cuda>();
        cuda["jaxcgx_patch_encode"] = stages<jaxcgx::jaxcgx_patch_encode_cuda>();
        cuda["jaxcgx_patch_apply"] = stages<jaxcgx::jaxcgx_patch_apply_cuda>();
        cuda["jaxcgx_exchange"] = capsule(jaxcgx::jaxcgx_exchange_cuda);
        cuda["jaxcgx_tcp_allreduce"] = stages<jaxcgx::jaxcgx_tcp_allreduce_cuda, jaxcgx::jaxcgx_tcp_allreduce_load>();
        cuda["jaxcgx_tcp_allreduce_end"] =
            stages<jaxcgx::jaxcgx_tcp_allreduce_end_cuda, jaxcgx::jaxcgx_tcp_allreduce_load>();
        cuda["jaxcgx_tcp_exchange"] = capsule(jaxcgx::jaxcgx_tcp_exchange_cuda);
        cuda["jaxcgx_tcp_exchange_begin"] = capsule(jaxcgx::jaxcgx_tcp_exchange_begin_cuda);
        cuda["jaxcgx_tcp_exchange_end"] = capsule(jaxcgx::jaxcgx_tcp_exchange_end_cuda);
        platforms["CUDA"] = cuda;
#endif
        return platforms;
      },
      "FFI handlers by platform and target name, those with several stages as dictionaries.");
  m.def(
      "build_info",
      [] {
        nb::dict info;
        info["version"] = JAXCGX_VERSION;
        info["jaxlib"] = JAXCGX_JAXLIB;
        info["compiler"] = JAXCGX_COMPILER;
        info["kernels"] = jaxcgx::cpu::kernels().name;
        info["cuda"] = nb::none();
#ifdef JAXCGX_CUDA
        nb::dict cuda;
        cuda["toolkit"] = JAXCGX_CUDA;
        cuda["architectures"] = nb::str(JAXCGX_CUDA_ARCHITECTURES).attr("split")(", ");
        info["cuda"] = cuda;
#endif
        return info;
      },
      "The version, what it was built with, the CPU kernels in use, and the CUDA half or None.");
#ifdef JAXCGX_CUDA
  m.def(
      "workspace_bytes",
      [](nb::dict message, int64_t payloads, bool encodes) {
        jaxcgx::Description d;
        const nb::dict codec = message["codec"];
        jaxcgx::each_field(d.codec, [&](const std::string& name, auto& field) {
          using T = std::remove_reference_t<decltype(field)>;
          using Number = std::conditional_t<std::is_floating_point_v<T>, nb::float_, nb::int_>;
          field = static_cast<T>(nb::cast<jaxcgx::FieldType<T>>(Number(codec[name.c_str()])));
        });
        using Numbers = std::vector<int64_t>;
        const auto numbers = [&](const char* name) { return nb::cast<Numbers>(message[name]); };
        const Numbers sizes = numbers("sizes"), dtypes = numbers("dtypes"), ids = numbers("ids"),
                      shares = numbers("shares");
        const auto span = [](const Numbers& v) { return jaxcgx::Sizes(v.data(), v.size()); };
        d.sizes = span(sizes), d.dtypes = span(dtypes), d.ids = span(ids), d.shares = span(shares);
        d.chunks = nb::cast<int64_t>(nb::int_(message["chunks"]));
        d.batch = nb::cast<int64_t>(nb::int_(message["batch"]));
        const auto made = jaxcgx::make_message("workspace_bytes", d);
        if (made.has_error()) throw nb::value_error(made.error().message().c_str());
        return jaxcgx::cuda::workspace_bytes(*made->layout, made->batch, payloads, encodes);
      },
      "Bytes of the hidden result, on platform CUDA, of an operation that decodes `payloads` of each message, and that "
      "`encodes`. `message` has the attributes of the call.",
      nb::arg("message"), nb::arg("payloads"), nb::arg("encodes"));
#endif
  m.def(
      "shm_create", [](int64_t ranks) { return value_of(jaxcgx::shm::create(ranks)); },
      "The name of new memory for a number of ranks, for each of them to attach.", nb::arg("ranks"));
  m.def(
      "shm_attach",
      [](const std::string& name, int64_t rank, const std::vector<int64_t>& processes, double timeout) {
        return value_of(jaxcgx::shm::attach(name, rank, processes, milliseconds(timeout)));
      },
      "The number of a segment of this process, when all ranks, which are these processes, have attached.",
      nb::arg("name"), nb::arg("rank"), nb::arg("processes"), nb::arg("timeout"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def("shm_leave", jaxcgx::shm::leave, "Ends this process's part in all exchanges through shared memory.");
  m.def("shm_detach", jaxcgx::shm::detach, "Leaves the other ranks.", nb::arg("segment"));
  m.def(
      "tcp_start",
      [](int64_t process, const std::vector<std::tuple<std::string, std::vector<int>, int>>& connections,
         int64_t devices, double silence, double pace) {
        std::vector<jaxcgx::tcp::Connection> all;
        for (const auto& [host, data, beats] : connections) {
          all.push_back({host, {}, jaxcgx::tcp::Socket(beats)});
          for (const int number : data) all.back().data.emplace_back(number);
        }
        if (const auto failure = jaxcgx::tcp::start(process, std::move(all), devices, milliseconds(silence), pace))
          throw std::runtime_error(failure->what);
      },
      "Takes over connections, by process: the host, the sockets for data, as many for each of `devices` devices, and "
      "one for heartbeats. A process that is silent for that many seconds has vanished. This one sends at most `pace` "
      "bytes a second; 0: no limit.",
      nb::arg("process"), nb::arg("connections"), nb::arg("devices"), nb::arg("silence"), nb::arg("pace"));
  m.def("tcp_name_devices", jaxcgx::tcp::name_devices,
        "Tells XLA's ordinals for the devices of this process, in the order of their numbers.", nb::arg("ordinals"));
  m.def("tcp_leave", jaxcgx::tcp::leave, "Ends this process's part in all exchanges over TCP.");
  m.def("tcp_interrupt", jaxcgx::tcp::interrupt, "The same, but only if exchanges are under way.");
  nb::module_ patch = m.def_submodule("patch", "Patches of words, as jaxcgx/patch/words.py has them.");
  patch.def("encode", encode_patch, "The heads, the blocks, and the digests of the old and of the new words of leaves.",
            nb::arg("olds"), nb::arg("news"));
  patch.def(
      "apply", apply_patch,
      "Writes the new words. Returns the digests of the old leaves, 0 for those that are overwritten, and of the new "
      "ones.",
      nb::arg("heads"), nb::arg("blocks"), nb::arg("olds"), nb::arg("news"));
  patch.def("seal", seal_patch,
            "The parts as one, with the digest of the bytes from `at` on in the 8 bytes before them.", nb::arg("parts"),
            nb::arg("at"));
  patch.def("digest_of", digest_of, "The digest of the bytes of words.", nb::arg("words"));
  m.def(
      "select_kernels",
      [](const std::string& name) {
        if (!jaxcgx::cpu::select_kernels(name.c_str())) {
          throw nb::value_error(
              ("select_kernels: expected 'avx512', 'avx2' or 'portable', as far as this processor runs them; got '" +
               name + "'")
                  .c_str());
        }
      },
      nb::arg("name"), "Chooses the CPU kernels by name; the best that the processor runs are the default.");
}
