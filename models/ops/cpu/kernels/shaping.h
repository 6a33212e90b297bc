// What requests change in their logits before anything is sampled from them: see Shape in models/ops/plain_shaping.py.
//
// A row is changed in a copy, and only if its request asks for it. Everything is done by one thread in one order, and
// looks at nothing but the request's own ids up to the row's position.
#pragma once
#include <cstring>
#include <vector>

#include "pool.h"
#include "vocabulary.h"

struct Shaping {
    int64_t V, E;
    const int32_t *banned, *until;  // [n,E] (-1: none), [n]
    // Absent where nothing but bans can be asked for.
    const float *penalties = nullptr, *bias = nullptr;  // [n,3] repetition, frequency, presence; [S,V]
    const int32_t *asked = nullptr, *words = nullptr;   // [n,A] prompt length, biased, bad words, ...; [S,W,M] (-1: none)
    const int32_t *history = nullptr, *slot = nullptr, *tokens = nullptr, *start = nullptr;  // [S,L], [n], [n,w], [n]
    int64_t A = 0, W = 0, M = 0, L = 0, w = 0;

    Shaping(void** bans, int64_t** shapes, int64_t V)
        : V(V), E(shapes[0][1]), banned((const int32_t*)bans[0]), until((const int32_t*)bans[1]) {}

    // params: penalties, asked, bias, bad words, history, slot, tokens, start.
    void more(void** params, int64_t** shapes) {
        penalties = (const float*)params[0];
        asked = (const int32_t*)params[1];
        bias = (const float*)params[2];
        words = (const int32_t*)params[3];
        history = (const int32_t*)params[4];
        slot = (const int32_t*)params[5];
        tokens = (const int32_t*)params[6];
        start = (const int32_t*)params[7];
        A = shapes[1][1];
        W = shapes[3][1];
        M = shapes[3][2];
        L = shapes[4][1];
        w = shapes[6][1];
    }

    bool penalised(int64_t q) const {
        const float* p = penalties + q * 3;
        return p[0] != 1 || p[1] != 0 || p[2] != 0;
    }

    bool changes(int64_t q, int64_t position) const {
        if (position + 1 < until[q]) return true;
        return penalties && (asked[q * A + 1] || asked[q * A + 2] || penalised(q));
    }

    int32_t id_at(int64_t q, int64_t position) const {
        return position < start[q] ? history[slot[q] * L + position] : tokens[q * w + position - start[q]];
    }

    void apply(float* x, int64_t q, int64_t position) const {
        if (penalties) {
            if (asked[q * A + 1]) {
                const float* added = bias + slot[q] * V;
                each_vector(V, [&](int64_t i, int lanes) {
                    store_n(x + i, lanes, load_n(x + i, lanes, 0) + load_n(added + i, lanes, 0));
                });
            }
            if (penalised(q)) penalise(x, q, position);
            for (int64_t i = 0; i < asked[q * A + 2]; ++i) ban_word(x, q, position, words + (slot[q] * W + i) * M);
        }
        if (position + 1 < until[q])
            for (int64_t i = 0; i < E; ++i)
                if (const int32_t id = banned[q * E + i]; id >= 0 && id < V) x[id] = -INF;
    }

private:
    void penalise(float* x, int64_t q, int64_t position) const {
        constexpr int32_t IN_PROMPT = 1 << 30;
        static thread_local std::vector<int32_t> counts, seen;  // counts are all 0 between calls
        if ((int64_t)counts.size() < V) counts.resize(V, 0);
        seen.clear();
        const float repetition = penalties[q * 3], frequency = penalties[q * 3 + 1], presence = penalties[q * 3 + 2];
        for (int64_t p = repetition == 1 ? asked[q * A] : 0; p <= position; ++p) {
            const int32_t id = id_at(q, p);
            if (id < 0 || id >= V) continue;
            if (counts[id] == 0) seen.push_back(id);
            if (p < asked[q * A]) counts[id] = IN_PROMPT;
            else ++counts[id];
        }
        for (const int32_t id : seen) {
            const int32_t times = counts[id] & ~IN_PROMPT;
            float y = x[id] > 0 ? x[id] / repetition : x[id] * repetition;
            if (times) y = y - frequency * (float)times - presence;
            x[id] = y;
            counts[id] = 0;
        }
    }

    // word: ids at the end of M places. Its last id is banned where what has been generated ends with the others.
    void ban_word(float* x, int64_t q, int64_t position, const int32_t* word) const {
        for (int64_t i = M - 2; i >= 0 && word[i] >= 0; --i) {
            const int64_t p = position - (M - 2 - i);
            if (p < asked[q * A] || id_at(q, p) != word[i]) return;
        }
        if (word[M - 1] >= 0 && word[M - 1] < V) x[word[M - 1]] = -INF;
    }
};

// What one loop goes over of a step's rows.
struct Logits {
    const float* logits;  // [R,V]
    const int32_t *position, *request;
    int64_t live, V;
};

// row[r]: the logits of each live row, changed in `room` [live,V] where its request asks for that. Rows that are no
// distribution (a NaN or +inf) stay as they are, so that they are seen to be none. Returns whether room() was asked for.
template <class Room>
static bool shape_rows(const Logits& in, const Shaping& shaping, std::vector<const float*>& row, Room room) {
    static thread_local std::vector<int64_t> changed;
    changed.clear();
    if ((int64_t)row.size() < in.live) row.resize(in.live);
    for (int64_t r = 0; r < in.live; ++r) {
        row[r] = in.logits + r * in.V;
        if (shaping.changes(in.request[r], in.position[r])) changed.push_back(r);
    }
    if (changed.empty()) return false;
    float* const copies = room();
    const std::vector<int64_t>& rows = changed;
    const float** const source = row.data();
    parallel_for((int64_t)rows.size(), (int64_t)rows.size() * in.V * 8, [&](int64_t i) {
        const int64_t r = rows[i];
        bool bad = false;
        block_max(source[r], in.V, bad);
        if (bad) return;
        float* const copy = copies + r * in.V;
        std::memcpy(copy, source[r], in.V * sizeof(float));
        shaping.apply(copy, in.request[r], in.position[r]);
        source[r] = copy;
    });
    return true;
}
