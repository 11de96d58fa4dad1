// The error messages if CUDA fails.
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
  const std::string old_driver = old_driver_message("encode", 13000, 12040);
  CHECK(old_driver ==
            "jaxcgx_encode: this build is of CUDA 13.0; this machine's driver is for CUDA 12.4 at most: update the "
            "driver, or build jaxcgx with nvcc 12.4 or earlier",
        old_driver);
  const std::string failed =
      failed_call_message("reduce", "cudaLaunchKernel", "cudaErrorInvalidValue", "invalid argument");
  CHECK(failed == "jaxcgx_reduce: cudaLaunchKernel failed with cudaErrorInvalidValue (invalid argument)", failed);
  return test::finish();
}
