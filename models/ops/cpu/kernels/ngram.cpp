// Finds the earliest place where a context already held the longest n-gram that it now ends with.
#include "vec.h"

// (history [S,L], slot [n], length [n], limit [n], sizes [2] = min_n, max_n) -> drafts [n,K], counts [n]
KERNEL ngram_lookup(KERNEL_ARGS) {
    const int64_t L = shapes[0][1], n = shapes[1][0], K = shapes[5][1];
    const int32_t* slot = (const int32_t*)params[1];
    const int32_t* length = (const int32_t*)params[2];
    const int32_t* limit = (const int32_t*)params[3];
    const int32_t min_n = ((const int32_t*)params[4])[0], max_n = ((const int32_t*)params[4])[1];
    int32_t* drafts = (int32_t*)params[5];
    int32_t* counts = (int32_t*)params[6];
    for (int64_t q = 0; q < n; ++q) {
        const int32_t* h = (const int32_t*)params[0] + slot[q] * L;
        const int64_t T = length[q] < L ? length[q] : L;
        int64_t longest = 0, end = 0;
        const bool wanted = limit[q] > 0;
        for (int64_t e = 0; wanted && e < T - 1 && longest < max_n; ++e) {
            if (h[e] != h[T - 1]) continue;
            int64_t m = 1;
            while (m < max_n && m <= e && h[e - m] == h[T - 1 - m]) ++m;
            if (m > longest) longest = m, end = e + 1;
        }
        int64_t found = 0;
        if (longest >= min_n)
            for (; found < K && found < limit[q] && end + found < T; ++found) drafts[q * K + found] = h[end + found];
        counts[q] = (int32_t)found;
        for (; found < K; ++found) drafts[q * K + found] = -1;
    }
    return 0;
}
