// What several workers have computed of the same rows, put together.
#include "pool.h"
#include "vec.h"

// (parts [N * R, M], residual [R, M], count [1]) -> y [R, M] = ((parts[0] + parts[1]) + ...) + residual
KERNEL add_parts(KERNEL_ARGS) {
    const auto *parts = static_cast<float*>(params[0]), *residual = static_cast<float*>(params[1]);
    const int64_t rows = *static_cast<int32_t*>(params[2]), R = shapes[1][0], M = shapes[1][1], N = shapes[0][0] / R;
    auto* y = static_cast<float*>(params[3]);
    parallel_for(rows, rows * M * N, [&](int64_t r) {
        for (int64_t m = 0; m < M; m += LANES) {
            const int64_t at = r * M + m, n = M - m;
            vf total = get(parts + at, n);
            for (int64_t i = 1; i < N; ++i) total = total + get(parts + i * R * M + at, n);
            put(y + at, total + get(residual + at, n), n);
        }
    });
    return 0;
}

// (parts [N * R, M], count [1]) -> y [R, V], V <= N M: a row's parts one behind the other, without what is too much
KERNEL join_parts(KERNEL_ARGS) {
    const auto* parts = static_cast<float*>(params[0]);
    const int64_t rows = *static_cast<int32_t*>(params[1]), R = shapes[2][0], V = shapes[2][1], M = shapes[0][1];
    auto* y = static_cast<float*>(params[2]);
    parallel_for(rows, rows * V, [&](int64_t r) {
        for (int64_t first = 0; first < V; first += M)
            std::memcpy(y + r * V + first, parts + (first / M * R + r) * M, std::min(M, V - first) * sizeof(float));
    });
    return 0;
}
