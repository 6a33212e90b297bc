// Linear maps on packed weights: W[N, K] held as panels [N/16, K, 16].
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, ..., K-1. The register tile (rows x panels)
// changes with the number of rows, the chain never does: that is what makes a row's bits independent of its neighbours.

#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

// The hardware's prefetchers stop at page ends and start anew at each panel; asking this many steps of k ahead keeps
// memory busy while the arithmetic of several rows goes on.
constexpr int64_t AHEAD = 48;
template <class T>
inline void ahead(const T* p) {
    __builtin_prefetch(p, 0, 2);
}

// How a dtype holds panels. ``wide`` gives the 16 columns of panel 2 * pair and those of panel 2 * pair + 1 at k, ``one``
// those of one of the two.
struct F32 {
    using T = float;
    template <int HALF>
    static vf one(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further) {
        ahead(w + ((2 * pair + HALF) * K + k + further) * LANES);
        return load(w + ((2 * pair + HALF) * K + k) * LANES);
    }
    static void wide(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further, vf* to) {
        to[0] = one<0>(w, pair, k, K, further);
        to[1] = one<1>(w, pair, k, K, further);
    }
    static float element(const T* w, int64_t row, int64_t k, int64_t K) { return w[(row / LANES * K + k) * LANES + row % LANES]; }
};
struct F16 {
    using T = _Float16;
    typedef _Float16 v __attribute__((vector_size(32), aligned(2)));
    template <int HALF>
    static vf one(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further) {
        ahead(w + ((2 * pair + HALF) * K + k + further) * LANES);
        return __builtin_convertvector(*reinterpret_cast<const v*>(w + ((2 * pair + HALF) * K + k) * LANES), vf);
    }
    static void wide(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further, vf* to) {
        to[0] = one<0>(w, pair, k, K, further);
        to[1] = one<1>(w, pair, k, K, further);
    }
    static float element(const T* w, int64_t row, int64_t k, int64_t K) {
        return static_cast<float>(w[(row / LANES * K + k) * LANES + row % LANES]);
    }
};
struct BF16 {  // pairs of panels share 32-bit lanes: one shift and one mask widen both
    using T = uint16_t;
    static vu both(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further) {
        ahead(w + (pair * K + k + further) * 2 * LANES);
        return *reinterpret_cast<const vuu*>(w + (pair * K + k) * 2 * LANES);
    }
    static void wide(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further, vf* to) {
        const vu v = both(w, pair, k, K, further);
        to[0] = (vf)(v << 16);
        to[1] = (vf)(v & 0xffff0000u);
    }
    template <int HALF>
    static vf one(const T* w, int64_t pair, int64_t k, int64_t K, int64_t further) {
        const vu v = both(w, pair, k, K, further);
        return HALF ? (vf)(v & 0xffff0000u) : (vf)(v << 16);
    }
    static float element(const T* w, int64_t row, int64_t k, int64_t K) {
        const uint32_t bits = static_cast<uint32_t>(w[((row / 32 * K + k) * LANES + row % LANES) * 2 + row / LANES % 2]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

// Accumulators that fit the register file beside the weights of all panels at once, in units of 16 floats, and the
// tallest row block. Where pairs do not fit, panels pass one by one.
#ifdef __AVX512F__
constexpr int TILE = 24, MAX_ROWS = 12, MAX_PAIRS = 4;
#else
constexpr int TILE = 4, MAX_ROWS = 6, MAX_PAIRS = 1;
#endif
// Row blocks whose activations stay in the second-level cache while all panels pass by.
constexpr int64_t CHUNK = 10;
// Columns of a block that are filled at once.
constexpr int64_t COLUMNS = 128;
// Pieces that a product is cut into: enough to share evenly, few enough to keep each a long stream.
constexpr int64_t ITEMS = 16;

constexpr int pairs_for(int rows) { return std::clamp(TILE / 2 / rows, 1, MAX_PAIRS); }

// Rows cut into blocks of nearly equal height, each held as [K, rows]: one pointer walks all rows of a block.
struct Blocks {
    int64_t rows, K, count;
    float* data;
    int64_t first(int64_t block) const { return rows * block / count; }
    const float* at(int64_t block) const { return data + first(block) * K; }

    Blocks(int64_t rows, int64_t K) : rows(rows), K(K), count((rows + MAX_ROWS - 1) / MAX_ROWS) {
        static thread_local std::vector<float> scratch;
        if (static_cast<int64_t>(scratch.size()) < rows * K) scratch.resize(rows * K);
        data = scratch.data();
    }
    // Takes the rows of x in, normed if there is a gamma. Columns are shared out, not rows: those of a block lie so close
    // together that two cores would write to the same cache lines.
    void fill(const float* x, const float* gamma, float eps) const {
        static thread_local std::vector<float> scratch;
        if (static_cast<int64_t>(scratch.size()) < rows) scratch.resize(rows);
        float* const scales = scratch.data();
        if (gamma) parallel_for(rows, rows * K, [&](int64_t row) { scales[row] = rms_scale(x + row * K, K, eps); });
        const int64_t parts = (K + COLUMNS - 1) / COLUMNS;
        parallel_for(count * parts, rows * K * 8, [&](int64_t item) {
            const int64_t block = item / parts, begin = item % parts * COLUMNS, end = std::min(K, begin + COLUMNS);
            const int64_t from = first(block), height = first(block + 1) - from;
            float* const to = data + from * K;
            for (int64_t m = 0; m < height; ++m) {
                const float* const in = x + (from + m) * K;
                if (gamma)
                    for (int64_t k = begin; k < end; ++k) to[k * height + m] = in[k] * scales[from + m] * gamma[k];
                else
                    for (int64_t k = begin; k < end; ++k) to[k * height + m] = in[k];
            }
        });
    }
};

// M rows times one panel of a pair.
template <class W, int M, int HALF, int P>
inline void multiply_one(const float* x, int64_t K, const typename W::T* w, int64_t pair, int at, vf (&to)[M][P]) {
    vf acc[M];
    for (int m = 0; m < M; ++m) acc[m] = vf{};
    for (int64_t k = 0; k < K; ++k) {
        const vf wide = W::template one<HALF>(w, pair, k, K, AHEAD);
        for (int m = 0; m < M; ++m) acc[m] += splat(x[k * M + m]) * wide;
    }
    for (int m = 0; m < M; ++m) to[m][at] = acc[m];
}

// M rows times Q pairs of panels from `pair` on.
template <class W, int M, int Q>
inline void multiply(const float* x, int64_t K, const typename W::T* w, int64_t pair, vf (&acc)[M][2 * Q]) {
    if constexpr (2 * Q * M > TILE) {
        for (int q = 0; q < Q; ++q) {
            multiply_one<W, M, 0>(x, K, w, pair + q, 2 * q, acc);
            multiply_one<W, M, 1>(x, K, w, pair + q, 2 * q + 1, acc);
        }
        return;
    }
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < 2 * Q; ++p) acc[m][p] = vf{};
    const auto pass = [&](int64_t from, int64_t to, int64_t further) {
#pragma GCC unroll 2
        for (int64_t k = from; k < to; ++k) {
            vf wide[2 * Q];
            for (int q = 0; q < Q; ++q) W::wide(w, pair + q, k, K, further, wide + 2 * q);
            for (int m = 0; m < M; ++m) {
                const vf a = splat(x[k * M + m]);
                for (int p = 0; p < 2 * Q; ++p) acc[m][p] += a * wide[p];
            }
        }
    };
    // Near the end the next tile is what comes: its pairs begin Q - 1 pairs behind the end of these.
    const int64_t turn = std::max<int64_t>(K - AHEAD, 0);
    pass(0, turn, AHEAD);
    pass(turn, K, AHEAD + (Q - 1) * K);
}

// y = x W^T + bias (+ residual)
template <class W>
struct Plain {
    const typename W::T* w;
    const float *bias, *residual;
    float* y;
    int64_t N, K;
    int64_t panels() const { return (N + LANES - 1) / LANES; }

    template <int M, int P>
    void write(int64_t row, int64_t panel, const vf (&acc)[M][P]) const {
        for (int p = 0; p < P; ++p) {
            const int64_t col = (panel + p) * LANES, n = N - col;
            const vf b = bias ? get(bias + col, n) : vf{};
            for (int m = 0; m < M; ++m) {
                vf v = acc[m][p] + b;
                if (residual) v = v + get(residual + (row + m) * N + col, n);
                put(y + (row + m) * N + col, v, n);
            }
        }
    }
};

// y = silu(x G^T + bg) * (x U^T + bu); even panels are G's, odd ones U's
template <class W>
struct Gated {
    const typename W::T* w;
    const float *gate_bias, *up_bias;
    float* y;
    int64_t N, K;
    int64_t panels() const { return (N + LANES - 1) / LANES * 2; }

    template <int M, int P>
    void write(int64_t row, int64_t panel, const vf (&acc)[M][P]) const {
        for (int p = 0; p + 1 < P; p += 2) {
            const int64_t col = (panel + p) / 2 * LANES, n = N - col;
            const vf bg = gate_bias ? get(gate_bias + col, n) : vf{}, bu = up_bias ? get(up_bias + col, n) : vf{};
            for (int m = 0; m < M; ++m) {
                const vf g = acc[m][p] + bg, u = acc[m][p + 1] + bu;
                put(y + (row + m) * N + col, g / (splat(1.f) + vexp(-g)) * u, n);
            }
        }
    }
};

// Pairs of panels [begin, end) for a block of rows whose height is known only now.
template <class W, class Map, int M = MAX_ROWS>
void block_rows(int64_t height, const Map& map, const float* x, int64_t row, int64_t begin, int64_t end) {
    if (height == M) {
        constexpr int Q = pairs_for(M);
        const int64_t whole = std::min(end, map.panels() / 2);
        int64_t q = begin;
        for (; q + Q <= whole; q += Q) {
            vf acc[M][2 * Q];
            multiply<W, M, Q>(x, map.K, map.w, q, acc);
            map.template write<M, 2 * Q>(row, 2 * q, acc);
        }
        for (; q < whole; ++q) {
            vf acc[M][2];
            multiply<W, M, 1>(x, map.K, map.w, q, acc);
            map.template write<M, 2>(row, 2 * q, acc);
        }
        if (q < end) {
            vf acc[M][1];
            multiply_one<W, M, 0>(x, map.K, map.w, q, 0, acc);
            map.template write<M, 1>(row, 2 * q, acc);
        }
    } else if constexpr (M > 1) {
        block_rows<W, Map, M - 1>(height, map, x, row, begin, end);
    }
}

template <class W, class Map>
void apply(const Map& map, const Blocks& x) {
    if (x.rows == 0) return;
    const int64_t pairs = (map.panels() + 1) / 2, chunks = (x.count + CHUNK - 1) / CHUNK;
    // As many equal ranges as threads, each cut into whole tiles: what does not fill a tile is the end of every range, and
    // nobody waits for one who has a tile more. With many blocks a few panels stay in the near caches while the blocks pass.
    const int64_t tile = pairs_for(static_cast<int>(std::min<int64_t>(x.first(1), MAX_ROWS)));
    const int64_t most = x.count > 1 ? 8 : pairs, ranges = std::min<int64_t>(threads(), pairs);
    const int64_t longest = (pairs + ranges - 1) / ranges;
    const int64_t grain = std::clamp<int64_t>(pairs / ITEMS / tile * tile, tile, most), grains = (longest + grain - 1) / grain;
    parallel_for(chunks * grains * ranges, x.rows * map.panels() * LANES * map.K, [&](int64_t item) {
        const int64_t range = item % ranges, first = pairs * range / ranges, end = pairs * (range + 1) / ranges;
        const int64_t from = first + item / ranges % grains * grain, to = std::min(end, from + grain);
        const int64_t chunk = item / (ranges * grains), last = std::min(x.count, (chunk + 1) * CHUNK);
        for (int64_t b = chunk * CHUNK; b < last; ++b)
            block_rows<W>(x.first(b + 1) - x.first(b), map, x.at(b), x.first(b), from, to);
    });
}

// A bias of another length than the output stands for none.
const float* bias_or_none(void** params, int64_t** shapes, int at, int64_t N) {
    return shapes[at][0] == N ? static_cast<float*>(params[at]) : nullptr;
}

// (x [R, K], gamma [K], eps [1], weight, bias [N] or none, count [1]) -> y [R, N]
template <class W>
int norm_linear(void** params, int64_t** shapes) {
    const int64_t K = shapes[0][1], N = shapes[6][1], rows = *static_cast<int32_t*>(params[5]);
    const Blocks x(rows, K);
    x.fill(static_cast<float*>(params[0]), static_cast<float*>(params[1]), *static_cast<float*>(params[2]));
    apply<W>(Plain<W>{static_cast<typename W::T*>(params[3]), bias_or_none(params, shapes, 4, N), nullptr, static_cast<float*>(params[6]), N, K},
          x);
    return 0;
}

// (x [R, K], gamma [K], eps [1], gate_up, gate_bias [N] or none, up_bias [N] or none, count [1]) -> y [R, N]
template <class W>
int norm_gated(void** params, int64_t** shapes) {
    const int64_t K = shapes[0][1], N = shapes[7][1], rows = *static_cast<int32_t*>(params[6]);
    const Blocks x(rows, K);
    x.fill(static_cast<float*>(params[0]), static_cast<float*>(params[1]), *static_cast<float*>(params[2]));
    apply<W>(Gated<W>{static_cast<typename W::T*>(params[3]), bias_or_none(params, shapes, 4, N), bias_or_none(params, shapes, 5, N),
                      static_cast<float*>(params[7]), N, K},
             x);
    return 0;
}

// (x [R, K], weight, bias [N] or none, count [1]) -> y [R, N]
template <class W>
int linear(void** params, int64_t** shapes) {
    const int64_t K = shapes[0][1], N = shapes[4][1], rows = *static_cast<int32_t*>(params[3]);
    const Blocks x(rows, K);
    x.fill(static_cast<float*>(params[0]), nullptr, 0.f);
    apply<W>(Plain<W>{static_cast<typename W::T*>(params[1]), bias_or_none(params, shapes, 2, N), nullptr, static_cast<float*>(params[4]), N, K},
          x);
    return 0;
}

// (x [R, K], residual [R, N], weight, bias [N] or none, count [1]) -> y [R, N]
template <class W>
int linear_add(void** params, int64_t** shapes) {
    const int64_t K = shapes[0][1], N = shapes[1][1], rows = *static_cast<int32_t*>(params[4]);
    const Blocks x(rows, K);
    x.fill(static_cast<float*>(params[0]), nullptr, 0.f);
    apply<W>(Plain<W>{static_cast<typename W::T*>(params[2]), bias_or_none(params, shapes, 3, N), static_cast<float*>(params[1]),
                   static_cast<float*>(params[5]), N, K},
          x);
    return 0;
}

// (token [R], weight, count [1]) -> x [R, K]: row `token` of the table, read out of its panel.
template <class W>
int embedding(void** params, int64_t** shapes) {
    const int64_t K = shapes[1][1], rows = *static_cast<int32_t*>(params[2]);
    const auto* w = static_cast<typename W::T*>(params[1]);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t id = static_cast<int32_t*>(params[0])[r];
        float* to = static_cast<float*>(params[3]) + r * K;
        for (int64_t k = 0; k < K; ++k) to[k] = W::element(w, id, k, K);
    }
    return 0;
}

}  // namespace
