// What is said when CUDA fails.
#include "check.h"
#include "handlers/cuda_error.h"

int main() {
  using namespace jaxcgx;
  const std::string no_code = no_code_message("encode", "sm_80, sm_90, compute_90", "Tesla T4 (sm_75)");
  CHECK(
      no_code ==
          "jaxcgx_encode: this build has code for sm_80, sm_90, compute_90; this GPU is Tesla T4 (sm_75): build jaxcgx "
          "with a CUDA compiler that knows that GPU, or name its architecture in CMAKE_CUDA_ARCHITECTURES",
      no_code);
  const std::string failed =
      failed_call_message("reduce", "cudaLaunchKernel", "cudaErrorInvalidValue", "invalid argument");
  CHECK(failed == "jaxcgx_reduce: cudaLaunchKernel failed with cudaErrorInvalidValue (invalid argument)", failed);
  return test::finish();
}
