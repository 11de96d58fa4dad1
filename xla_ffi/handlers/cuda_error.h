// Error messages for CUDA failures.
#pragma once

#include <string>

namespace jaxcgx {

// Returns the message for a GPU that the build has no code for. `built`: the architectures of the build, such as
// "sm_80, sm_90, compute_90". `gpu`: such as "NVIDIA H200 (sm_90)".
inline std::string no_code_message(const std::string& op, const std::string& built, const std::string& gpu) {
  return "jaxcgx_" + op + ": this build has code for " + built + "; this GPU is " + gpu +
         ": build jaxcgx with a CUDA compiler that knows that GPU, or name its architecture in "
         "CMAKE_CUDA_ARCHITECTURES";
}

// Returns the message for a driver that is too old. The versions are in CUDA's encoding, such as 13000 and 12040. To
// run machine code, a driver must support the major version of the CUDA release that the build was made with. To
// compile PTX, it must support that release itself.
inline std::string old_driver_message(const std::string& op, int built, int driver) {
  const auto release = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  return "jaxcgx_" + op + ": this build is of CUDA " + release(built) + "; this machine's driver is for CUDA " +
         release(driver) + " at most: update the driver, or build jaxcgx with nvcc " + release(driver) + " or earlier";
}

inline std::string failed_call_message(const std::string& op, const std::string& call, const std::string& name,
                                       const std::string& words) {
  return "jaxcgx_" + op + ": " + call + " failed with " + name + " (" + words + ")";
}

}  // namespace jaxcgx
