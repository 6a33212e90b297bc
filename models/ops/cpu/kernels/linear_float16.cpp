#include "layer.h"

KERNELS_OF_DTYPE(float16, F16)
