// Linear maps on packed weights: W[N, K] held as panels [N/16, K, 16].
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, ..., K-1. The register tile (rows x panels)
// changes with the number of rows, the chain never does: that is what makes a row's bits independent of its neighbours.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace {

struct F32 {
    using T = float;
    static vf at(const T* p) { return load(p); }
};
struct BF16 {
    using T = uint16_t;
    static vf at(const T* p) { return (vf)(__builtin_convertvector(*reinterpret_cast<const vhu*>(p), vu) << 16); }
};
struct F16 {
    using T = _Float16;
    typedef _Float16 v __attribute__((vector_size(32), aligned(2)));
    static vf at(const T* p) { return __builtin_convertvector(*reinterpret_cast<const v*>(p), vf); }
};

// Accumulators that fit the register file, in units of 16 floats, and the tallest row block.
#ifdef __AVX512F__
constexpr int64_t TILE = 24, MAX_ROWS = 12, MAX_PANELS = 8;
#else
constexpr int64_t TILE = 6, MAX_ROWS = 6, MAX_PANELS = 4;
#endif
// Rows whose activations stay in the second-level cache while all panels pass by.
constexpr int64_t ROW_CHUNK = 10 * MAX_ROWS;

constexpr int64_t panels_for(int64_t rows) { return std::clamp<int64_t>(TILE / rows, 1, MAX_PANELS); }

template <class W, int M, int P>
inline void multiply(const float* x, int64_t K, const typename W::T* const (&panel)[P], vf (&acc)[M][P]) {
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < P; ++p) acc[m][p] = vf{};
    for (int64_t k = 0; k < K; ++k) {
        vf w[P];
        for (int p = 0; p < P; ++p) w[p] = W::at(panel[p] + k * LANES);
        for (int m = 0; m < M; ++m) {
            const vf a = splat(x[m * K + k]);
            for (int p = 0; p < P; ++p) acc[m][p] += a * w[p];
        }
    }
}

inline void put(float* y, vf value, int64_t n) {
    if (n >= LANES)
        store(y, value);
    else
        for (int64_t j = 0; j < n; ++j) y[j] = value[j];
}
inline vf get(const float* p, int64_t n) {
    if (n >= LANES) return load(p);
    vf v = vf{};
    for (int64_t j = 0; j < n; ++j) v[j] = p[j];
    return v;
}

// y = x W^T + bias (+ residual)
template <class W>
struct Plain {
    const typename W::T* w;
    const float *bias, *residual;
    float* y;
    int64_t N, K;
    static constexpr int64_t streams = 1;

    template <int M, int P>
    void tile(const float* x, int64_t row, int64_t first) const {
        const typename W::T* panel[P];
        for (int p = 0; p < P; ++p) panel[p] = w + (first + p) * K * LANES;
        vf acc[M][P];
        multiply<W, M, P>(x, K, panel, acc);
        for (int p = 0; p < P; ++p) {
            const int64_t col = (first + p) * LANES, n = N - col;
            const vf b = get(bias + col, n);
            for (int m = 0; m < M; ++m) {
                vf v = acc[m][p] + b;
                if (residual) v = v + get(residual + (row + m) * N + col, n);
                put(y + (row + m) * N + col, v, n);
            }
        }
    }
};

// y = silu(x G^T + bg) * (x U^T + bu)
template <class W>
struct Gated {
    const typename W::T *gate, *up;
    const float *gate_bias, *up_bias;
    float* y;
    int64_t N, K;
    static constexpr int64_t streams = 2;

    template <int M, int P>
    void tile(const float* x, int64_t row, int64_t first) const {
        const typename W::T* panel[2 * P];
        for (int p = 0; p < P; ++p) {
            panel[2 * p] = gate + (first + p) * K * LANES;
            panel[2 * p + 1] = up + (first + p) * K * LANES;
        }
        vf acc[M][2 * P];
        multiply<W, M, 2 * P>(x, K, panel, acc);
        for (int p = 0; p < P; ++p) {
            const int64_t col = (first + p) * LANES, n = N - col;
            const vf bg = get(gate_bias + col, n), bu = get(up_bias + col, n);
            for (int m = 0; m < M; ++m) {
                const vf g = acc[m][2 * p] + bg, u = acc[m][2 * p + 1] + bu;
                put(y + (row + m) * N + col, g / (splat(1.f) + vexp(-g)) * u, n);
            }
        }
    }
};

template <class Map, int M>
void row_block(const Map& map, const float* x, int64_t row, int64_t begin, int64_t end) {
    constexpr int P = std::max<int64_t>(1, panels_for(M) / Map::streams);
    int64_t p = begin;
    for (; p + P <= end; p += P) map.template tile<M, P>(x, row, p);
    for (; p < end; ++p) map.template tile<M, 1>(x, row, p);
}

template <class Map, int M = MAX_ROWS>
void row_block_of(int64_t rows, const Map& map, const float* x, int64_t row, int64_t begin, int64_t end) {
    if (rows == M)
        row_block<Map, M>(map, x, row, begin, end);
    else if constexpr (M > 1)
        row_block_of<Map, M - 1>(rows, map, x, row, begin, end);
}

// x: [rows, K], contiguous. Threads share the panels; few rows take all panels in one pass, many rows pass panel by panel.
template <class Map>
void apply(const Map& map, const float* x, int64_t rows) {
    const int64_t panels = (map.N + LANES - 1) / LANES;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t begin = panels * me / threads, end = panels * (me + 1) / threads;
        for (int64_t chunk = 0; chunk < rows; chunk += ROW_CHUNK) {
            const int64_t left = std::min(rows - chunk, ROW_CHUNK);
            const int64_t blocks = (left + MAX_ROWS - 1) / MAX_ROWS;
            if (blocks == 1) {
                row_block_of(left, map, x + chunk * map.K, chunk, begin, end);
                continue;
            }
            // A group that every block height can cut into full register tiles.
            const int64_t low = panels_for(left / blocks), high = panels_for((left + blocks - 1) / blocks);
            const int64_t group = low == high ? std::max<int64_t>(1, low / Map::streams) : 12;
            for (int64_t p = begin; p < end; p += group)
                for (int64_t b = 0; b < blocks; ++b) {
                    const int64_t from = left * b / blocks, to = left * (b + 1) / blocks;
                    row_block_of(to - from, map, x + (chunk + from) * map.K, chunk + from, p, std::min(p + group, end));
                }
        }
    }
}

// Root-mean-square norm of each row, into the calling thread's scratch.
const float* normed(const float* x, const float* gamma, float eps, int64_t rows, int64_t K) {
    static thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < rows * K) scratch.resize(rows * K);
    float* const out = scratch.data();
#pragma omp parallel for if (rows > 16)
    for (int64_t r = 0; r < rows; ++r) {
        const float* in = x + r * K;
        float* to = out + r * K;
        vf squares = vf{};
        for (int64_t k = 0; k < K; k += LANES) {
            const vf v = get(in + k, K - k);
            squares += v * v;
        }
        const float scale = 1.f / std::sqrt(hsum(squares) / static_cast<float>(K) + eps);
        for (int64_t k = 0; k < K; k += LANES) put(to + k, get(in + k, K - k) * scale * get(gamma + k, K - k), K - k);
    }
    return out;
}

// (x [R, K], gamma [K], eps [1], weight, bias [N], count [1]) -> y [R, N]
template <class W>
int norm_linear(void** params, int64_t** shapes) {
    const int64_t K = shapes[0][1], N = shapes[4][0], rows = *static_cast<int32_t*>(params[5]);
    const float* x = normed(static_cast<float*>(params[0]), static_cast<float*>(params[1]), *static_cast<float*>(params[2]), rows, K);
    apply(Plain<W>{static_cast<typename W::T*>(params[3]), static_cast<float*>(params[4]), nullptr, static_cast<float*>(params[6]), N, K}, x, rows);
    return 0;
}

// (x [R, K], gamma [K], eps [1], gate, gate_bias [N], up, up_bias [N], count [1]) -> y [R, N]
template <class W>
int norm_gated(void** params, int64_t** shapes) {
    using T = typename W::T;
    const int64_t K = shapes[0][1], N = shapes[4][0], rows = *static_cast<int32_t*>(params[7]);
    const float* x = normed(static_cast<float*>(params[0]), static_cast<float*>(params[1]), *static_cast<float*>(params[2]), rows, K);
    apply(Gated<W>{static_cast<T*>(params[3]), static_cast<T*>(params[5]), static_cast<float*>(params[4]), static_cast<float*>(params[6]),
                   static_cast<float*>(params[8]), N, K},
          x, rows);
    return 0;
}

// (x [R, K], residual [R, N], weight, bias [N], count [1]) -> y [R, N]
template <class W>
int linear_add(void** params, int64_t** shapes) {
    const int64_t K = shapes[0][1], N = shapes[1][1], rows = *static_cast<int32_t*>(params[4]);
    apply(Plain<W>{static_cast<typename W::T*>(params[2]), static_cast<float*>(params[3]), static_cast<float*>(params[1]),
                   static_cast<float*>(params[5]), N, K},
          static_cast<float*>(params[0]), rows);
    return 0;
}

// (token [R], weight, count [1]) -> x [R, K]: row `token` of the table, read out of its panel.
template <class W>
int embedding(void** params, int64_t** shapes) {
    const int64_t K = shapes[1][1], rows = *static_cast<int32_t*>(params[2]);
    const auto* w = static_cast<typename W::T*>(params[1]);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t id = static_cast<int32_t*>(params[0])[r];
        const auto* column = w + (id / LANES) * K * LANES + id % LANES;
        float* to = static_cast<float*>(params[3]) + r * K;
        for (int64_t k = 0; k < K; ++k) {
            if constexpr (std::is_same_v<W, BF16>) {
                const uint32_t bits = static_cast<uint32_t>(column[k * LANES]) << 16;
                std::memcpy(to + k, &bits, 4);
            } else {
                to[k] = static_cast<float>(column[k * LANES]);
            }
        }
    }
    return 0;
}

}  // namespace

#define FOR_EACH_DTYPE(name)                                                  \
    KERNEL name##_float32(KERNEL_ARGS) { return name<F32>(params, shapes); }   \
    KERNEL name##_bfloat16(KERNEL_ARGS) { return name<BF16>(params, shapes); } \
    KERNEL name##_float16(KERNEL_ARGS) { return name<F16>(params, shapes); }

FOR_EACH_DTYPE(norm_linear)
FOR_EACH_DTYPE(norm_gated)
FOR_EACH_DTYPE(linear_add)
FOR_EACH_DTYPE(embedding)
