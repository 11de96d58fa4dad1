#pragma once

#include "kernel.h"

namespace jaxcgx::ptx {

// Returns the kernels of a PTX file, whose text must outlive them. An unknown instruction ends the program.
std::vector<Kernel> translate(std::string_view text);

}  // namespace jaxcgx::ptx
