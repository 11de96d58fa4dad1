// The initialize stage of the CUDA handlers, on cuda_emulator/: it loads the kernels that a call launches, once for all
// calls alike.
#include <map>
#include <memory>

#include "codec/fields.h"
#include "cuda_message.h"
#include "handlers/cuda.h"

namespace jaxcgx::test {
namespace {

namespace ffi = xla::ffi;

class Attributes {
 public:
  template <class T>
  void scalar(const std::string& name, T x) {
    arrays_.push_back(std::make_shared<T>(x));
    add(name, XLA_FFI_AttrType_SCALAR,
        XLA_FFI_Scalar{ffi::internal::NativeTypeToCApiDataType<T>(), arrays_.back().get()});
  }
  void numbers(const std::string& name, std::vector<int64_t> x) {
    const auto kept = std::make_shared<std::vector<int64_t>>(std::move(x));
    arrays_.push_back(kept);
    add(name, XLA_FFI_AttrType_ARRAY, XLA_FFI_Array{XLA_FFI_DataType_S64, kept->size(), kept->data()});
  }
  void dictionary(const std::string& name, const Attributes& x) { add(name, XLA_FFI_AttrType_DICTIONARY, x.all()); }
  XLA_FFI_Attrs all() const {
    names_.clear(), types_.clear(), at_.clear();
    for (const auto& [name, attribute] : by_name_) {
      spans_[name] = {name.data(), name.size()};
      names_.push_back(&spans_[name]), types_.push_back(attribute.first), at_.push_back(attribute.second.get());
    }
    const auto size = static_cast<int64_t>(names_.size());
    return {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, size, types_.data(), names_.data(), at_.data()};
  }

 private:
  template <class T>
  void add(const std::string& name, XLA_FFI_AttrType type, T value) {
    by_name_[name] = {type, std::make_shared<T>(value)};
  }
  std::map<std::string, std::pair<XLA_FFI_AttrType, std::shared_ptr<void>>> by_name_;
  std::vector<std::shared_ptr<void>> arrays_;
  mutable std::map<std::string, XLA_FFI_ByteSpan> spans_;
  mutable std::vector<XLA_FFI_ByteSpan*> names_;
  mutable std::vector<XLA_FFI_AttrType> types_;
  mutable std::vector<void*> at_;
};

// The buffers of a call, with memory of their own or that of other buffers.
class Buffers {
 public:
  void add(ffi::DataType type, int64_t count, const Memory* of = nullptr) {
    const auto bytes = count * static_cast<int64_t>(ffi::ByteWidth(type));
    if (of == nullptr) of = &*memory_.emplace_back(std::make_shared<Memory>(bytes, uint8_t{0}));
    of_.push_back(of);
    dims_.push_back(std::make_shared<int64_t>(count));
    all_.push_back(
        {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(type), of->data(), 1, dims_.back().get()});
  }
  const Memory* operator[](size_t i) const { return of_[i]; }
  std::vector<void*> pointers() {
    std::vector<void*> found;
    for (XLA_FFI_Buffer& each : all_) found.push_back(&each);
    return found;
  }

 private:
  std::vector<std::shared_ptr<Memory>> memory_;
  std::vector<const Memory*> of_;
  std::vector<std::shared_ptr<int64_t>> dims_;
  std::vector<XLA_FFI_Buffer> all_;
};

// Calls a handler as XLA does.
bool call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, const Attributes& attributes, Buffers& args,
          Buffers& rets) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args*) -> XLA_FFI_Error* { return nullptr; };  // the null stream
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* e) { return reinterpret_cast<XLA_FFI_Error*>(e); };
  auto operands = args.pointers(), results = rets.pointers();
  std::vector<XLA_FFI_ArgType> arg_types(operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(results.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()), arg_types.data(),
                operands.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()), ret_types.data(),
                results.data()};
  frame.attrs = attributes.all();
  const bool passed = handler(&frame) == nullptr;
  return passed && frame.stage == stage;
}

template <XLA_FFI_Handler* kHandler>
void initialize_and_execute(const std::string& context, const Attributes& attributes, Buffers args, Buffers rets) {
  cudaDeviceReset();
  CHECK(call(load<kHandler>, XLA_FFI_ExecutionStage_INITIALIZE, attributes, args, rets), context);
  CHECK(call(kHandler, XLA_FFI_ExecutionStage_EXECUTE, attributes, args, rets), context);
  const uint64_t before = cuda::launched;
  CHECK(call(load<kHandler>, XLA_FFI_ExecutionStage_INITIALIZE, attributes, args, rets), context);
  CHECK(cuda::launched == before, context);
}

void test_messages(const Codec& codec, bool feedback) {
  const Layout l(codec, {{30000, DType::kF32}, {70, DType::kBF16}}, 1);
  const std::string context = describe(l) + (feedback ? " feedback" : "");
  constexpr auto U8 = ffi::DataType::U8, F32 = ffi::DataType::F32;
  Attributes fields, attributes;
  Codec copy = codec;
  each_field(copy, [&](const std::string& name, auto& field) {
    fields.scalar(name, static_cast<FieldType<std::remove_reference_t<decltype(field)>>>(field));
  });
  attributes.dictionary("codec", fields);
  attributes.numbers("sizes", {30000, 70});
  attributes.numbers("dtypes", {0, 1});
  attributes.numbers("ids", {0, 1});
  attributes.numbers("shares", {});
  attributes.scalar("chunks", int64_t{1});
  attributes.scalar("batch", int64_t{1});
  const auto leaves = [](Buffers& to) { to.add(F32, 30000), to.add(ffi::DataType::BF16, 70); };
  const auto residuals = [&](Buffers& to, const Buffers* in_place, size_t at) {
    for (size_t i = 0; feedback && i < 2; ++i)
      to.add(F32, i == 0 ? 30000 : 70, in_place ? (*in_place)[at + i] : nullptr);
  };
  const auto add_work = [&](Buffers& to, int64_t payloads, bool encodes) {
    if (const int64_t bytes = cuda::workspace_bytes(l, 1, payloads, encodes); bytes > 0) to.add(U8, bytes);
  };
  if (!feedback) {
    Buffers payload, decoded;
    payload.add(U8, l.chunk_bytes);
    leaves(decoded), add_work(decoded, 1, false);
    initialize_and_execute<jaxcgx_decode_cuda>("decode " + context, attributes, payload, decoded);
  }
  if (!feedback && is_sparse(codec.kind)) {
    Buffers arrays, cleared;
    arrays.add(U8, l.chunk_bytes), leaves(arrays);
    cleared.add(F32, 30000, arrays[1]), cleared.add(ffi::DataType::BF16, 70, arrays[2]);
    add_work(cleared, 1, false);
    initialize_and_execute<jaxcgx_clear_cuda>("clear " + context, attributes, arrays, cleared);
  }
  attributes.scalar("feedback", feedback);
  Buffers args, rets;
  leaves(args), residuals(args, nullptr, 0);
  rets.add(U8, l.chunk_bytes), residuals(rets, nullptr, 0), add_work(rets, 0, true);
  initialize_and_execute<jaxcgx_encode_cuda>("encode " + context, attributes, args, rets);
  attributes.scalar("ranks", int64_t{2});
  attributes.scalar("own", false);
  attributes.scalar("divisor", 2.0f);
  for (const bool encoded : {true, false}) {
    if (feedback && !encoded) continue;
    attributes.scalar("encoded", encoded);
    Buffers payloads, sum;
    payloads.add(U8, 2 * l.chunk_bytes), payloads.add(ffi::DataType::S32, 2), residuals(payloads, nullptr, 0);
    encoded ? sum.add(U8, of_sum(l, 2).chunk_bytes) : (sum.add(F32, 30000), sum.add(F32, 70));
    residuals(sum, &payloads, 2), add_work(sum, 2, encoded);
    initialize_and_execute<jaxcgx_reduce_cuda>("reduce " + context, attributes, payloads, sum);
  }
}

void test_patches(ffi::DataType type) {
  const auto width = static_cast<int64_t>(ffi::ByteWidth(type)), blocks = div_up(1000, kPatchBlock);
  const std::string context = "patch of " + std::to_string(width) + " bytes a word";
  Buffers words, parts, args, rets;
  words.add(type, 1000), words.add(type, 1000);
  parts.add(ffi::DataType::U16, 3 * blocks), parts.add(ffi::DataType::U8, blocks * kPatchBlock * width);
  initialize_and_execute<jaxcgx_patch_encode_cuda>(context, {}, words, parts);
  args.add(type, 1000), args.add(ffi::DataType::U16, 3 * blocks), args.add(ffi::DataType::S64, blocks);
  args.add(ffi::DataType::U8, 0);
  rets.add(type, 1000), rets.add(ffi::DataType::U8, blocks);
  initialize_and_execute<jaxcgx_patch_apply_cuda>(context, {}, args, rets);
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
  return test::finish();
}
