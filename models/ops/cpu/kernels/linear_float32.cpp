#include "linear.h"

LINEAR_KERNELS(float32, F32)
