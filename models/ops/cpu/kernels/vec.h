// Vectors of 16 floats and the few functions on them that all kernels share.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define KERNEL extern "C" int
#define KERNEL_ARGS int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* stream, void* extra

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint32_t vuu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vhu __attribute__((vector_size(32), aligned(2)));

static inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
static inline vf load(const float* p) { return *reinterpret_cast<const vfu*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vfu*>(p) = x; }
static inline vf blend(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
static inline vf vmax(vf a, vf b) { return blend(a > b, a, b); }
static inline vf vmin(vf a, vf b) { return blend(a < b, a, b); }

// Lanes are folded in one fixed tree, so a sum has the same bits wherever it is taken.
static inline float hsum(vf x) {
    float t[LANES];
    store(t, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
}
static inline float hmax(vf x) {
    float m = x[0];
    for (int i = 1; i < LANES; ++i) m = x[i] > m ? x[i] : m;
    return m;
}

// The first n of 16 floats; the others are 0, or left alone.
static inline vf get(const float* p, int64_t n) {
    if (n >= LANES) return load(p);
    vf v = vf{};
    for (int64_t j = 0; j < n; ++j) v[j] = p[j];
    return v;
}
static inline void put(float* y, vf value, int64_t n) {
    if (n >= LANES)
        store(y, value);
    else
        for (int64_t j = 0; j < n; ++j) y[j] = value[j];
}

// What an RMS norm multiplies its K inputs with.
static inline float rms_scale(const float* in, int64_t K, float eps) {
    vf squares = vf{};
    for (int64_t k = 0; k < K; k += LANES) {
        const vf v = get(in + k, K - k);
        squares += v * v;
    }
    return 1.f / std::sqrt(hsum(squares) / static_cast<float>(K) + eps);
}

// e^x by a degree-6 polynomial on [-ln2/2, ln2/2] (Cephes' coefficients); exactly 1 at 0, 0 below -87.3, about 1 ulp off.
static inline vf vexp(vf x) {
    const vi under = x < splat(-87.3f);
    x = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
    const vf shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const vf n = (x * splat(1.44269504f) + shift) - shift;
    const vf r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = (p * (r * r) + r) + splat(1.f);
    const vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
    return blend(under, splat(0.f), p * (vf)scale);
}
