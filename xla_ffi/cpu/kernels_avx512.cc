#define JAXCGX_ISA avx512
#include "cpu/kernels_impl.h"
