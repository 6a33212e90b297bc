// Rotary embedding, cache write and attention over the paged cache, for all live rows at once.
//
// Keys are summed in an order fixed by absolute position: 64-key tiles with an online softmax inside 256-key segments,
// segments merged left to right. A run of rows of one request and the query heads of one KV head share each load of K
// and V; what is masked adds exact zeros, so neither the run nor its neighbours show in a row's bits.
//
// Layouts: k_cache [blocks, kv_heads, block_size/16, D, 16], v_cache [blocks, kv_heads, block_size, Dp], Dp = D padded to 16.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t KEYS = 64, SEGMENT = 256;
constexpr int64_t MAX_QUERIES = 48;
#ifdef __AVX512F__
constexpr int QUERY_BLOCK = 6, WIDE = 4;
#else
constexpr int QUERY_BLOCK = 3, WIDE = 2;
#endif
const float NONE = -std::numeric_limits<float>::infinity();

struct Problem {
    int64_t heads, kv_heads, D, Dp, block_size, blocks_per_request, rows;
    const int32_t *position, *horizon, *request, *tables;  // horizon: the last position that a row sees
    float *k_cache, *v_cache, *q, *out;

    void caches(void* k, const int64_t* k_shape, void* v, const int64_t* v_shape) {
        k_cache = static_cast<float*>(k);
        v_cache = static_cast<float*>(v);
        kv_heads = k_shape[1], D = k_shape[3], Dp = v_shape[3], block_size = v_shape[2];
    }
    const float* gamma(void* weights, const int64_t* shape, int ndim) const {  // of another length than a head: none
        return ndim == 1 && shape[0] == D ? static_cast<float*>(weights) : nullptr;
    }
    int64_t group() const { return heads / kv_heads; }
    int64_t block(int64_t req, int64_t pos) const { return tables[req * blocks_per_request + pos / block_size]; }
    float* keys16(int64_t req, int64_t head, int64_t pos) const {  // the 16 keys around pos: [D, 16]
        const int64_t at = block(req, pos) * kv_heads + head;
        return k_cache + (at * (block_size / LANES) + pos % block_size / LANES) * D * LANES;
    }
    float* value(int64_t req, int64_t head, int64_t pos) const {
        const int64_t at = block(req, pos) * kv_heads + head;
        return v_cache + (at * block_size + pos % block_size) * Dp;
    }
};

// Running softmax of M query vectors: maximum, sum of exponentials, weighted sum of values.
struct State {
    float max[MAX_QUERIES], sum[MAX_QUERIES];
    std::vector<float> values;  // [M, Dp]
    void reset(int64_t M, int64_t Dp) {
        if (static_cast<int64_t>(values.size()) < MAX_QUERIES * Dp) values.resize(MAX_QUERIES * Dp);
        std::fill_n(max, M, NONE);
        std::fill_n(sum, M, 0.f);
        std::fill_n(values.data(), M * Dp, 0.f);
    }
};

inline float exp1(float x) { return vexp(splat(x))[0]; }

// Adds a later part of the keys to an earlier one. Not inlined: two copies might contract their sums differently.
__attribute__((noinline)) void merge(float& max, float& sum, float* values, float max2, float sum2, const float* values2, int64_t Dp) {
    if (max2 == NONE) return;
    const float top = std::max(max, max2), a = exp1(max - top), b = exp1(max2 - top);
    max = top;
    sum = sum * a + sum2 * b;
    for (int64_t d = 0; d < Dp; d += LANES) store(values + d, load(values + d) * a + load(values2 + d) * b);
}

template <int M, int G>
inline void score(const float* q, int64_t D, const float* const* keys, float* s) {
    vf acc[M][G];
    for (int m = 0; m < M; ++m)
        for (int g = 0; g < G; ++g) acc[m][g] = vf{};
    for (int64_t d = 0; d < D; ++d) {
        vf k[G];
        for (int g = 0; g < G; ++g) k[g] = load(keys[g] + d * LANES);
        for (int m = 0; m < M; ++m) {
            const vf a = splat(q[m * D + d]);
            for (int g = 0; g < G; ++g) acc[m][g] += a * k[g];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int g = 0; g < G; ++g) store(s + m * KEYS + g * LANES, acc[m][g]);
}

template <int M, int G>
inline void gather(const float* p, const float* const* values, int64_t from, int64_t to, float* o, int64_t Dp) {
    vf acc[M][G];
    for (int m = 0; m < M; ++m)
        for (int g = 0; g < G; ++g) acc[m][g] = load(o + m * Dp + g * LANES);
    for (int64_t t = from; t < to; ++t) {
        vf v[G];
        for (int g = 0; g < G; ++g) v[g] = load(values[t] + g * LANES);
        for (int m = 0; m < M; ++m) {
            const vf a = splat(p[m * KEYS + t]);
            for (int g = 0; g < G; ++g) acc[m][g] += a * v[g];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int g = 0; g < G; ++g) store(o + m * Dp + g * LANES, acc[m][g]);
}

// Calls f(std::integral_constant<int, n>) for a run-time n of 1..N.
template <int N, class F>
inline void with_static(int64_t n, F&& f) {
    if (n >= N)
        f(std::integral_constant<int, N>{});
    else if constexpr (N > 1)
        with_static<N - 1>(n, f);
}

// Keys [begin, end) for M query vectors q [M, D] that see nothing behind the positions last[M].
__attribute__((noinline)) void attend(const Problem& P, int64_t req, int64_t head, const float* q, const int64_t* last, int64_t M, int64_t begin, int64_t end,
            State& state, float* s) {
    state.reset(M, P.Dp);
    for (int64_t tile = begin; tile < end; tile += KEYS) {
        const int64_t keys = std::min(KEYS, end - tile), groups = (keys + LANES - 1) / LANES;
        const float* k[KEYS / LANES];
        const float* v[KEYS];
        int64_t seen[MAX_QUERIES];
        for (int64_t m = 0; m < M; ++m) seen[m] = std::clamp<int64_t>(last[m] + 1 - tile, 0, keys);
        for (int64_t g = 0; g < groups; ++g) k[g] = P.keys16(req, head, tile + g * LANES);
        for (int64_t t = 0; t < keys; ++t) v[t] = P.value(req, head, tile + t);
        for (int64_t m = 0; m < M; m += QUERY_BLOCK)
            for (int64_t g = 0; g < groups; g += WIDE)
                with_static<QUERY_BLOCK>(M - m, [&](auto rows) {
                    with_static<WIDE>(groups - g, [&](auto wide) { score<rows, wide>(q + m * P.D, P.D, k + g, s + m * KEYS + g * LANES); });
                });
        for (int64_t m = 0; m < M; ++m) {
            float* row = s + m * KEYS;
            if (seen[m] == 0) continue;
            for (int64_t t = seen[m]; t < KEYS; ++t) row[t] = NONE;
            vf top = load(row);
            for (int64_t t = LANES; t < KEYS; t += LANES) top = vmax(top, load(row + t));
            const float max = std::max(state.max[m], hmax(top)), scale = exp1(state.max[m] - max);
            vf sum = vf{};
            for (int64_t t = 0; t < KEYS; t += LANES) {
                const vf p = vexp(load(row + t) - splat(max));
                store(row + t, p);
                sum += p;
            }
            state.max[m] = max;
            state.sum[m] = state.sum[m] * scale + hsum(sum);
            float* o = state.values.data() + m * P.Dp;
            for (int64_t d = 0; d < P.Dp; d += LANES) store(o + d, load(o + d) * scale);
        }
        for (int64_t m = 0; m < M; m += QUERY_BLOCK) {
            // What all queries of the block see they share. The few keys behind are for each alone: 0 x NaN is no 0.
            const int64_t end_m = std::min<int64_t>(M, m + QUERY_BLOCK), shared = *std::min_element(seen + m, seen + end_m);
            for (int64_t d = 0; d < P.Dp; d += WIDE * LANES) {
                const float* at[KEYS];
                for (int64_t t = 0; t < keys; ++t) at[t] = v[t] + d;
                float* const o = state.values.data() + d;
                with_static<WIDE>((P.Dp - d) / LANES, [&](auto wide) {
                    with_static<QUERY_BLOCK>(M - m, [&](auto rows) { gather<rows, wide>(s + m * KEYS, at, 0, shared, o + m * P.Dp, P.Dp); });
                    for (int64_t i = m; i < end_m; ++i)
                        if (seen[i] > shared) gather<1, wide>(s + i * KEYS, at, shared, seen[i], o + i * P.Dp, P.Dp);
                });
            }
        }
    }
}

// Norm (optional) and rotation of one head, written to `to` with a stride.
inline void rotate(const float* in, int64_t D, const float* gamma, float eps, const float* cos, const float* sin, float scale, float* to,
                   int64_t stride) {
    const int64_t half = D / 2;
    float rms = 1.f;
    if (gamma) {
        vf squares = vf{};
        for (int64_t d = 0; d < D; ++d) squares[d % LANES] += in[d] * in[d];
        rms = 1.f / std::sqrt(hsum(squares) / static_cast<float>(D) + eps);
    }
    for (int64_t d = 0; d < half; ++d) {
        const float a = gamma ? in[d] * rms * gamma[d] : in[d], b = gamma ? in[d + half] * rms * gamma[d + half] : in[d + half];
        to[d * stride] = (a * cos[d] - b * sin[d]) * scale;
        to[(d + half) * stride] = (b * cos[d] + a * sin[d]) * scale;
    }
}

// Key and value of row r, from k and v [kv_heads, D], into the caches. Not inlined: see merge.
__attribute__((noinline)) void write(const Problem& P, int64_t r, const float* k, const float* v, const float* gamma, float eps, const float* cos,
                                     const float* sin) {
    const int64_t pos = P.position[r], req = P.request[r], at = pos * (P.D / 2);
    for (int64_t h = 0; h < P.kv_heads; ++h) {
        rotate(k + h * P.D, P.D, gamma, eps, cos + at, sin + at, 1.f, P.keys16(req, h, pos) + pos % LANES, LANES);
        std::memcpy(P.value(req, h, pos), v + h * P.D, P.D * sizeof(float));
    }
}

// Neighbouring rows of one request, and the end of what they see.
struct Run {
    int64_t row, rows, end;
};

}  // namespace

// (qkv [R, (heads + 2 kv_heads) D], position [R], horizon [R], request [R], count [1], block_tables [n, B], cos [L, D/2], sin [L, D/2],
//  k_cache, v_cache, q_gamma [D] or [1], k_gamma [D] or [1], eps [1]) -> [R, heads D]
KERNEL attention(KERNEL_ARGS) {
    Problem P;
    const auto* qkv = static_cast<float*>(params[0]);
    P.position = static_cast<int32_t*>(params[1]);
    P.horizon = static_cast<int32_t*>(params[2]);
    P.request = static_cast<int32_t*>(params[3]);
    P.rows = *static_cast<int32_t*>(params[4]);
    P.tables = static_cast<int32_t*>(params[5]);
    P.blocks_per_request = shapes[5][1];
    const auto *cos = static_cast<float*>(params[6]), *sin = static_cast<float*>(params[7]);
    P.caches(params[8], shapes[8], params[9], shapes[9]);
    const auto *q_gamma = P.gamma(params[10], shapes[10], ndims[10]), *k_gamma = P.gamma(params[11], shapes[11], ndims[11]);
    const float eps = *static_cast<float*>(params[12]);
    P.out = static_cast<float*>(params[13]);
    P.heads = shapes[13][1] / P.D;
    const int64_t stride = shapes[0][1], half = P.D / 2, G = P.group();
    const float scale = 1.f / std::sqrt(static_cast<float>(P.D));

    // Queries are regrouped as [kv_head, row, query in group, D], so that a run's queries lie together.
    static thread_local std::vector<float> queries, partial;
    static thread_local std::vector<Run> runs;
    if (static_cast<int64_t>(queries.size()) < P.rows * P.heads * P.D) queries.resize(P.rows * P.heads * P.D);
    P.q = queries.data();

    runs.clear();
    const int64_t longest = std::clamp<int64_t>(MAX_QUERIES / G, 1, 16);
    int64_t segments = 1;
    for (int64_t r = 0; r < P.rows; ++r) {
        const int64_t end = P.horizon[r] + 1;
        segments = std::max(segments, (end - 1) / SEGMENT + 1);
        if (!runs.empty() && P.request[runs.back().row] == P.request[r] && runs.back().rows < longest) {
            ++runs.back().rows;
            runs.back().end = std::max(runs.back().end, end);
        } else {
            runs.push_back({r, 1, end});
        }
    }
    const int64_t items = static_cast<int64_t>(runs.size()) * P.kv_heads, width = P.Dp + 2;
    const bool split = items < 16 && segments > 1;  // few long rows: spread their segments over the threads
    if (split && static_cast<int64_t>(partial.size()) < P.rows * P.heads * segments * width) partial.resize(P.rows * P.heads * segments * width);
    float* const q_all = P.q;
    float* const parts = partial.data();
    const Run* const all_runs = runs.data();

    // Keys of 16 neighbours share cache lines: one core writes them.
    const int64_t grain = LANES, numbers = P.rows * P.heads * P.D;
    int64_t seen = 0;
    for (int64_t r = 0; r < P.rows; ++r) seen += P.horizon[r] + 1;
    parallel_for((P.rows + grain - 1) / grain, numbers * 16, [&](int64_t item) {
        for (int64_t r = item * grain; r < std::min(P.rows, (item + 1) * grain); ++r) {
            const int64_t at = P.position[r] * half;
            const float *c = cos + at, *s = sin + at, *in = qkv + r * stride;
            for (int64_t h = 0; h < P.heads; ++h)
                rotate(in + h * P.D, P.D, q_gamma, eps, c, s, scale, q_all + ((h / G * P.rows + r) * G + h % G) * P.D, 1);
            write(P, r, in + P.heads * P.D, in + (P.heads + P.kv_heads) * P.D, k_gamma, eps, cos, sin);
        }
    });
    // A few rows are little work, but all of what they see has to come from memory: that is worth a second core sooner.
    parallel_for(items * (split ? segments : 1), 8 * seen * P.heads * P.D, [&](int64_t item) {
        static thread_local State state, total;
        static thread_local std::vector<float> scores(MAX_QUERIES* KEYS);
        {
            const int64_t segment = split ? item % segments : 0, pair = split ? item / segments : item;
            const int64_t head = pair % P.kv_heads;
            const Run run = all_runs[pair / P.kv_heads];
            const int64_t req = P.request[run.row], most = MAX_QUERIES / run.rows, end = run.end;
            // More query heads a KV head than a state holds: several passes.
            for (int64_t g = 0; g < G; g += most) {
                const int64_t M = run.rows * std::min(most, G - g);
                int64_t last[MAX_QUERIES];
                const float* q = q_all + ((head * P.rows + run.row) * G + g) * P.D;
                for (int64_t m = 0; m < M; ++m) last[m] = P.horizon[run.row + (M == run.rows * G ? m / G : 0)];
                const auto place = [&](int64_t m) {
                    return M == run.rows * G ? (run.row + m / G) * P.heads + head * G + m % G : run.row * P.heads + head * G + g + m;
                };
                if (split) {
                    const int64_t from = segment * SEGMENT;
                    if (from < end)
                        attend(P, req, head, q, last, M, from, std::min(end, from + SEGMENT), state, scores.data());
                    else
                        state.reset(M, P.Dp);
                    for (int64_t m = 0; m < M; ++m) {
                        float* to = parts + (place(m) * segments + segment) * width;
                        to[0] = state.max[m];
                        to[1] = state.sum[m];
                        std::memcpy(to + 2, state.values.data() + m * P.Dp, P.Dp * sizeof(float));
                    }
                    continue;
                }
                total.reset(M, P.Dp);
                for (int64_t from = 0; from < end; from += SEGMENT) {
                    attend(P, req, head, q, last, M, from, std::min(end, from + SEGMENT), state, scores.data());
                    for (int64_t m = 0; m < M; ++m)
                        merge(total.max[m], total.sum[m], total.values.data() + m * P.Dp, state.max[m], state.sum[m],
                              state.values.data() + m * P.Dp, P.Dp);
                }
                for (int64_t m = 0; m < M; ++m)
                    for (int64_t d = 0; d < P.D; ++d) P.out[place(m) * P.D + d] = total.values[m * P.Dp + d] / total.sum[m];
            }
        }
    });
    if (!split) return 0;
    parallel_for(P.rows, numbers * segments * 4, [&](int64_t r) {
        static thread_local State total;
        for (int64_t i = r * P.heads; i < (r + 1) * P.heads; ++i) {
            total.reset(1, P.Dp);
            for (int64_t s = 0; s < segments; ++s) {
                const float* from = parts + (i * segments + s) * width;
                merge(total.max[0], total.sum[0], total.values.data(), from[0], from[1], from + 2, P.Dp);
            }
            for (int64_t d = 0; d < P.D; ++d) P.out[i * P.D + d] = total.values[d] / total.sum[0];
        }
    });
    return 0;
}

// (kv [R, L 2 kv_heads D], position [R], request [R], count [1], block_tables [n, B], cos, sin [max_len, D/2],
//  k_cache, v_cache, k_gamma [D] or [1], eps [1]) -> count [1]: what attention writes to the caches, and no more.
// L = 1, or the number of layers whose caches and k_gamma stand in one parameter each.
KERNEL write_kv(KERNEL_ARGS) {
    Problem P;
    const auto* kv = static_cast<float*>(params[0]);
    P.position = static_cast<int32_t*>(params[1]);
    P.request = static_cast<int32_t*>(params[2]);
    P.rows = *static_cast<int32_t*>(params[3]);
    P.tables = static_cast<int32_t*>(params[4]);
    P.blocks_per_request = shapes[4][1];
    const auto *cos = static_cast<float*>(params[5]), *sin = static_cast<float*>(params[6]);
    const int stacked = ndims[7] == 6;
    const int64_t layers = stacked ? shapes[7][0] : 1;
    P.caches(params[7], shapes[7] + stacked, params[8], shapes[8] + stacked);
    const auto* k_gamma = P.gamma(params[9], shapes[9] + (ndims[9] == 2), 1);
    const float eps = *static_cast<float*>(params[10]);
    const int64_t keys = P.kv_heads * P.D, blocks = shapes[7][stacked];
    parallel_for(P.rows * layers, P.rows * layers * keys * 16, [&](int64_t item) {
        const int64_t r = item / layers, layer = item % layers;
        Problem own = P;
        own.k_cache += layer * blocks * keys * P.block_size;
        own.v_cache += layer * blocks * P.kv_heads * P.block_size * P.Dp;
        const float* in = kv + item * 2 * keys;
        write(own, r, in, in + keys, k_gamma ? k_gamma + layer * P.D : nullptr, eps, cos, sin);
    });
    *static_cast<int32_t*>(params[11]) = static_cast<int32_t>(P.rows);
    return 0;
}
