// From logits to tokens: filtered distributions, inverse CDF, entropy.
//
// Rows are cut in blocks of a fixed size, which are the unit of parallel work; sums are taken within a block in one order
// and over blocks in index order. So a row's bits depend on nothing but the row. There is no sort over the vocabulary:
// a threshold is found by a histogram over the leading bits of the floats, then over the bits behind them, down to
// the exact value.
#include <cfloat>
#include <cmath>
#include <vector>

#include "pool.h"
#include "shaping.h"
#include "vocabulary.h"

namespace {

// Values that can still be kept, and room to refine them.
struct Candidates {
    std::vector<float> value, part;
    int64_t n = 0;
};

// Least x among the first n values such that what is larger weighs less than goal. Weight: 1 each, or the value itself.
// All values are positive, so their bits are ordered as they are.
float least_kept(const float* value, int64_t n, std::vector<float>& part, double goal, bool by_count) {
    constexpr int SHIFT[3] = {20, 9, 0}, BITS[3] = {11, 11, 9};
    static thread_local double weight[2048];
    double above = 0;
    uint32_t found = 0;
    for (int level = 0; level < 3; ++level) {
        const int size = 1 << BITS[level];
        std::memset(weight, 0, size * sizeof(double));
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, value + i, 4);
            weight[(bits >> SHIFT[level]) & (size - 1)] += by_count ? 1. : (double)value[i];
        }
        int bucket = size - 1, lowest = 0;
        for (;; --bucket) {
            if (weight[bucket] > 0) {
                lowest = bucket;
                if (above + weight[bucket] >= goal) break;
                above += weight[bucket];
            }
            if (bucket == 0) {  // rounding hid the goal: everything is kept
                bucket = lowest;
                above -= weight[bucket];
                break;
            }
        }
        found |= (uint32_t)bucket << SHIFT[level];
        if (level == 2) break;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, value + i, 4);
            part[kept] = value[i];
            kept += (bits >> SHIFT[level]) == (found >> SHIFT[level]);
        }
        value = part.data();
        n = kept;
    }
    float x;
    std::memcpy(&x, &found, 4);
    return x;
}

// Copies the values of at least floor, in order.
void gather(const float* e, int64_t V, float floor, Candidates& c) {
    if ((int64_t)c.value.size() < V + 1) c.value.resize(V + 1), c.part.resize(V + 1);
    constexpr int64_t GROUP = 4 * LANES;
    int64_t n = 0, i = 0;
    for (; i + GROUP <= V; i += GROUP) {
        const vi hit = (load(e + i) >= splat(floor)) | (load(e + i + 16) >= splat(floor)) |
                       (load(e + i + 32) >= splat(floor)) | (load(e + i + 48) >= splat(floor));
        if (!any(hit)) continue;
        for (int64_t j = i; j < i + GROUP; ++j) {
            c.value[n] = e[j];
            n += e[j] >= floor;
        }
    }
    for (; i < V; ++i) {
        c.value[n] = e[i];
        n += e[i] >= floor;
    }
    c.n = n;
}

double sum_from(const Candidates& c, float floor) {
    double sum = 0;
    for (int64_t i = 0; i < c.n; ++i) sum += c.value[i] >= floor ? (double)c.value[i] : 0.;
    return sum;
}

// Threshold of the filters on e = exp((logit - max) / temperature), whose largest value is 1; sum becomes the mass kept.
float filter(const float* e, int64_t V, double& sum, float top_k, float top_p, float min_p) {
    static thread_local Candidates c;
    const bool by_k = top_k > 0 && top_k < V, by_p = top_p < 1;
    if (!by_k && !by_p && !(min_p > 0)) return 0;
    // What is below the bound cannot be kept: V values less than (1 - top_p) sum / V weigh less than top-p may drop.
    float bound = min_p;
    if (by_p) bound = (float)(0.5 * (1 - (double)top_p) * sum / V);
    if (by_k || bound < FLT_MIN) bound = FLT_MIN;
    gather(e, V, bound, c);
    float floor = bound;
    if (by_k && c.n > (int64_t)top_k) {
        floor = least_kept(c.value.data(), c.n, c.part, std::floor((double)top_k), true);
        int64_t kept = 0;
        for (int64_t i = 0; i < c.n; ++i) {
            c.value[kept] = c.value[i];
            kept += c.value[i] >= floor;
        }
        c.n = kept;
    }
    if (by_k) sum = sum_from(c, floor);
    if (by_p) {
        const float p = least_kept(c.value.data(), c.n, c.part, (double)top_p * sum, false);
        floor = p > floor ? p : floor;
    }
    floor = min_p > floor ? min_p : floor;
    sum = sum_from(c, floor);
    return floor;
}

struct Row {
    float top, floor, scale;
    bool valid, greedy;
};

// Whether a request (temperature, top_k, top_p, min_p) takes the best token.
inline bool greedy(const float* sampling) { return sampling[0] <= 0 || sampling[1] == 1; }

// p = probabilities of live rows, 0 in dead ones. row_of[r]: a live row's logits, which may stand in their place in p.
void probs(const float* const* row_of, const int32_t* request, int64_t live, const float* sampling, float* p, int64_t R, int64_t V) {
    static thread_local std::vector<float> tops;
    static thread_local std::vector<double> sums;
    static thread_local std::vector<Row> infos;
    static thread_local std::vector<char> bads;
    const int64_t B = blocks_of(V);
    if ((int64_t)tops.size() < R * B) tops.resize(R * B), sums.resize(R * B), bads.resize(R * B);
    if ((int64_t)infos.size() < R) infos.resize(R);
    float* top = tops.data();
    double* part = sums.data();
    char* bad = bads.data();
    Row* info = infos.data();

    parallel_for(live * B, live * V * 8, [&](int64_t t) {  // maxima
        const int64_t r = t / B, from = t % B * BLOCK, n = V - from < BLOCK ? V - from : BLOCK;
        bool b;
        top[t] = block_max(row_of[r] + from, n, b);
        bad[t] = b;
    });
    bool filtered = false;
    for (int64_t r = 0; r < live; ++r) {
        const float* s = sampling + request[r] * 4;
        Row& row = info[r];
        row.top = -INF;
        bool b = false;
        for (int64_t i = r * B; i < (r + 1) * B; ++i) {
            row.top = top[i] > row.top ? top[i] : row.top;
            b |= bad[i] != 0;
        }
        row.valid = !b && row.top > -INF;
        row.greedy = greedy(s);
        filtered |= row.valid && !row.greedy;
    }
    parallel_for(R * B, R * V * 8, [&](int64_t t) {  // what greedy and dead rows are, and the weights of the others
        const int64_t r = t / B, from = t % B * BLOCK, n = V - from < BLOCK ? V - from : BLOCK;
        float* out = p + r * V + from;
        if (r >= live || !info[r].valid) {
            std::memset(out, 0, n * sizeof(float));
            return;
        }
        const Row& row = info[r];
        const float* x = row_of[r] + from;
        if (row.greedy) {
            bool mine = top[t] == row.top;
            for (int64_t i = r * B; mine && i < t; ++i) mine = top[i] != row.top;
            const int64_t best = mine ? first_equal(x, n, row.top) : -1;
            std::memset(out, 0, n * sizeof(float));
            if (best >= 0) out[best] = 1;
            return;
        }
        const float temperature = sampling[request[r] * 4];
        const vf cold = splat(temperature > 1e-30f ? temperature : 1e-30f), highest = splat(row.top);
        vf sum{};
        each_vector(n, [&](int64_t i, int lanes) {
            const vf e = vexp((load_n(x + i, lanes, -INF) - highest) / cold);
            sum += e;
            store_n(out + i, lanes, e);
        });
        part[t] = hsum(sum);
    });
    if (!filtered) return;
    parallel_for(live, live * V * 8, [&](int64_t r) {  // thresholds
        Row& row = info[r];
        if (!row.valid || row.greedy) return;
        double sum = 0;
        for (int64_t i = r * B; i < (r + 1) * B; ++i) sum += part[i];
        const float* s = sampling + request[r] * 4;
        row.floor = filter(p + r * V, V, sum, s[1], s[2], s[3]);
        row.scale = (float)(1 / sum);
    });
    parallel_for(live * B, live * V * 8, [&](int64_t t) {  // what is kept, normalised
        const int64_t r = t / B, from = t % B * BLOCK, n = V - from < BLOCK ? V - from : BLOCK;
        const Row& row = info[r];
        if (!row.valid || row.greedy) return;
        float* out = p + r * V + from;
        each_vector(n, [&](int64_t i, int lanes) {
            const vf e = load_n(out + i, lanes, 0);
            store_n(out + i, lanes, blend(e >= splat(row.floor), e * splat(row.scale), vf{}));
        });
    });
}

vf sum_vectors(const float* p, int64_t n) {
    vf sum{};
    each_vector(n, [&](int64_t i, int lanes) { sum += load_n(p + i, lanes, 0); });
    return sum;
}

// First id at which the running sum exceeds u times the sum. Block, then vector, then element.
int32_t draw(const float* p, int64_t V, const double* part, float u) {
    const int64_t B = blocks_of(V);
    double total = 0;
    for (int64_t b = 0; b < B; ++b) total += part[b];
    if (!(total > 0 && total <= DBL_MAX)) return -1;
    const double goal = (double)u * total;
    double sum = 0, before = 0;
    int64_t block = 0;
    for (int64_t b = 0; b < B; ++b) {
        if (!(part[b] > 0)) continue;
        block = b;
        before = sum;
        sum += part[b];
        if (sum > goal) break;
    }
    const int64_t from = block * BLOCK, to = from + BLOCK < V ? from + BLOCK : V;
    int64_t at = from;
    sum = before;
    for (int64_t i = from; i < to; i += LANES) {
        const double s = hsum(load_n(p + i, to - i < LANES ? (int)(to - i) : LANES, 0));
        if (!(s > 0)) continue;
        at = i;
        before = sum;
        sum += s;
        if (sum > goal) break;
    }
    sum = before;
    int64_t id = at;
    for (int64_t i = at; i < to && i < at + LANES; ++i) {
        if (!(p[i] > 0)) continue;
        id = i;
        sum += p[i];
        if (sum > goal) break;
    }
    return (int32_t)id;
}

// token[cell[r]]: lowest id of row r's maximum; -1 in dead cells, and for rows that are no distribution.
void argmax(const float* const* row_of, const int32_t* cell, int64_t live, int32_t* token, int64_t R, int64_t V) {
    const int64_t B = blocks_of(V);
    static thread_local std::vector<float> tops;
    static thread_local std::vector<char> bads;
    if ((int64_t)tops.size() < R * B) tops.resize(R * B), bads.resize(R * B);
    float* top = tops.data();
    char* bad = bads.data();
    for (int64_t i = 0; i < R; ++i) token[i] = -1;
    parallel_for(live * B, live * V, [&](int64_t t) {
        const int64_t from = t % B * BLOCK;
        bool b;
        top[t] = block_max(row_of[t / B] + from, V - from < BLOCK ? V - from : BLOCK, b);
        bad[t] = b;
    });
    parallel_for(live, live * BLOCK, [&](int64_t r) {
        int64_t best = 0;
        bool valid = true;
        for (int64_t b = 0; b < B; ++b) {
            valid &= !bad[r * B + b];
            if (top[r * B + b] > top[r * B + best]) best = b;
        }
        const float highest = top[r * B + best];
        if (!valid || !(highest > -INF)) return;
        const int64_t from = best * BLOCK;
        token[cell[r]] = (int32_t)(from + first_equal(row_of[r] + from, V - from < BLOCK ? V - from : BLOCK, highest));
    });
}

// token[cell[r]]: drawn from row r of p by u[cell[r]]; -1 in dead cells, and where nothing can be drawn.
void inverse_cdf(const float* p, const int32_t* cell, int64_t live, const float* u, int32_t* token, int64_t R, int64_t V) {
    const int64_t B = blocks_of(V);
    static thread_local std::vector<double> sums;
    if ((int64_t)sums.size() < R * B) sums.resize(R * B);
    double* part = sums.data();
    for (int64_t i = 0; i < R; ++i) token[i] = -1;
    parallel_for(live * B, live * V * 8, [&](int64_t t) {
        const int64_t from = t % B * BLOCK;
        part[t] = hsum(sum_vectors(p + t / B * V + from, V - from < BLOCK ? V - from : BLOCK));
    });
    for (int64_t r = 0; r < live; ++r) token[cell[r]] = draw(p + r * V, V, part + r * B, u[cell[r]]);
}

// (logits [R,V], position [R], request [R], count [1], sampling [n,4], banned [n,E], banned_until [n], and what shaping
// takes from params[7] on or nothing) -> out [R,V]
int probs_kernel(void** params, int64_t** shapes, bool shaped) {
    const int64_t R = shapes[0][0], V = shapes[0][1];
    const auto* request = (const int32_t*)params[2];
    const Logits in{(const float*)params[0], (const int32_t*)params[1], request, live_rows((const int32_t*)params[3], R), V};
    Shaping shaping(params + 5, shapes + 5, V);
    if (shaped) shaping.more(params + 7, shapes + 7);
    float* const p = (float*)params[shaped ? 15 : 7];
    static thread_local std::vector<const float*> rows;
    shape_rows(in, shaping, rows, [&] { return p; });
    probs(rows.data(), request, in.live, (const float*)params[4], p, R, V);
    return 0;
}

// As sampling_match says, with what shaping takes at params[9] or nothing, and u behind it.
int match_kernel(void** params, int64_t** shapes, bool shaped) {
    const auto *request = (const int32_t*)params[2], *cell = (const int32_t*)params[3], *drafts = (const int32_t*)params[5];
    const auto* sampling = (const float*)params[6];
    const int last = shaped ? 17 : 9;
    const auto* u = (const float*)params[last];
    auto *emitted = (int32_t*)params[last + 1], *num_emitted = (int32_t*)params[last + 2], *num_accepted = (int32_t*)params[last + 3];
    const int64_t R = shapes[0][0], n = shapes[last][0], w = shapes[last][1], V = shapes[0][1];
    const Logits in{(const float*)params[0], (const int32_t*)params[1], request, live_rows((const int32_t*)params[4], R), V};
    Shaping shaping(params + 7, shapes + 7, V);
    if (shaped) shaping.more(params + 9, shapes + 9);
    static thread_local std::vector<float> scratch;
    static thread_local std::vector<const float*> rows;
    const auto room = [&] {
        if ((int64_t)scratch.size() < R * V) scratch.resize(R * V);
        return scratch.data();
    };
    shape_rows(in, shaping, rows, room);
    bool best = true;
    for (int64_t r = 0; r < in.live; ++r) best &= greedy(sampling + request[r] * 4);
    if (best) {
        argmax(rows.data(), cell, in.live, emitted, R, V);
    } else {
        float* const p = room();
        probs(rows.data(), request, in.live, sampling, p, in.live, V);
        inverse_cdf(p, cell, in.live, u, emitted, R, V);
    }
    for (int64_t i = 0; i < n; ++i) {
        int32_t* tokens = emitted + i * w;
        int64_t kept = 0;
        while (kept + 1 < w && drafts[i * (w - 1) + kept] >= 0 && tokens[kept] == drafts[i * (w - 1) + kept]) ++kept;
        for (int64_t c = kept + 1; c < w; ++c) tokens[c] = -1;
        num_accepted[i] = (int32_t)kept;
        num_emitted[i] = (int32_t)kept + 1;
    }
    return 0;
}

}  // namespace

KERNEL sampling_probs(KERNEL_ARGS) { return probs_kernel(params, shapes, false); }
KERNEL sampling_shaped_probs(KERNEL_ARGS) { return probs_kernel(params, shapes, true); }

// (p [R,V], cell [R], count [1], u [n,w]) -> token [n,w]
KERNEL sampling_inverse_cdf(KERNEL_ARGS) {
    const int64_t R = shapes[0][0];
    inverse_cdf((const float*)params[0], (const int32_t*)params[1], live_rows((const int32_t*)params[2], R), (const float*)params[3],
                (int32_t*)params[4], R, shapes[0][1]);
    return 0;
}

// (logits [R,V], cell [R], count [1], tables [n,B]) -> token [n,w]: lowest id of the maximum; -1: dead, or not finite
KERNEL sampling_argmax(KERNEL_ARGS) {
    const int64_t R = shapes[0][0], V = shapes[0][1], live = live_rows((const int32_t*)params[2], R);
    static thread_local std::vector<const float*> rows;
    if ((int64_t)rows.size() < live) rows.resize(live);
    for (int64_t r = 0; r < live; ++r) rows[r] = (const float*)params[0] + r * V;
    argmax(rows.data(), (const int32_t*)params[1], live, (int32_t*)params[4], R, V);
    return 0;
}

// (logits [R,V], position [R], request [R], cell [R], count [1], drafts [n,w-1] or anything if w = 1, sampling [n,4],
//  banned [n,E], banned_until [n], u [n,w]) -> emitted [n,w], num_emitted [n], num_accepted [n]
KERNEL sampling_match(KERNEL_ARGS) { return match_kernel(params, shapes, false); }
KERNEL sampling_shaped_match(KERNEL_ARGS) { return match_kernel(params, shapes, true); }

// (logits [R,V], cell [R], count [1]) -> entropy [n,w], nats
KERNEL sampling_entropy(KERNEL_ARGS) {
    const float* logits = (const float*)params[0];
    const int32_t* cell = (const int32_t*)params[1];
    float* out = (float*)params[3];
    const int64_t R = shapes[0][0], V = shapes[0][1], live = live_rows((const int32_t*)params[2], R);
    for (int64_t i = 0; i < R; ++i) out[i] = 0;
    // Rows, not blocks: a lossy rule may be a little slower at batch 1.
    parallel_for(live, live * V * 8, [&](int64_t r) {
        const float* x = logits + r * V;
        bool bad;
        const float top = block_max(x, V, bad);
        if (bad || !(top > -INF)) return;
        double sum = 0, dot = 0;
        for (int64_t from = 0; from < V; from += BLOCK) {
            vf s{}, d{};
            each_vector(V - from < BLOCK ? V - from : BLOCK, [&](int64_t i, int lanes) {
                const vf y = vmax(load_n(x + from + i, lanes, -INF) - splat(top), splat(-1e4f)), e = vexp(y);
                s += e;
                d += e * y;
            });
            sum += hsum(s);
            dot += hsum(d);
        }
        out[cell[r]] = (float)(std::log(sum) - dot / sum);
    });
    return 0;
}

// (x [R,V], cell [R], count [1], tables [n,B]) -> grid [n,w,V]
KERNEL sampling_grid(KERNEL_ARGS) {
    const float* x = (const float*)params[0];
    const int32_t* cell = (const int32_t*)params[1];
    float* out = (float*)params[4];
    const int64_t R = shapes[0][0], V = shapes[0][1], live = live_rows((const int32_t*)params[2], R);
    // Cells of dead rows mean nothing: what no live row fills is zero.
    static thread_local std::vector<int32_t> rows;
    rows.assign(R, -1);
    for (int64_t r = 0; r < live; ++r) rows[cell[r]] = (int32_t)r;
    const int32_t* const row_of = rows.data();
    parallel_for(R, R * V * 8, [&](int64_t c) {
        if (row_of[c] >= 0) std::memcpy(out + c * V, x + row_of[c] * V, V * sizeof(float));
        else std::memset(out + c * V, 0, V * sizeof(float));
    });
    return 0;
}
