// Which rows of the [n, w] grid hold a token: those come first, the rest costs nothing.
#include "vec.h"

#include <algorithm>

// (tokens [n, w], start [n], max_len [1]) -> token, position, request, cell [R], count [1]
KERNEL rows(KERNEL_ARGS) {
    const int64_t n = shapes[0][0], w = shapes[0][1];
    const auto *tokens = static_cast<int32_t*>(params[0]), *start = static_cast<int32_t*>(params[1]);
    const int32_t max_len = *static_cast<int32_t*>(params[2]);
    int32_t* out[4];
    for (int i = 0; i < 4; ++i) out[i] = static_cast<int32_t*>(params[3 + i]);
    int32_t count = 0;
    for (int64_t cell = 0; cell < n * w; ++cell) {
        const int32_t position = start[cell / w] + static_cast<int32_t>(cell % w);
        if (tokens[cell] < 0 || position >= max_len) continue;
        const int32_t row[4] = {tokens[cell], position, static_cast<int32_t>(cell / w), static_cast<int32_t>(cell)};
        for (int i = 0; i < 4; ++i) out[i][count] = row[i];
        ++count;
    }
    // Operators that know nothing of dead rows may read these.
    for (int64_t r = count; r < n * w; ++r)
        for (int i = 0; i < 4; ++i) out[i][r] = 0;
    *static_cast<int32_t*>(params[7]) = count;
    return 0;
}

// (x [R, H], token, position, request, cell [R], count [1]) -> the last live row as [1, H], its four numbers [1], count [1]
KERNEL pick(KERNEL_ARGS) {
    const int64_t hidden = shapes[0][1], last = std::max(0, *static_cast<int32_t*>(params[5]) - 1);
    std::memcpy(params[6], static_cast<float*>(params[0]) + last * hidden, hidden * sizeof(float));
    for (int i = 0; i < 4; ++i) *static_cast<int32_t*>(params[7 + i]) = static_cast<int32_t*>(params[1 + i])[last];
    *static_cast<int32_t*>(params[10]) = 0;  // alone in its grid
    *static_cast<int32_t*>(params[11]) = 1;
    return 0;
}
