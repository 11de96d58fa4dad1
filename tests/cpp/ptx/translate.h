#pragma once

#include "kernel.h"

namespace jaxcgx::ptx {

// The kernels of a PTX file, whose text must outlive them. An instruction that isn't known ends the program.
std::vector<Kernel> translate(std::string_view text);

}  // namespace jaxcgx::ptx
