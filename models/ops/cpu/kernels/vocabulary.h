// Going over a row of logits or probabilities: blocks of a fixed size, vectors, and what is left at the end.
#pragma once
#include <cstdint>
#include <cstring>

#include "vec.h"

constexpr int64_t BLOCK = 4096;
constexpr float INF = __builtin_inff();

static inline int64_t blocks_of(int64_t V) { return (V + BLOCK - 1) / BLOCK; }
static inline int64_t live_rows(const int32_t* count, int64_t R) { return *count < R ? *count : R; }

// The last vector of a row, filled up.
static inline vf load_tail(const float* p, int64_t n, float fill) {
    vf x = splat(fill);
    std::memcpy(&x, p, n * sizeof(float));
    return x;
}
static inline void store_tail(float* p, int64_t n, vf x) { std::memcpy(p, &x, n * sizeof(float)); }

// Calls f(offset, lanes) for every vector of n floats.
template <class F>
static inline void each_vector(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, (int)(n - i));
}
static inline vf load_n(const float* p, int lanes, float fill) { return lanes == LANES ? load(p) : load_tail(p, lanes, fill); }
static inline void store_n(float* p, int lanes, vf x) {
    if (lanes == LANES) store(p, x);
    else store_tail(p, lanes, x);
}
static inline bool any(vi mask) {
    int64_t w[8];
    std::memcpy(w, &mask, sizeof w);
    return ((w[0] | w[1]) | (w[2] | w[3])) | ((w[4] | w[5]) | (w[6] | w[7]));
}

// Maximum of n floats; bad when one of them is NaN or +inf.
static inline float block_max(const float* x, int64_t n, bool& bad) {
    vf top = splat(-INF);
    vi fine = ~vi{};
    each_vector(n, [&](int64_t i, int lanes) {
        const vf v = load_n(x + i, lanes, -INF);
        fine &= v < splat(INF);
        top = vmax(v, top);
    });
    bad = any(~fine);
    return hmax(top);
}

static inline int64_t first_equal(const float* x, int64_t n, float value) {
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == value) return i;
    return -1;
}
