#pragma once

#include "kernel.h"

namespace jaxcgx::ptx {

// Returns the function for an instruction, by its name with all suffixes, or null if the instruction isn't known.
Operation operation_of(const std::string& name);

}  // namespace jaxcgx::ptx
