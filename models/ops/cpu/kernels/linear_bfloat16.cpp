#include "linear.h"

LINEAR_KERNELS(bfloat16, BF16)
