#include "layer.h"

KERNELS_OF_DTYPE(float32, F32)
