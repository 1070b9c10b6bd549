// Attention over pages: place (head norm, rotation, writing K and V), partial softmax over chunks of 128 tokens,
// combination.
// Chunks are counted from the sequence's start and combined in order, so a row's bits depend on its position alone: not on
// how a prompt was cut, nor on which rows share a tile, nor on how many threads there are.
#pragma once
#include "bytes.h"

namespace GAINZ_NS {

constexpr int MAX_QUERIES = 32;     // rows of a tile times query heads of a group
constexpr int PAIR_QUERIES = 128;   // the same where a tile's keys and values are made ready first (paired.h)
constexpr int64_t STAGED = 128 << 10;                          // bytes of keys made ready at once: they stay in the L2 cache
constexpr float NOTHING = -3.0e38f;

struct Tile { int64_t sequence, row, rows, first, last, slot; };      // chunks first … last - 1; slot: of its partial sums
struct Heads { int64_t first, count; };                               // neighbouring KV heads: their pages lie side by side

struct Task {
    const float* qkv; const Spec& spec; const KV& kv; const Batch& batch; const Act& out;
    float* q; float* partial;
    int64_t group, key, value;      // query heads of a KV head; widths padded to 16
    int64_t byte_width;             // of a query in 8 bits; 0: keys are not in 8 bits
    int8_t* q8; float* q8_scale;    // [R, heads, byte_width], [R, heads, 2]
    int64_t most_heads;             // KV heads that one thread takes at once
    int64_t most_queries;           // of a tile, all its heads together
    int64_t pair_width;             // of a query in bfloat16 pairs, padded to 32; 0: this attention is computed in float32
    int32_t* q16;                   // [R, heads, pair_width / 2]
    int64_t most_staged;            // KV heads whose keys are made ready at once
    float unit;                     // queries are multiplied by it: scores in powers of e, or of two
    int64_t state() const { return value + 16; }                      // [0] maximum, [1] sum, [16 …] weighted values
    int64_t spans(const Tile& tile) const { return ceil_div(spec.kv_heads, heads_at_once(tile)); }
    int64_t heads_at_once(const Tile& tile) const { return most(1, least(most_heads, most_queries / (tile.rows * group))); }
    Heads span(const Tile& tile, int64_t i) const {
        const int64_t first = i * heads_at_once(tile);
        return Heads{first, least(heads_at_once(tile), spec.kv_heads - first)};
    }
    // of query i of a span, `each` queries a KV head
    int64_t row_of(const Tile& tile, int64_t i) const { return tile.row + i / group; }
    int64_t head_of(Heads heads, int64_t i, int64_t each) const { return (heads.first + i / each) * group + i % each % group; }
};

// ------------------------------------------------------------------------------------------------ place
static inline void rotate(float* x, const float* cos, const float* sin, int64_t half_width) {
    for (int64_t i = 0; i < half_width; i += W) {
        const int n = static_cast<int>(least(W, half_width - i));
        const vf a = load_n(x + i, n), b = load_n(x + half_width + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(x + i, sub(mul(a, c), mul(b, s)), n);
        store_n(x + half_width + i, add(mul(b, c), mul(a, s)), n);
    }
}

static inline uint16_t to_bf16(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    if (x != x) return static_cast<uint16_t>(u >> 16 | 64);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// one head's key or value into its place; `at`: (page * heads + head) * page size + offset
static inline void keep(const float* x, int64_t width, int64_t type, void* pages, int64_t at, float* scale, float* low) {
    const int64_t to = at * width;
    if (type == F32) { __builtin_memcpy((float*)pages + to, x, static_cast<size_t>(width) * 4); return; }
    if (type == F16) {
        for (int64_t i = 0; i < width; i += W) {
            const int n = static_cast<int>(least(W, width - i));
            store_n((half*)pages + to + i, load_n(x + i, n), n);
        }
        return;
    }
#if defined(GAINZ_PAIRED_DOT)
    if (type == BF16 && width % 2 == 0) return round_pairs(x, width, (int32_t*)((uint16_t*)pages + to));
#endif
    if (type == BF16) { for (int64_t i = 0; i < width; i++) ((uint16_t*)pages)[to + i] = to_bf16(x[i]); return; }
    vf high = set1(x[0]), negated = set1(-x[0]);
    for (int64_t i = 0; i < width; i += W) {
        const int n = static_cast<int>(least(W, width - i));
        const vf v = n == W ? load(x + i) : set1(x[i]);
        high = max(high, v);
        negated = max(negated, sub(zero(), v));
        for (int64_t j = i; n < W && j < width; j++) { high = max(high, set1(x[j])); negated = max(negated, set1(-x[j])); }
    }
    const float least_value = -largest(negated), most_value = largest(high);
    const float step = (most_value - least_value) / 255.f, tiny = 1.17549435e-38f, divisor = step > tiny ? step : tiny;
    for (int64_t i = 0; i < width; i++) {
        const float code = __builtin_rintf((x[i] - least_value) / divisor);
        ((uint8_t*)pages)[to + i] = static_cast<uint8_t>(code < 0.f ? 0.f : code > 255.f ? 255.f : code);
    }
    scale[at] = step;
    low[at] = least_value;
}

static inline void place(const Task& t, int64_t r) {
    const Spec& s = t.spec;
    const KV& kv = t.kv;
    const int64_t width = s.head_dim, all = s.heads + 2 * s.kv_heads, slot = t.batch.slots[r];
    const float *cos = nullptr, *sin = nullptr;
    if (s.rope >= 0) { cos = t.batch.cos + (s.rope * t.batch.rows + r) * t.batch.half; sin = t.batch.sin
                      + (s.rope * t.batch.rows + r) * t.batch.half; }
    for (int64_t h = 0; h < all; h++) {
        const float* from = t.qkv + (r * all + h) * width;
        const bool query = h < s.heads, value = h >= s.heads + s.kv_heads;
        float own[1024];
        float* x = query ? t.q + (r * s.heads + h) * t.key : own;
        const float* weight = query ? s.q_norm : value ? nullptr : s.k_norm;
        if (weight) scaled(from, inverse_rms(from, width, static_cast<float>(s.eps)), weight, x, width, false);
        else __builtin_memcpy(x, from, static_cast<size_t>(width) * 4);
        if (!value && s.rope >= 0) rotate(x, cos, sin, t.batch.half);
        if (query) {
            const float scale = static_cast<float>(s.scale) * t.unit;
            for (int64_t i = 0; i < t.key; i++) x[i] = i < width ? x[i] * scale : 0.f;
            const int64_t own_place = r * s.heads + h;
#if defined(GAINZ_PAIRED_DOT)
            if (t.q16) {
                int32_t* own_pairs = t.q16 + own_place * t.pair_width / 2;
                __builtin_memset(own_pairs, 0, static_cast<size_t>(t.pair_width) * 2);
                round_pairs(x, t.key, own_pairs);
            }
#endif
            if (t.byte_width) byte_query(x, width, t.byte_width, t.q8 + own_place * t.byte_width, t.q8_scale + 2 * own_place,
                                         t.q8_scale + 2 * own_place + 1);
        } else {
            const int64_t head = value ? h - s.heads - s.kv_heads : h - s.heads;
            const int64_t at = (slot / kv.page * kv.heads + head) * kv.page + slot % kv.page;
            keep(x, width, kv.type, value ? kv.v : kv.k, at, value ? kv.v_scale : kv.k_scale, value ? kv.v_low : kv.k_low);
        }
    }
}

// Asks memory for a head's share of a page, into the cache where it was measured to do best: pages follow each other in no order that
// hardware knows.
constexpr bool LINE_BY_LINE = W == 8;           // on the way, where few queries read a page as it lies (direct.h)
constexpr int NEAR = W == 8 ? 3 : 2;
static inline void ask_line(const void* p) { __builtin_prefetch(p, 0, NEAR); }
// share `part` of `parts` of its lines; at < 0: there is no such page
template <class T> static inline void ask(const void* pages, int64_t width, int64_t at, int64_t part = 0, int64_t parts = 1) {
    const char* from = (const char*)pages + at * width * static_cast<int64_t>(sizeof(T));
    const int64_t bytes = at < 0 ? 0 : 16 * width * static_cast<int64_t>(sizeof(T));
    for (int64_t i = part * 64; i < bytes; i += parts * 64) ask_line(from + i);
}

}  // namespace GAINZ_NS

#include "pages.h"
#if defined(GAINZ_DIRECT_KEYS)
#include "direct.h"
#endif

namespace GAINZ_NS {

// ------------------------------------------------------------------------------------------------ one chunk
// scores → weights in place over the tokens [lo, hi) of a chunk, zeros elsewhere; returns maximum and sum
static inline void soften(float* s, int64_t lo, int64_t hi, int64_t length, float* top, float* total) {
    for (int64_t t = 0; t < lo; t++) s[t] = NOTHING;
    for (int64_t t = hi; t < length; t++) s[t] = NOTHING;
    vf m = set1(NOTHING);
    for (int64_t t = 0; t < length; t += W) m = max(m, load(s + t));
    *top = largest(m);
    vf l = zero();
    for (int64_t t = 0; t < length; t += W) {
        vf e = exp(sub(load(s + t), set1(*top)));
        if (t < lo || t + W > hi) {
            float lane[W];
            store(lane, e);
            for (int i = 0; i < W; i++) if (t + i < lo || t + i >= hi) lane[i] = 0.f;
            e = load(lane);
        }
        store(s + t, e);
        l = add(l, e);
    }
    *total = sum(l);
}

static inline void softcap(float* s, int64_t length, float cap) {
    for (int64_t t = 0; t < length; t += W) {
        const vf e = exp(mul(load(s + t), set1(2.f / cap)));
        store(s + t, mul(set1(cap), sub(set1(1.f), div(set1(2.f), add(set1(1.f), e)))));
    }
}

static inline float exp1(float x) { float lane[W]; store(lane, exp(set1(x))); return lane[0]; }

// state of the chunks before, joined by the next chunk's; state[1] == 0: there were none
static inline void combine(float* state, const float* next, int64_t value) {
    if (next[1] == 0.f) return;
    if (state[1] == 0.f) { __builtin_memcpy(state, next, static_cast<size_t>(value + 16) * 4); return; }
    const float top = state[0] > next[0] ? state[0] : next[0], a = exp1(state[0] - top), b = exp1(next[0] - top);
    state[1] = state[1] * a + next[1] * b;
    state[0] = top;
    for (int64_t i = 16; i < value + 16; i += W) store(state + i, fma(load(state + i), set1(a),
                                                                      mul(load(next + i), set1(b))));
}

// one thread's: [16 w], [16 w], [queries, 128 + 16], [queries, state], [queries, 16], [queries, 16]
struct Room { float *page, *columns, *scores, *parts, *weights, *lows; };

static inline Room room(Scratch& s, const Task& t) {
    const int64_t page = 16 * most(most(t.key, t.value), t.byte_width), scores = MAX_QUERIES * (PAGE_CHUNK + 16);
    float* p = (float*)s.need(static_cast<size_t>(2 * page + scores + MAX_QUERIES * (t.state() + 32)) * 4);
    float* parts = p + 2 * page + scores;
    float* weights = parts + MAX_QUERIES * t.state();
    return Room{p, p + page, p + 2 * page, parts, weights, weights + MAX_QUERIES * 16};
}

// scores of a page's 16 tokens with the tile's queries, into p[query]; `next`: the page to ask for, or -1
template <class T> static inline void page_scores(const Task& t, int64_t at, int64_t next, int64_t tokens, const float* const* q,
                                                  float* const* p, int64_t offset, int64_t queries, Room& room) {
#if defined(GAINZ_DIRECT_KEYS)
    float* to[DIRECT_QUERIES];
    for (int64_t i = 0; i < least(queries, DIRECT_QUERIES); i++) to[i] = p[i] + offset;
    const T* keys = (const T*)t.kv.k + at * t.kv.key_width;
    if (direct_scores(q, keys, next < 0 ? keys : (const T*)t.kv.k + next * t.kv.key_width, t.kv.key_width, t.key, queries, to)) return;
#endif
    ask<T>(t.kv.k, t.kv.key_width, next);
    key_columns<T>(t, at, tokens, room.page, room.columns);
    by_queries(queries, [&](auto count, int64_t i) {
        constexpr int QB = decltype(count)::value;
        float* to[QB];
        for (int j = 0; j < QB; j++) to[j] = p[i + j] + offset;
        score<QB>(q + i, room.columns, t.key, to);
    });
}

// The same in 8 bits. q: of each query's place among the floats; q·(code * scale + low) = (q·code) * scale + low * Σq.
template <> inline void page_scores<uint8_t>(const Task& t, int64_t at, int64_t next, int64_t, const float* const* q, float* const* p,
                                             int64_t offset, int64_t queries, Room& room) {
    const uint8_t* columns = byte_columns((const uint8_t*)t.kv.k + at * t.kv.key_width, t.kv.key_width, t.byte_width,
                                          (uint8_t*)room.columns);
    for (int64_t i = 0; i < queries; i++) {
        ask<uint8_t>(t.kv.k, t.kv.key_width, next, i, queries);
        const int64_t own = (q[i] - t.q) / t.key;
        const vf scale = set1(t.q8_scale[2 * own]), sum_of = set1(t.q8_scale[2 * own + 1]);
        float* y = p[i] + offset;
        byte_dots(columns, t.byte_width, t.q8 + own * t.byte_width, y);
        for (int part = 0; part < 16; part += W)
            store(y + part, fma(load(t.kv.k_low + at + part), sum_of, mul(load(y + part), mul(load(t.kv.k_scale + at + part),
                                                                                              scale))));
    }
}

// Partial sums of a tile's queries over one chunk, into out[query] (state() floats each), queries ordered by KV head, row, head.
// Page by page through all the heads asked for, so that memory is read in the order in which it lies.
template <class T> static void chunk_of(const Task& t, const Tile& tile, Heads heads, int64_t chunk, Room& room,
                                        float* const* out) {
    const Spec& s = t.spec;
    const KV& kv = t.kv;
    const int64_t each = tile.rows * t.group, queries = each * heads.count, from = chunk * PAGE_CHUNK;
    const int64_t last = t.batch.positions[tile.row + tile.rows - 1];               // the tile's last row sees furthest
    const int64_t length = least(PAGE_CHUNK, last + 1 - from), pages = ceil_div(length, 16), padded = pages * 16;
    // pages nobody sees
    const int64_t seen = s.window ? most(0, t.batch.positions[tile.row] - s.window + 1 - from) / 16 : 0;
    const int32_t* table = t.batch.pages + tile.sequence * t.batch.page_stride + from / 16;
    const float* q[MAX_QUERIES];
    float *p[MAX_QUERIES], *acc[MAX_QUERIES];
    for (int64_t i = 0; i < queries; i++) {
        q[i] = t.q + (t.row_of(tile, i % each) * s.heads + t.head_of(heads, i, each)) * t.key;
        p[i] = room.scores + i * (PAGE_CHUNK + 16);
        acc[i] = out[i] + 16;
    }
    const int64_t known = ceil_div(last + 1 - from, 16);       // pages from here to the sequence's end, this chunk's and later
    const auto at = [&](int64_t page, int64_t h) { return page < known ? (table[page] * kv.heads + heads.first + h) * 16 : -1; };
    for (int64_t page = seen; page < pages; page++)
        for (int64_t h = 0; h < heads.count; h++) {
            if (page + 1 == pages) ask<T>(kv.v, kv.value_width, at(seen, h));
            page_scores<T>(t, at(page, h), at(page + 1, h), least(16, length - page * 16), q + h * each, p + h * each, page * 16, each,
                           room);
        }
    for (int64_t i = 0; i < queries; i++) {
        const int64_t position = t.batch.positions[t.row_of(tile, i % each)];
        const int64_t hi = least(length, position + 1 - from), lo = s.window ? most(0, position - s.window + 1 - from) : 0;
        float* o = out[i];
        for (int64_t c = 0; c < t.state(); c += W) store(o + c, zero());
        for (int64_t j = 0; j < seen * 16; j += W) store(p[i] + j, zero());
        if (sizeof(T) == 1) for (int64_t j = 0; j < 16; j += W) store(room.lows + i * 16 + j, zero());
        if (hi <= lo) { for (int64_t j = 0; j < padded; j++) p[i][j] = 0.f; continue; }
        if (s.softcap > 0) softcap(p[i] + seen * 16, padded - seen * 16, static_cast<float>(s.softcap));
        soften(p[i], lo, hi, padded, o, o + 1);
    }
    for (int64_t page = seen; page < pages; page++)
        for (int64_t h = 0; h < heads.count; h++)
            add_values<T>(t, at(page, h), at(page + 1, h), least(16, length - page * 16), p + h * each, each, page * 16, acc + h * each,
                          room.page, room.weights, room.lows + h * each * 16);
    if (sizeof(T) == 1) add_lows(t, queries, acc, room.lows);
}

static inline void chunk_sums(const Task& t, const Tile& tile, Heads heads, int64_t chunk, Room& room, float* const* out) {
    if (t.kv.type == F32) chunk_of<float>(t, tile, heads, chunk, room, out);
    else if (t.kv.type == F16) chunk_of<half>(t, tile, heads, chunk, room, out);
    else if (t.kv.type == BF16) chunk_of<bfloat>(t, tile, heads, chunk, room, out);
    else chunk_of<uint8_t>(t, tile, heads, chunk, room, out);
}

static inline void finish(const Task& t, int64_t row, int64_t head, const float* state) {
    float* y = t.out.rows + row * t.out.k + head * t.kv.value_width;
    const vf inverse = set1(1.f / state[1]);
    for (int64_t i = 0; i < t.kv.value_width; i += W)
        store_n(y + i, mul(load(state + 16 + i), inverse), static_cast<int>(least(W, t.kv.value_width - i)));
}

}  // namespace GAINZ_NS
