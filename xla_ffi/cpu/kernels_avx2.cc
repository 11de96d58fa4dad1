#define JAXCGX_ISA avx2
#include "cpu/kernels_impl.h"
