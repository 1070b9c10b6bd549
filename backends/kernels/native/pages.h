// One page of keys or values against a few queries: the inner loops of attention.h, which includes this after its types.
#pragma once
#include <type_traits>

namespace GAINZ_NS {

// `tokens` rows of one head's page as floats [16, padded], the rest zeros: what lies there is nobody's
template <class T> static inline void widen_rows(const T* page, int64_t width, int64_t padded, int64_t tokens, float* out) {
    for (int64_t t = 0; t < 16; t++)
        for (int64_t i = 0; i < padded; i += W) {
            const int n = static_cast<int>(least(W, width - i));
            store(out + t * padded + i, t >= tokens || n <= 0 ? zero() : n == W ? load(page + t * width + i) :
                  load_n(page + t * width + i, n));
        }
}

// Keys of a page as columns [padded][16]. Lanes of tokens beyond the last are garbage or zeros, and masked later.
template <class T> static inline void key_columns(const Task& t, int64_t at, int64_t tokens, float* page, float* columns) {
    const T* from = (const T*)t.kv.k + at * t.kv.key_width;
    if (narrow_columns(from, t.kv.key_width, columns)) return;
    widen_rows(from, t.kv.key_width, t.key, tokens, page);
    transpose16(page, t.key, t.key, columns);
}

constexpr int QUERIES = W == 8 ? 6 : 4;         // at once: what the registers hold

// scores of QB queries with the 16 tokens of a page, columns [padded][16]: four chains, of every fourth column
template <int QB> static inline void score(const float* const* q, const float* columns, int64_t padded, float* const* out) {
    if (W == 8 && QB > 3) {                     // chain by chain: 16 registers hold no more
        float kept[QB][16];
        for (int j = 0; j < 4; j++) {
            vf s[QB][2];
#pragma GCC unroll 6
            for (int i = 0; i < QB; i++) s[i][0] = s[i][1] = zero();
            for (int64_t d = j; d < padded; d += 4) {
                const vf a = load(columns + d * 16), b = load(columns + d * 16 + 8);
#pragma GCC unroll 6
                for (int i = 0; i < QB; i++) {
                    const vf x = set1(q[i][d]);
                    s[i][0] = fma(x, a, s[i][0]);
                    s[i][1] = fma(x, b, s[i][1]);
                }
            }
#pragma GCC unroll 6
            for (int i = 0; i < QB; i++)
#pragma GCC unroll 2
                for (int part = 0; part < 2; part++) {
                    float *first = out[i] + part * 8, *third = kept[i] + part * 8;
                    if (j == 0) store(first, s[i][part]);
                    else if (j == 1) store(first, add(load(first), s[i][part]));
                    else if (j == 2) store(third, s[i][part]);
                    else store(first, add(load(first), add(load(third), s[i][part])));
                }
        }
        return;
    }
#pragma GCC unroll 1
    for (int part = 0; part < 16 / W; part++) {
        vf s[QB][4];
#pragma GCC unroll 6
        for (int i = 0; i < QB; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) s[i][j] = zero();
        for (int64_t d = 0; d < padded; d += 4)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const vf k = load(columns + (d + j) * 16 + part * W);
#pragma GCC unroll 6
                for (int i = 0; i < QB; i++) s[i][j] = fma(set1(q[i][d + j]), k, s[i][j]);
            }
#pragma GCC unroll 6
        for (int i = 0; i < QB; i++) store(out[i] + part * W, add(add(s[i][0], s[i][1]), add(s[i][2], s[i][3])));
    }
}

// f(std::integral_constant<int, Q>, first) for as many queries at once as there are
template <class F> static inline void by_queries(int64_t queries, const F& f) {
    for (int64_t i = 0; i < queries;) {
        const int64_t left = queries - i;
        if (QUERIES > 4 && left >= 6) { f(std::integral_constant<int, QUERIES>(), i); i += QUERIES; }
        else if (left >= 4) { f(std::integral_constant<int, 4>(), i); i += 4; }
        else if (left == 3) { f(std::integral_constant<int, 3>(), i); i += 3; }
        else if (left == 2) { f(std::integral_constant<int, 2>(), i); i += 2; }
        else { f(std::integral_constant<int, 1>(), i); i += 1; }
    }
}

// QB accumulators += weighted rows, token by token; get(token, column) is a vector of a row, and ahead(token, column) is told where the
// C vectors begin that are read next
template <int QB, int C, class Get, class Ahead>
static inline void mix_columns(const float* const* p, int64_t c, int64_t tokens, float* const* acc, const Get& get, const Ahead& ahead) {
    vf a[QB][C];
#pragma GCC unroll 6
    for (int i = 0; i < QB; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) a[i][j] = load(acc[i] + c + j * W);
    for (int64_t t = 0; t < tokens; t++) {
        ahead(t, c);
        vf held[QB < C ? QB : C];               // the fewer of the two, so that the registers hold them
#pragma GCC unroll 4
        for (int i = 0; i < (QB < C ? QB : C); i++) held[i] = QB < C ? set1(p[i][t]) : get(t, c + i * W);
        if (QB < C) {
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) {
                const vf v = get(t, c + j * W);
#pragma GCC unroll 4
                for (int i = 0; i < QB; i++) a[i][j] = fma(held[i], v, a[i][j]);
            }
        } else {
#pragma GCC unroll 6
            for (int i = 0; i < QB; i++) {
                const vf w = set1(p[i][t]);
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) a[i][j] = fma(w, held[j], a[i][j]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < QB; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) store(acc[i] + c + j * W, a[i][j]);
}

template <int QB, class Get, class Ahead>
static inline void mix(const float* const* p, int64_t padded, int64_t tokens, float* const* acc, const Get& get, const Ahead& ahead) {
    constexpr int WIDE = W == 16 || QB <= 3 ? 4 : 2;           // as many columns as the registers hold
    int64_t c = 0;
    for (; c + WIDE * W <= padded; c += WIDE * W) mix_columns<QB, WIDE>(p, c, tokens, acc, get, ahead);
    for (; c < padded; c += W) mix_columns<QB, 1>(p, c, tokens, acc, get, ahead);
}

struct Nothing { void operator()(int64_t, int64_t) const {} };

template <class Get, class Ahead = Nothing>
static inline void mix_all(float* const* p, int64_t queries, int64_t offset, int64_t padded, int64_t tokens, float* const* acc,
                           const Get& get, const Ahead& ahead = Nothing()) {
    by_queries(queries, [&](auto count, int64_t i) {
        constexpr int QB = decltype(count)::value;
        const float* w[QB];
        for (int j = 0; j < QB; j++) w[j] = p[i + j] + offset;
        mix<QB>(w, padded, tokens, acc + i, get, ahead);
    });
}

// A page's rows, weighted; `next`: the page to ask for, or -1. Few queries read the page as it lies, many a widened copy: the same numbers.
template <class T> static inline void mix_page(const Task& t, int64_t at, int64_t next, int64_t tokens, float* const* p, int64_t queries,
                                               int64_t offset, float* const* acc, float* page) {
    const int64_t width = t.kv.value_width, padded = t.value;
    const T* from = (const T*)t.kv.v + at * width;
    const T* following = next < 0 ? from : (const T*)t.kv.v + next * width;
    const auto direct = [&](int64_t k, int64_t c) { return load(from + k * width + c); };
    const auto ahead = [&](int64_t k, int64_t c) {
        ask_line(following + k * width + c);
        if (sizeof(T) == 4) ask_line(following + k * width + c + 16);
    };
    const bool as_it_lies = queries <= 4 && width == padded;
    if (as_it_lies && LINE_BY_LINE) return mix_all(p, queries, offset, padded, tokens, acc, direct, ahead);
    ask<T>(t.kv.v, width, next);
    if (as_it_lies) return mix_all(p, queries, offset, padded, tokens, acc, direct);
    widen_rows(from, width, padded, tokens, page);
    mix_all(p, queries, offset, padded, tokens, acc, [&](int64_t k, int64_t c) { return load(page + k * padded + c); });
}

// Values of a page, weighted
template <class T> static inline void add_values(const Task& t, int64_t at, int64_t next, int64_t tokens, float* const* p,
                                                 int64_t queries, int64_t offset,
                                                 float* const* acc, float* page, float*, float*) {
    mix_page<T>(t, at, next, tokens, p, queries, offset, acc, page);
}

// Σ p (code * scale + low) = Σ (p scale) code + Σ p low, the second for all columns at once (`add_lows`).
template <> inline void add_values<uint8_t>(const Task& t, int64_t at, int64_t next, int64_t tokens, float* const* p, int64_t queries,
                                            int64_t offset, float* const* acc, float* page, float* weights, float* lows) {
    float* scaled_p[MAX_QUERIES];
    for (int64_t i = 0; i < queries; i++) {
        scaled_p[i] = weights + i * 16;
        for (int64_t k = 0; k < 16; k += W) {
            const int n = static_cast<int>(least(W, most(0, tokens - k)));
            const vf w = load_n(p[i] + offset + k, n);         // what lies beyond the last token is nobody's
            store(scaled_p[i] + k, mul(w, load_n(t.kv.v_scale + at + k, n)));
            store(lows + i * 16 + k, fma(w, load_n(t.kv.v_low + at + k, n), load(lows + i * 16 + k)));
        }
    }
    mix_page<uint8_t>(t, at, next, tokens, scaled_p, queries, 0, acc, page);
}

static inline void add_lows(const Task& t, int64_t queries, float* const* acc, const float* lows) {
    for (int64_t i = 0; i < queries; i++) {
        vf all = zero();
        for (int64_t j = 0; j < 16; j += W) all = add(all, load(lows + i * 16 + j));
        const vf low = set1(sum(all));
        for (int64_t c = 0; c < t.value; c += W) store(acc[i] + c, add(load(acc[i] + c), low));
    }
}

}  // namespace GAINZ_NS
