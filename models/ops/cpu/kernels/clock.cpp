// The time at which a tensor passed.
#include <ctime>

#include "vec.h"

// (x int32 [...]) -> x, clock [2]: seconds modulo 2^31 and nanoseconds of CLOCK_MONOTONIC
KERNEL stamp(KERNEL_ARGS) {
    int64_t size = 1;
    for (int d = 0; d < ndims[0]; ++d) size *= shapes[0][d];
    std::memcpy(params[1], params[0], size * sizeof(int32_t));
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    auto* clock = static_cast<int32_t*>(params[2]);
    clock[0] = static_cast<int32_t>(now.tv_sec & 0x7fffffff);
    clock[1] = static_cast<int32_t>(now.tv_nsec);
    return 0;
}
