#include "linear.h"

LINEAR_KERNELS(float16, F16)
