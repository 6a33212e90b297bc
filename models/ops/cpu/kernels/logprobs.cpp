// Log-probabilities of given tokens and of the most likely ones, for the requests that ask for them.
#include <cmath>
#include <vector>

#include "pool.h"
#include "vocabulary.h"

namespace {

struct Best {
    float value;
    int32_t id;
};

// The n largest of V floats, largest first; of equal ones the lowest id first.
void largest(const float* x, int64_t V, Best* best, int64_t n) {
    int64_t held = 0;
    float least = -INF;
    for (int64_t from = 0; from < V; from += LANES) {
        const int lanes = V - from < LANES ? (int)(V - from) : LANES;
        if (held == n && !any(load_n(x + from, lanes, -INF) > splat(least))) continue;
        for (int64_t i = from; i < from + lanes; ++i) {
            if (held == n && !(x[i] > least)) continue;
            int64_t at = held < n ? held++ : n - 1;
            for (; at > 0 && x[i] > best[at - 1].value; --at) best[at] = best[at - 1];
            best[at] = {x[i], (int32_t)i};
            least = best[held - 1].value;
        }
    }
}

}  // namespace

// (logits [R,V], request [R], cell [R], count [1], tokens [n,w], asked [n,A], column [1]) -> out [n,w,2+2N]
KERNEL logprobs(KERNEL_ARGS) {
    const float* const logits = (const float*)params[0];
    const auto *request = (const int32_t*)params[1], *cell = (const int32_t*)params[2], *tokens = (const int32_t*)params[4];
    const auto* asked = (const int32_t*)params[5];
    const int64_t R = shapes[0][0], V = shapes[0][1], A = shapes[5][1], column = *(const int32_t*)params[6];
    const int64_t live = live_rows((const int32_t*)params[3], R), size = shapes[7][2], N = (size - 2) / 2;
    float* const out = (float*)params[7];
    std::memset(out, 0, shapes[7][0] * shapes[7][1] * size * sizeof(float));
    static thread_local std::vector<int64_t> chosen;
    chosen.clear();
    for (int64_t r = 0; r < live; ++r)
        if (asked[request[r] * A + column] && tokens[cell[r]] >= 0 && tokens[cell[r]] < V) chosen.push_back(r);
    const std::vector<int64_t>& rows = chosen;
    parallel_for((int64_t)rows.size(), (int64_t)rows.size() * V * 8, [&](int64_t i) {
        static thread_local std::vector<Best> best;
        if ((int64_t)best.size() < N + 1) best.resize(N + 1);
        const float* const x = logits + rows[i] * V;
        const int32_t at = cell[rows[i]], token = tokens[at];
        largest(x, V, best.data(), N > 0 ? N : 1);
        const float top = best[0].value;
        double sum = 0;
        int64_t rank = 0;
        for (int64_t from = 0; from < V; from += BLOCK) {
            vf part{};
            vi counted{};
            each_vector(V - from < BLOCK ? V - from : BLOCK, [&](int64_t j, int lanes) {
                const vf v = load_n(x + from + j, lanes, -INF);
                part += vexp(v - splat(top));
                counted -= v >= splat(x[token]);
            });
            sum += hsum(part);
            for (int l = 0; l < LANES; ++l) rank += counted[l];
        }
        const double total = std::log(sum);
        float* const row = out + at * size;
        row[0] = (float)((double)x[token] - top - total);
        row[1] = (float)(x[token] > -INF ? rank : V);  // what fills up the last vector is -INF as well
        for (int64_t j = 0; j < N; ++j) {
            row[2 + j] = (float)best[j].id;
            row[2 + N + j] = (float)((double)best[j].value - top - total);
        }
    });
    return 0;
}
