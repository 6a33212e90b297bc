#include "layer.h"

KERNELS_OF_DTYPE(bfloat16, BF16)
