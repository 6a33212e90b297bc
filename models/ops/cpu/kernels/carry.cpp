// Where a request stands after a step that the host has not looked at yet.
#include <algorithm>

#include "vec.h"

// (history [S, L], carry [S, 1 + K], slot [n], tokens [n, w], start [n], carried [n], uniforms [n, w + K])
// -> tokens, start, uniforms. A carry holds the length and the drafts behind it.
KERNEL read_carry(KERNEL_ARGS) {
    const int64_t n = shapes[3][0], w = shapes[3][1], L = shapes[0][1], wide = shapes[1][1], drawn = shapes[6][1];
    const auto *history = static_cast<int32_t*>(params[0]), *carry = static_cast<int32_t*>(params[1]);
    const auto *slot = static_cast<int32_t*>(params[2]), *tokens = static_cast<int32_t*>(params[3]);
    const auto *start = static_cast<int32_t*>(params[4]), *carried = static_cast<int32_t*>(params[5]);
    const auto* uniforms = static_cast<float*>(params[6]);
    auto *tokens_out = static_cast<int32_t*>(params[7]), *start_out = static_cast<int32_t*>(params[8]);
    auto* uniforms_out = static_cast<float*>(params[9]);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t* known = carry + slot[i] * wide;
        int64_t at = start[i], shift = 0;
        if (carried[i]) {
            at = std::clamp<int64_t>(known[0] - 1, 0, L - 1);
            shift = std::clamp<int64_t>(at - start[i], 0, drawn - w);
        }
        bool live = true;
        for (int64_t c = 0; c < w; ++c) {
            int32_t token = tokens[i * w + c];
            if (carried[i]) {
                live = live && token >= 0 && at + c < L - 1;
                if (live) token = c ? known[c] : history[slot[i] * L + at];
                live = live && token >= 0;
                if (!live) token = -1;
            }
            tokens_out[i * w + c] = token;
        }
        start_out[i] = static_cast<int32_t>(at);
        for (int64_t c = 0; c < drawn; ++c) uniforms_out[i * drawn + c] = uniforms[i * drawn + (c < w ? c + shift : c)];
    }
    return 0;
}
