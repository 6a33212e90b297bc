// Which rows of the [n, w] grid hold a token: those come first, the rest costs nothing.
#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

// (tokens [n, w], start [n], end [n] or one for all) -> token, position, request, cell [R], count [1]
KERNEL rows(KERNEL_ARGS) {
    const int64_t n = shapes[0][0], w = shapes[0][1];
    const auto *tokens = static_cast<int32_t*>(params[0]), *start = static_cast<int32_t*>(params[1]);
    const auto* end = static_cast<int32_t*>(params[2]);
    const bool one_end = shapes[2][0] == 1;
    int32_t* out[4];
    for (int i = 0; i < 4; ++i) out[i] = static_cast<int32_t*>(params[3 + i]);
    int32_t count = 0;
    for (int64_t cell = 0; cell < n * w; ++cell) {
        const int32_t position = start[cell / w] + static_cast<int32_t>(cell % w);
        if (tokens[cell] < 0 || position >= end[one_end ? 0 : cell / w]) continue;
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

// (position [R], request [R], count [1]) -> horizon [R]: the last position that the row's request has here
KERNEL block_horizon(KERNEL_ARGS) {
    const auto *position = static_cast<int32_t*>(params[0]), *request = static_cast<int32_t*>(params[1]);
    const int64_t rows = *static_cast<int32_t*>(params[2]);
    auto* horizon = static_cast<int32_t*>(params[3]);
    for (int64_t r = 0, end; r < rows; r = end) {  // a request's rows lie together
        int32_t last = position[r];
        for (end = r + 1; end < rows && request[end] == request[r]; ++end) last = std::max(last, position[end]);
        std::fill(horizon + r, horizon + end, last);
    }
    std::fill(horizon + rows, horizon + shapes[0][0], 0);
    return 0;
}

// (x [R, H], cell [R], count [1], cells [n2, w2], to_cell [R2], to_count [1]) -> [R2, H]: what stands at cells[to_cell]
KERNEL take_rows(KERNEL_ARGS) {
    const auto *x = static_cast<float*>(params[0]);
    const auto *cell = static_cast<int32_t*>(params[1]), *cells = static_cast<int32_t*>(params[3]), *to_cell = static_cast<int32_t*>(params[4]);
    const int64_t size = shapes[0][0], hidden = shapes[0][1];
    const int64_t rows = *static_cast<int32_t*>(params[2]), to_rows = *static_cast<int32_t*>(params[5]);
    auto* out = static_cast<float*>(params[6]);
    static thread_local std::vector<int64_t> places;
    places.assign(size, -1);
    for (int64_t r = 0; r < rows; ++r) places[cell[r]] = r;
    const int64_t* const row_of = places.data();
    parallel_for(to_rows, to_rows * hidden, [&](int64_t r) {
        const int64_t from = cells[to_cell[r]], row = from >= 0 && from < size ? row_of[from] : -1;
        if (row >= 0)
            std::memcpy(out + r * hidden, x + row * hidden, hidden * sizeof(float));
        else
            std::memset(out + r * hidden, 0, hidden * sizeof(float));
    });
    return 0;
}
