#pragma once

#include "kernel.h"

namespace jaxcgx::ptx {

// What does an instruction, by its name with all its suffixes; null if it isn't known.
Operation operation_of(const std::string& name);

}  // namespace jaxcgx::ptx
