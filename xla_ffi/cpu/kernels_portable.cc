#define JAXCGX_ISA portable
#include "cpu/kernels_impl.h"
