// Scores of a few queries with a page's keys as they lie, on AVX2: a vector holds four columns of two tokens, so that its lanes are
// the four chains of `score` (pages.h) and nothing has to be turned into columns. The same sums in the same order. The next page is asked
// for line by line on the way: all of it at once is more than the processor can wait for, and it would wait with its work.
#pragma once
#include <type_traits>

namespace GAINZ_NS {

constexpr int64_t DIRECT_QUERIES = 4;       // more of them share the columns' making

static inline vf pair_of(const float* a, const float* b) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}
static inline __m128i words_of(const void* a, const void* b) {
    return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd((const double*)a), (const double*)b));
}
static inline vf pair_of(const half* a, const half* b) { return _mm256_cvtph_ps(words_of(a, b)); }
static inline vf pair_of(const bfloat* a, const bfloat* b) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words_of(a, b)), 16));
}
static inline vf four(const float* q) { return _mm256_broadcast_ps((const __m128*)q); }

// Q queries with 2 P tokens at `keys`; chains of a pair's tokens lie in sums[query][pair]. As many bytes from `next` on are asked for.
template <int Q, int P, class T, class Width>
static inline void chains(const float* const* q, const T* keys, const T* next, Width width, vf (&sums)[Q][P]) {
#pragma GCC unroll 4
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sums[i][p] = zero();
    for (int64_t d = 0; d < width; d += 4) {
        ask_line(next + 2 * P * d);
        if (2 * P * 4 * sizeof(T) > 64) ask_line(next + 2 * P * d + 64 / sizeof(T));
        vf x[Q];
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) x[i] = four(q[i] + d);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const vf k = pair_of(keys + 2 * p * width + d, keys + (2 * p + 1) * width + d);
#pragma GCC unroll 4
            for (int i = 0; i < Q; i++) sums[i][p] = fma(x[i], k, sums[i][p]);
        }
    }
}

// (first + second) + (third + fourth) of four pairs' chains, in the order of their eight tokens
static inline vf joined(vf a, vf b, vf c, vf d) {
    const vf odd_even = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));     // tokens 0 2 4 6, 1 3 5 7
    return _mm256_permutevar8x32_ps(odd_even, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <int Q, class T, class Width>
static inline void direct(const float* const* q, const T* keys, const T* next, Width width, float* const* out) {
    constexpr int P = Q == 4 ? 2 : 4;           // pairs at once: what the registers hold
    for (int half_page = 0; half_page < 16; half_page += 8) {
        vf all[Q][4];
#pragma GCC unroll 2
        for (int part = 0; part < 4; part += P) {
            vf sums[Q][P];
            const int64_t first = (half_page + 2 * part) * width;
            chains<Q, P>(q, keys + first, next + first, width, sums);
#pragma GCC unroll 4
            for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) all[i][part + p] = sums[i][p];
        }
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) store(out[i] + half_page, joined(all[i][0], all[i][1], all[i][2], all[i][3]));
    }
}

template <class T, class Width>
static inline void direct_any(const float* const* q, const T* keys, const T* next, Width width, int64_t queries, float* const* out) {
    if (queries == 1) direct<1>(q, keys, next, width, out);
    else if (queries == 2) direct<2>(q, keys, next, width, out);
    else if (queries == 3) direct<3>(q, keys, next, width, out);
    else direct<4>(q, keys, next, width, out);
}

// True where these are so few queries that it was done; `next`: the page to ask for
template <class T> static inline bool direct_scores(const float* const* q, const T* keys, const T* next, int64_t width, int64_t padded,
                                                    int64_t queries, float* const* out) {
    if (queries > DIRECT_QUERIES || width != padded) return false;
    // eight tokens' addresses are too many for the registers, unless the compiler knows how far apart they lie
    if (width == 64) direct_any(q, keys, next, std::integral_constant<int64_t, 64>(), queries, out);
    else if (width == 128) direct_any(q, keys, next, std::integral_constant<int64_t, 128>(), queries, out);
    else direct_any(q, keys, next, width, queries, out);
    return true;
}

}  // namespace GAINZ_NS
