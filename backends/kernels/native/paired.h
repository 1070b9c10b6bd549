// Attention in bfloat16 where the processor multiplies pairs of it (float32 sums): queries, keys, weights and values rounded
// to bfloat16, scores in powers of two. As in attention.h softmax is partial over chunks of 128 tokens counted from the
// sequence's start and combined in order, so that a row has the same bits alone, in a tile and however its prompt was cut;
// here a chunk's keys and values are made ready once for a tile of queries (FlashAttention-2's blocks, arXiv:2307.08691).
#pragma once
#include "paired_pages.h"

namespace GAINZ_NS {

// one thread's: keys and values of a chunk by head, [6][128] scores, weights [queries][72], sums by query
struct PairRoom { int32_t *keys, *values; float* scores; int32_t* weights; float *lows, *parts, *states; void* copy;
                  int64_t key_words, value_words; };

static inline PairRoom pair_room(Scratch& s, const Task& t) {
    PairRoom r{};
    const int64_t heads = t.most_staged, queries = t.most_queries;
    r.key_words = (t.byte_width ? t.byte_width / 4 : t.pair_width / 2) * KEY_STRIDE;
    r.value_words = CHUNK_PAIRS * t.value;
    const int64_t copy = 16 * most(t.pair_width, t.value) / 2, weights = queries * (CHUNK_PAIRS + 8);
    const int64_t all = heads * (r.key_words + r.value_words) + 6 * PAGE_CHUNK + weights + copy
        + queries * (1 + 2 * t.state());
    int32_t* p = (int32_t*)s.need(static_cast<size_t>(all) * 4 + 64);
    r.keys = p; p += heads * r.key_words;
    r.values = p; p += heads * r.value_words;
    r.scores = (float*)p; p += 6 * PAGE_CHUNK;
    r.weights = p; p += weights;
    r.parts = (float*)p; p += queries * t.state();
    r.states = (float*)p; p += queries * t.state();
    r.copy = p; p += copy;
    r.lows = (float*)p;
    return r;
}

// state of the chunks before, joined by the next chunk's; state[1] == 0: there were none
static inline void combine_pairs(float* state, const float* next, int64_t value) {
    if (next[1] == 0.f) return;
    if (state[1] == 0.f) { __builtin_memcpy(state, next, static_cast<size_t>(value + 16) * 4); return; }
    const bool higher = next[0] > state[0];
    const vf less = power2(set1(higher ? state[0] - next[0] : next[0] - state[0]));
    const vf a = higher ? less : set1(1.f), b = higher ? set1(1.f) : less;
    float lane[W];
    store(lane, fma(set1(state[1]), a, mul(set1(next[1]), b)));
    if (higher) state[0] = next[0];
    state[1] = lane[0];
    for (int64_t i = 16; i < value + 16; i += W) store(state + i, fma(load(state + i), a, mul(load(next + i), b)));
}

// The part of a tile that one chunk holds, and where its pages lie.
struct Part {
    int64_t each, from, first, last, known, length;
    const int32_t* table;
    int64_t at(const Task& t, int64_t page, int64_t head) const { return (table[page] * t.kv.heads + head) * 16; }
    int64_t tokens(int64_t page) const { return least(16, length - page * 16); }
};

static inline Part part_of(const Task& t, const Tile& tile, int64_t chunk) {
    const int64_t from = chunk * PAGE_CHUNK, last = t.batch.positions[tile.row + tile.rows - 1];
    const int64_t length = least(PAGE_CHUNK, last + 1 - from);
    const int64_t low = t.spec.window ? most(0, t.batch.positions[tile.row] - t.spec.window + 1 - from) / 16 : 0;
    return Part{tile.rows * t.group, from, low, ceil_div(length, 16), ceil_div(last + 1 - from, 16), length,
                t.batch.pages + tile.sequence * t.batch.page_stride + from / 16};
}

// scores of Q queries with the pages [first, last) of a head
template <class T, int Q> static inline void block_scores(const Task& t, const int32_t* keys, const int64_t* own,
                                                          int64_t first, int64_t last, const int64_t* at,
                                                          float* const* out) {
    const int64_t words = sizeof(T) == 1 ? t.byte_width / 4 : t.pair_width / 2;
    const int32_t* q[Q];
    float* to[Q];
    float scales[2 * Q];
    for (int i = 0; i < Q; i++) {
        q[i] = sizeof(T) == 1 ? (const int32_t*)(t.q8 + own[i] * t.byte_width) : t.q16 + own[i] * words;
        if (sizeof(T) == 1) { scales[2 * i] = t.q8_scale[2 * own[i]]; scales[2 * i + 1] = t.q8_scale[2 * own[i] + 1]; }
    }
    const auto some = [&](auto count, int64_t p) {
        constexpr int P = decltype(count)::value;
        for (int i = 0; i < Q; i++) to[i] = out[i] + p * 16;
        if constexpr (sizeof(T) > 1) pair_scores<Q, P>(q, keys + p * 16, words, to);
        else {
            const float *scale[P], *low[P];
            for (int j = 0; j < P; j++) { scale[j] = t.kv.k_scale + at[p + j]; low[j] = t.kv.k_low + at[p + j]; }
            byte_scores<Q, P>(ByteQueries{q, scales}, keys + p * 16, words, scale, low, to);
        }
    };
    int64_t p = first;
    for (; p + 4 <= last; p += 4) some(Count<4>(), p);
    if (p + 2 <= last) { some(Count<2>(), p); p += 2; }
    if (p < last) some(Count<1>(), p);
}

// Q queries of a head from `i` on: scores, weights, sums; with `values` the weighted values too, else zeros
template <class T, int Q> static void query_block(const Task& t, const Tile& tile, const Part& part, const int64_t* at,
                                                  int64_t i, int64_t head, const int32_t* keys, const int32_t* values,
                                                  float* scores, int32_t* weights, float* lows, float* const* out) {
    int64_t own[Q], last = part.first;
    float *s[Q], *acc[Q];
    const int32_t* w[Q];
    for (int j = 0; j < Q; j++) {
        const int64_t row = tile.row + (i + j) / t.group;
        own[j] = row * t.spec.heads + head * t.group + (i + j) % t.group;
        last = most(last, least(part.last, (t.batch.positions[row] - part.from + 16) / 16));
        s[j] = scores + j * PAGE_CHUNK;
        acc[j] = out[j] + 16;
        w[j] = weights + j * (CHUNK_PAIRS + 8);
    }
    const int64_t position = t.batch.positions[tile.row + i / t.group];
    const int64_t first = !t.spec.window ? part.first :
        least(last, most(part.first, (position - t.spec.window + 1 - part.from) / 16));
    block_scores<T, Q>(t, keys, own, first, last, at, s);
    for (int j = 0; j < Q; j++) {
        const int64_t p = t.batch.positions[tile.row + (i + j) / t.group] - part.from;
        const int64_t lo = t.spec.window ? most(0, p - t.spec.window + 1) : 0;
        if (t.spec.softcap > 0) {
            softcap(s[j] + first * 16, (last - first) * 16, static_cast<float>(t.spec.softcap));
            for (int64_t k = first * 16; k < last * 16; k += W) store(s[j] + k, mul(load(s[j] + k), set1(LOG2E)));
        }
        lows[j] = pair_soften<T>(t, s[j], lo, p + 1, first, last, at, weights + j * (CHUNK_PAIRS + 8), out[j]);
        for (int64_t c = 0; c < t.value; c += W) store(acc[j] + c, zero());
        if (!values && part.first < first) __builtin_memset(weights + j * (CHUNK_PAIRS + 8) + part.first * 8, 0,
                                                            static_cast<size_t>(first - part.first) * 32);
        if (!values && last < part.last) __builtin_memset(weights + j * (CHUNK_PAIRS + 8) + last * 8, 0,
                                                          static_cast<size_t>(part.last - last) * 32);
        w[j] += values ? first * 8 : 0;
    }
    if (!values) return;
    const int32_t* from = values + first * 8 * t.value;
    mix_pairs<Q>(w, t.value, (last - first) * 8, acc,
                 [&](int64_t k, int64_t c) { return load_pair(from + k * t.value + c); });
}

static inline void add_low(const Task& t, float* acc, float low) {
    for (int64_t c = 0; c < t.value; c += W) store(acc + c, add(load(acc + c), set1(low)));
}

// Few queries take the values as they lie, page by page through the heads; weights of query i of a head: weights[h][i].
template <class T> static void mix_in_place(const Task& t, const Part& part, Heads heads, PairRoom& room, float* const* out) {
    for (int64_t page = part.first; page < part.last; page++)
        for (int64_t h = 0; h < heads.count; h++) {
            if (page + 1 < part.known) ask<T>(t.kv.v, t.kv.value_width, part.at(t, page + 1, heads.first + h));
            const T* rows = value_rows<T>(t, part.at(t, page, heads.first + h), part.tokens(page), room.copy);
            const auto get = [&](int64_t k, int64_t c) {
                return value_pair(rows + 2 * k * t.value + c, rows + (2 * k + 1) * t.value + c);
            };
            query_blocks(part.each, [&](auto count, int64_t i) {
                constexpr int Q = decltype(count)::value;
                const int32_t* w[Q];
                float* acc[Q];
                for (int j = 0; j < Q; j++) {
                    w[j] = room.weights + (h * part.each + i + j) * (CHUNK_PAIRS + 8) + page * 8;
                    acc[j] = out[h * part.each + i + j] + 16;
                }
                mix_pairs<Q>(w, t.value, 8, acc, get);
            });
        }
}

// Partial sums of a tile's queries over one chunk, into out[query] (state() floats each), queries ordered by KV head, row,
// head; done(query) as soon as one is whole.
template <class T, class Done> static void pair_chunk(const Task& t, const Tile& tile, Heads heads, int64_t chunk,
                                                      PairRoom& room, float* const* out, const Done& done) {
    const Part part = part_of(t, tile, chunk);
    const bool in_place = part.each <= 4;
    for (int64_t page = part.first; page < part.last; page++)
        for (int64_t h = 0; h < heads.count; h++) {
            if (page + 1 < part.known) ask<T>(t.kv.k, t.kv.key_width, part.at(t, page + 1, heads.first + h));
            ready_keys<T>(t, part.at(t, page, heads.first + h), room.keys + h * room.key_words + page * 16, room.copy);
        }
    for (int64_t page = part.first; page < part.last && !in_place; page++)
        for (int64_t h = 0; h < heads.count; h++) {
            if (page + 1 < part.known) ask<T>(t.kv.v, t.kv.value_width, part.at(t, page + 1, heads.first + h));
            ready_values<T>(t, part.at(t, page, heads.first + h), part.tokens(page),
                            room.values + h * room.value_words + page * 8 * t.value, room.copy);
        }
    for (int64_t h = 0; h < heads.count; h++) {
        int64_t at[CHUNK_PAGES];
        for (int64_t page = part.first; page < part.last; page++) at[page] = part.at(t, page, heads.first + h);
        query_blocks(part.each, [&](auto count, int64_t i) {
            constexpr int Q = decltype(count)::value;
            const int64_t n = h * part.each + i;
            query_block<T, Q>(t, tile, part, at, i, heads.first + h, room.keys + h * room.key_words,
                              in_place ? nullptr : room.values + h * room.value_words, room.scores,
                              room.weights + (in_place ? n * (CHUNK_PAIRS + 8) : 0), room.lows + n, out + n);
            for (int64_t j = n; j < n + Q && !in_place; j++) {
                if (sizeof(T) == 1) add_low(t, out[j] + 16, room.lows[j]);
                done(j);
            }
        });
    }
    if (!in_place) return;
    mix_in_place<T>(t, part, heads, room, out);
    for (int64_t j = 0; j < part.each * heads.count; j++) {
        if (sizeof(T) == 1) add_low(t, out[j] + 16, room.lows[j]);
        done(j);
    }
}

template <class Done> static inline void pair_sums(const Task& t, const Tile& tile, Heads heads, int64_t chunk,
                                                   PairRoom& room, float* const* out, const Done& done) {
    if (t.kv.type == F16) pair_chunk<half>(t, tile, heads, chunk, room, out, done);
    else if (t.kv.type == BF16) pair_chunk<bfloat>(t, tile, heads, chunk, room, out, done);
    else pair_chunk<uint8_t>(t, tile, heads, chunk, room, out, done);
}

// every chunk of a tile in turn; a query's sum joins those before it while it is still in the first cache
static void pair_whole(const Task& t, const Tile& tile, Heads heads, Scratch& scratch) {
    PairRoom r = pair_room(scratch, t);
    const int64_t each = tile.rows * t.group, queries = each * heads.count, slots = each <= 4 ? queries : 6;
    float* part[PAIR_QUERIES];
    for (int64_t i = 0; i < queries; i++) {
        part[i] = r.parts + i % slots * t.state();
        r.states[i * t.state() + 1] = 0.f;
    }
    for (int64_t chunk = tile.first; chunk < tile.last; chunk++)
        pair_sums(t, tile, heads, chunk, r, part,
                  [&](int64_t i) { combine_pairs(r.states + i * t.state(), part[i], t.value); });
    for (int64_t i = 0; i < queries; i++)
        finish(t, t.row_of(tile, i % each), t.head_of(heads, i, each), r.states + i * t.state());
}

static inline void pair_piece(const Task& t, const Tile& tile, Heads heads, int64_t chunk, Scratch& scratch,
                              float* const* out) {
    PairRoom r = pair_room(scratch, t);
    pair_sums(t, tile, heads, chunk, r, out, [](int64_t) {});
}

}  // namespace GAINZ_NS
