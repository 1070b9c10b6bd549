// Attention in bfloat16, inner loops: a page's keys and values made ready for dot products of pairs, and the products.
// Keys lie with tokens in the lanes, two columns in a word; values with columns in the lanes, two tokens in a word. Every
// sum is one chain in the order of the columns, or of the tokens, so no tile shows in the bits: a chain that goes on over
// zeros stays where it is.
#pragma once

namespace GAINZ_NS {

constexpr int64_t CHUNK_PAGES = PAGE_CHUNK / 16;
constexpr int64_t KEY_STRIDE = PAGE_CHUNK;              // words from one pair of columns to the next: a chunk's tokens
constexpr int64_t CHUNK_PAIRS = PAGE_CHUNK / 2;

// `rows` rows of `width` numbers as [16][padded], zeros beyond both
template <class T> static inline const T* copied(const T* from, int64_t rows, int64_t width, int64_t padded, T* to) {
    __builtin_memset(static_cast<void*>(to), 0, static_cast<size_t>(16 * padded) * sizeof(T));
    for (int64_t r = 0; r < rows; r++)
        __builtin_memcpy(static_cast<void*>(to + r * padded), from + r * width, static_cast<size_t>(width) * sizeof(T));
    return to;
}

// ------------------------------------------------------------------------------------------------ made ready
// a page [16][width] of keys, width a multiple of 32 → out[width / 2][KEY_STRIDE]
template <class T> static inline void key_pairs(const T* page, int64_t width, int32_t* out) {
    for (int64_t c = 0; c < width; c += 32) {
        vf r[16];
        pair_columns(page + c, width, r);
        for (int i = 0; i < 16; i++) store((float*)out + (c / 2 + i) * KEY_STRIDE, r[i]);
    }
}

template <class T> static inline void ready_keys(const Task& t, int64_t at, int32_t* out, void* copy) {
    const int64_t width = t.kv.key_width;
    const T* from = (const T*)t.kv.k + at * width;
    key_pairs(width == t.pair_width ? from : copied(from, 16, width, t.pair_width, (T*)copy), t.pair_width, out);
}

template <> inline void ready_keys<uint8_t>(const Task& t, int64_t at, int32_t* out, void*) {
    byte_columns((const uint8_t*)t.kv.k + at * t.kv.key_width, t.kv.key_width, t.byte_width, (uint8_t*)out, KEY_STRIDE * 4);
}

// the rows of a page's values, [16][t.value], zeros beyond the last token and the last column
template <class T> static inline const T* value_rows(const Task& t, int64_t at, int64_t tokens, void* copy) {
    const int64_t width = t.kv.value_width;
    const T* from = (const T*)t.kv.v + at * width;
    return tokens == 16 && width == t.value ? from : copied(from, tokens, width, t.value, (T*)copy);
}

template <class T> static inline void ready_values(const Task& t, int64_t at, int64_t tokens, int32_t* out, void* copy) {
    const T* rows = value_rows<T>(t, at, tokens, copy);
    for (int64_t k = 0; k < 8; k++)
        for (int64_t c = 0; c < t.value; c += 16)
            store_pair(out + k * t.value + c, value_pair(rows + 2 * k * t.value + c, rows + (2 * k + 1) * t.value + c));
}

// ------------------------------------------------------------------------------------------------ products
// scores of Q queries with the tokens of P neighbouring pages; `words` pairs of columns
template <int Q, int P> static inline void pair_scores(const int32_t* const* q, const int32_t* keys, int64_t words,
                                                       float* const* out) {
    vf s[Q][P];
    for (int i = 0; i < Q; i++) for (int j = 0; j < P; j++) s[i][j] = zero();
    for (int64_t k = 0; k < words; k++, keys += KEY_STRIDE) {
        pair column[P];
#pragma GCC unroll 4
        for (int j = 0; j < P; j++) column[j] = load_pair(keys + j * 16);
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++) {
            const pair x = set1_pair(q[i][k]);
#pragma GCC unroll 4
            for (int j = 0; j < P; j++) s[i][j] = dot_pair(column[j], x, s[i][j]);
        }
    }
    for (int i = 0; i < Q; i++) for (int j = 0; j < P; j++) store(out[i] + j * 16, s[i][j]);
}

// The same in 8 bits, exact in any order; a key is code * scale + low: `scale`, `low` of the pages' tokens.
struct ByteQueries { const int32_t* const* q; const float* scales; };       // scales: [Q][2], see byte_query

template <int Q, int P> static inline void byte_scores(const ByteQueries& b, const int32_t* keys, int64_t words,
                                                       const float* const* scale, const float* const* low,
                                                       float* const* out) {
    byte_sum s[Q][P];
    for (int i = 0; i < Q; i++) for (int j = 0; j < P; j++) s[i][j] = no_bytes();
    for (int64_t k = 0; k < words; k++, keys += KEY_STRIDE) {
        byte_sum column[P];
#pragma GCC unroll 4
        for (int j = 0; j < P; j++) column[j] = load_bytes(keys + j * 16);
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++) {
            const byte_sum x = set1_bytes(b.q[i][k]);
#pragma GCC unroll 4
            for (int j = 0; j < P; j++) s[i][j] = dot_bytes(column[j], x, s[i][j]);
        }
    }
    for (int j = 0; j < P; j++) {
        const vf step = load(scale[j]), base = load(low[j]);
        for (int i = 0; i < Q; i++)
            store(out[i] + j * 16, fma(base, set1(b.scales[2 * i + 1]),
                                       mul(floats(s[i][j]), mul(step, set1(b.scales[2 * i])))));
    }
}

// Q accumulators += weighted values, pair of tokens by pair of tokens; get(pair, column) is 16 columns of a pair
template <int Q, int C, class Get> static inline void mix_pair_columns(const int32_t* const* w, int64_t c, int64_t pairs,
                                                                       float* const* acc, const Get& get) {
    vf a[Q][C];
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) a[i][j] = load(acc[i] + c + j * 16);
    for (int64_t k = 0; k < pairs; k++) {
        pair v[C];
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) v[j] = get(k, c + j * 16);
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++) {
            const pair x = set1_pair(w[i][k]);
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) a[i][j] = dot_pair(v[j], x, a[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) store(acc[i] + c + j * 16, a[i][j]);
}

template <int Q, class Get> static inline void mix_pairs(const int32_t* const* w, int64_t width, int64_t pairs,
                                                         float* const* acc, const Get& get) {
    int64_t c = 0;
    for (; c + 64 <= width; c += 64) mix_pair_columns<Q, 4>(w, c, pairs, acc, get);
    for (; c < width; c += 16) mix_pair_columns<Q, 1>(w, c, pairs, acc, get);
}

// f(std::integral_constant<int, Q>, first) for blocks of queries that fill the registers
template <class F> static inline void query_blocks(int64_t queries, const F& f) {
    for (int64_t i = 0; i < queries;) {
        const int64_t left = queries - i;
        if (left >= 6) { f(Count<6>(), i); i += 6; }
        else if (left == 4) { f(Count<4>(), i); i += 4; }
        else if (left >= 3) { f(Count<3>(), i); i += 3; }
        else if (left == 2) { f(Count<2>(), i); i += 2; }
        else { f(Count<1>(), i); i += 1; }
    }
}

// ------------------------------------------------------------------------------------------------ softmax
// Scores in powers of two → weights: [0] the largest of the tokens [lo, hi), [1] their sum, w: pairs in bfloat16 of the
// pages [first, last) and up to one more. In 8 bits a value is (code - 128) * scale + (low + 128 * scale): the scale goes into the
// weight, and the weighted sum of what is added is returned. (Around 0, rounded weights cost no more than with other types.)
template <class T> static inline float pair_soften(const Task& t, const float* s, int64_t lo, int64_t hi, int64_t first,
                                                   int64_t last, const int64_t* at, int32_t* w, float* state) {
    vf top = set1(NOTHING), total = zero(), lows = zero();
    for (int64_t p = first; p < last; p++) top = max_of(between(lo - p * 16, hi - p * 16), top, load(s + p * 16));
    state[0] = largest(top);
    top = set1(state[0]);
    for (int64_t p = first; p < last; p += 2) {
        vf e[2] = {zero(), zero()};
        for (int64_t i = 0; i < 2 && p + i < last; i++) {
            const lanes seen = between(lo - (p + i) * 16, hi - (p + i) * 16);
            e[i] = only(seen, power2(sub(load(s + (p + i) * 16), top)));
            total = add(total, e[i]);
            if (sizeof(T) > 1) continue;
            const vf scale = load_only(seen, t.kv.v_scale + at[p + i]);
            lows = fma(e[i], fma(scale, set1(128.f), load_only(seen, t.kv.v_low + at[p + i])), lows);
            e[i] = mul(e[i], scale);
        }
        store_pair(w + p * 8, round_pair(e[0], e[1]));
    }
    state[1] = sum(total);
    return sizeof(T) > 1 ? 0.f : sum(lows);
}

}  // namespace GAINZ_NS
