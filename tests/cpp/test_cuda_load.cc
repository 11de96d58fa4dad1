// The initialize stage of the CUDA handlers, on cuda_emulator/: it loads the kernels that a call launches, once for all
// calls alike. And the messages of errors.
#include <deque>
#include <memory>

#include "codec/fields.h"
#include "cuda_message.h"
#include "handlers/cuda.h"

namespace jaxcgx::test {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

class Attributes {
 public:
  template <class T>
  void scalar(const std::string& name, T x) {
    add(name, XLA_FFI_AttrType_SCALAR, XLA_FFI_Scalar{ffi::internal::NativeTypeToCApiDataType<T>(), keep(x)});
  }
  void numbers(const std::string& name, const std::vector<int64_t>& x) {
    auto* const kept = keep(x);
    add(name, XLA_FFI_AttrType_ARRAY, XLA_FFI_Array{XLA_FFI_DataType_S64, kept->size(), kept->data()});
  }
  template <class T>
  void add(const std::string& name, XLA_FFI_AttrType type, T value) {
    const auto& kept = *keep(name);
    const auto before = [](const XLA_FFI_ByteSpan* a, const std::string& b) { return std::string(a->ptr, a->len) < b; };
    const auto at = std::lower_bound(names_.begin(), names_.end(), name, before) - names_.begin();
    names_.insert(names_.begin() + at, keep(XLA_FFI_ByteSpan{kept.data(), kept.size()}));
    types_.insert(types_.begin() + at, type);
    values_.insert(values_.begin() + at, keep(value));
  }
  XLA_FFI_Attrs all() {
    const auto size = static_cast<int64_t>(names_.size());
    return {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, size, types_.data(), names_.data(), values_.data()};
  }

 private:
  template <class T>
  T* keep(const T& x) {
    kept_.push_back(std::make_shared<T>(x));
    return static_cast<T*>(kept_.back().get());
  }
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
};

struct Buffer {
  DataType type;
  int64_t count;
  uint8_t* in_place = nullptr;  // of another buffer
  std::shared_ptr<Memory> own =
      std::make_shared<Memory>(count * static_cast<int64_t>(ffi::ByteWidth(type)), uint8_t{0});
  uint8_t* data() const { return in_place != nullptr ? in_place : own->data(); }
};
using Buffers = std::vector<Buffer>;

// Calls a handler as XLA does.
bool call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, Attributes& attributes, const Buffers& operands,
          const Buffers& results) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args*) -> XLA_FFI_Error* { return nullptr; };  // the null stream
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* e) { return reinterpret_cast<XLA_FFI_Error*>(e); };
  std::deque<std::pair<XLA_FFI_Buffer, int64_t>> buffers;
  const auto pointers = [&](const Buffers& all) {
    std::vector<void*> found;
    for (const Buffer& b : all) {
      auto& [buffer, count] = buffers.emplace_back(XLA_FFI_Buffer{}, b.count);
      buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(b.type), b.data(), 1, &count};
      found.push_back(&buffer);
    }
    return found;
  };
  auto args = pointers(operands), rets = pointers(results);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = attributes.all();
  const bool passed = handler(&frame) == nullptr;
  return passed && frame.stage == stage;
}

template <XLA_FFI_Handler* kHandler>
void initialize_and_execute(const std::string& context, Attributes& attributes, const Buffers& args,
                            const Buffers& rets) {
  cudaDeviceReset();
  CHECK(call(load<kHandler>, XLA_FFI_ExecutionStage_INITIALIZE, attributes, args, rets), context);
  CHECK(call(kHandler, XLA_FFI_ExecutionStage_EXECUTE, attributes, args, rets), context);
  const uint64_t before = cuda::launched;
  CHECK(call(load<kHandler>, XLA_FFI_ExecutionStage_INITIALIZE, attributes, args, rets), context);
  CHECK(cuda::launched == before, context);
}

void test_messages(Codec codec, bool feedback) {
  constexpr int64_t kSizes[] = {30000, 70};
  const Layout l(codec, {{kSizes[0], DType::kF32}, {kSizes[1], DType::kBF16}}, 1);
  const std::string context = describe(l) + (feedback ? " feedback" : "");
  Attributes fields, attributes;
  each_field(codec, [&](const std::string& name, auto& field) {
    fields.scalar(name, static_cast<FieldType<std::remove_reference_t<decltype(field)>>>(field));
  });
  attributes.scalar("batch", int64_t{1});
  attributes.scalar("chunks", int64_t{1});
  attributes.add("codec", XLA_FFI_AttrType_DICTIONARY, fields.all());
  attributes.numbers("dtypes", {0, 1});
  attributes.numbers("ids", {0, 1});
  attributes.numbers("shares", {});
  attributes.numbers("sizes", {kSizes[0], kSizes[1]});
  const Buffers leaves{{DataType::F32, kSizes[0]}, {DataType::BF16, kSizes[1]}}, payload{{DataType::U8, l.chunk_bytes}},
      sums{{DataType::F32, kSizes[0]}, {DataType::F32, kSizes[1]}}, residuals = feedback ? sums : Buffers();
  const auto in_place = [](Buffers all) {
    for (Buffer& each : all) each.in_place = each.data();
    return all;
  };
  const auto work = [&](int64_t payloads, bool encodes) {
    const int64_t bytes = cuda::workspace_bytes(l, 1, payloads, encodes);
    return bytes > 0 ? Buffers{{DataType::U8, bytes}} : Buffers();
  };
  const auto all_of = [](std::initializer_list<Buffers> parts) {
    Buffers all;
    for (const Buffers& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  if (!feedback) {
    initialize_and_execute<jaxcgx_decode_cuda>("decode " + context, attributes, payload,
                                               all_of({leaves, work(1, false)}));
    if (is_sparse(codec.kind))
      initialize_and_execute<jaxcgx_clear_cuda>("clear " + context, attributes, all_of({payload, leaves}),
                                                all_of({in_place(leaves), work(1, false)}));
  }
  attributes.scalar("feedback", feedback);
  initialize_and_execute<jaxcgx_encode_cuda>("encode " + context, attributes, all_of({leaves, residuals}),
                                             all_of({payload, in_place(residuals), work(0, true)}));
  attributes.scalar("ranks", int64_t{2});
  attributes.scalar("own", false);
  attributes.scalar("divisor", 2.0f);
  attributes.scalar("encoded", true);
  initialize_and_execute<jaxcgx_reduce_cuda>(
      "reduce " + context, attributes, all_of({{{DataType::U8, 2 * l.chunk_bytes}, {DataType::S32, 2}}, residuals}),
      all_of({{{DataType::U8, of_sum(l, 2).chunk_bytes}}, in_place(residuals), work(2, true)}));
}

void test_patches(DataType type) {
  const auto width = static_cast<int64_t>(ffi::ByteWidth(type)), blocks = div_up(1000, kPatchBlock);
  const std::string context = "patch of " + std::to_string(width) + " bytes a word";
  const Buffer words{type, 1000}, heads{DataType::U16, 3 * blocks};
  Attributes none;
  initialize_and_execute<jaxcgx_patch_encode_cuda>(context, none, {words, words},
                                                   {heads, {DataType::U8, blocks * kPatchBlock * width}});
  initialize_and_execute<jaxcgx_patch_apply_cuda>(
      context, none, {words, heads, {DataType::S64, blocks}, {DataType::U8, 0}}, {words, {DataType::U8, blocks}});
}

void test_messages_of_errors() {
  const auto message = [](cudaError_t error) { return error_of("encode", {"cudaLaunchKernel", error}).message(); };
  CHECK_ERROR(message(cudaErrorNoKernelImageForDevice),
              "jaxcgx_encode: this build has code for none; this GPU is Tesla T4 (sm_75): build jaxcgx with a CUDA "
              "compiler that knows that GPU, or name its architecture in CMAKE_CUDA_ARCHITECTURES");
  CHECK_ERROR(message(cudaErrorInsufficientDriver),
              "jaxcgx_encode: this build is of CUDA 13.0; this machine's driver is for CUDA 12.4 at most: update the "
              "driver, or build jaxcgx with nvcc 12.4 or earlier");
  const std::string failed = message(cudaErrorInvalidValue);
  CHECK(failed == "jaxcgx_encode: cudaLaunchKernel failed with a name (a text)", failed);
}

}  // namespace
}  // namespace jaxcgx::test

int main() {
  using namespace jaxcgx;
  // The first two differ in an attribute alone.
  for (const Codec& codec : {Codec{Kind::kFloat8, 4, 64}, Codec{Kind::kFloat8, 5, 64}, Codec{Kind::kByteGrad},
                             Codec{Kind::kLossless}, test::topk(0.02, Select::kExact, {Kind::kRaw})}) {
    for (const bool feedback : {false, true}) test::test_messages(codec, feedback);
  }
  for (const auto type : {xla::ffi::DataType::U8, xla::ffi::DataType::U32}) test::test_patches(type);
  test::test_messages_of_errors();
  return test::finish();
}
