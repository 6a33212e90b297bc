// The committed ids of every request, kept on the device for proposers to look at.
#include "vec.h"

// (history [S, L], slot [n], start [n], tokens [n, w], count [n]) -> length [n] = start + count.
// Writes tokens to history[slot, start ...], the padding of the last ones too: nothing at or behind `length` is ever read.
KERNEL write_history(KERNEL_ARGS) {
    const int64_t n = shapes[3][0], w = shapes[3][1], L = shapes[0][1];
    auto* history = static_cast<int32_t*>(params[0]);
    const auto *slot = static_cast<int32_t*>(params[1]), *start = static_cast<int32_t*>(params[2]);
    const auto *tokens = static_cast<int32_t*>(params[3]), *count = static_cast<int32_t*>(params[4]);
    auto* length = static_cast<int32_t*>(params[5]);
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < w && start[i] + c < L; ++c) history[slot[i] * L + start[i] + c] = tokens[i * w + c];
        length[i] = start[i] + count[i];
    }
    return 0;
}
