// RMS norm alone, with the bits that it has in front of a linear map.
#include "pool.h"
#include "vec.h"

// (x [R, K], gamma [K], eps [1], count [1]) -> y [R, K]
KERNEL norm(KERNEL_ARGS) {
    const auto *x = static_cast<float*>(params[0]), *gamma = static_cast<float*>(params[1]);
    const float eps = *static_cast<float*>(params[2]);
    const int64_t rows = *static_cast<int32_t*>(params[3]), K = shapes[0][1];
    auto* y = static_cast<float*>(params[4]);
    parallel_for(rows, rows * K * 4, [&](int64_t r) {
        const float* in = x + r * K;
        const float scale = rms_scale(in, K, eps);
        for (int64_t k = 0; k < K; ++k) y[r * K + k] = in[k] * scale * gamma[k];
    });
    return 0;
}
