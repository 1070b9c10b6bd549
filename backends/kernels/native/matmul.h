// Products with quantized matrices at any number of rows. A row's sums run over its own columns in one fixed order, whatever
// tile it falls into: the tiles decide only how often a weight is read.
#pragma once

namespace GAINZ_NS {

// Where products go: number (row, column) of n columns to out[(row - row0) * stride + column - column0].
struct Target { float* out; int64_t n; const float* bias; bool adding; int64_t stride, row0, column0; };
static inline Target target_of(float* out, const Linear& w, const float* bias, bool adding) {
    return Target{out, w.n, bias, adding, w.n, 0, 0};
}

// writes lanes [first, first + W) of a 16-row block
static inline void put(const Target& t, int64_t row, int64_t column, vf v) {
    const int64_t left = t.n - column;
    if (left <= 0) return;
    float* p = t.out + (row - t.row0) * t.stride + column - t.column0;
    const int n = static_cast<int>(least(W, left));
    if (n == W) {
        if (t.bias) v = add(v, load(t.bias + column));
        store(p, t.adding ? add(load(p), v) : v);
    } else {
        if (t.bias) v = add(v, load_n(t.bias + column, n));
        store_n(p, t.adding ? add(load_n(p, n), v) : v, n);
    }
}

template <int BITS, int SEG, int M>
static void tile_rows(const Linear& w, int64_t nb, const Act& a, int64_t first, int64_t count, const Target& t) {
    int64_t rows[M];
    for (int m = 0; m < M; m++) rows[m] = least(first + m, first + count - 1);      // a spare row repeats the last one
    tile<BITS, SEG, M>(w, nb, a, rows, [&](int m, int lane, vf v) { if (m < count) put(t, rows[m], nb * LANES + lane, v); });
}

#if !defined(GAINZ_PANELS)
static inline size_t panel_bytes(const Linear&) { return 0; }
#endif

// `panel`: room of panel_bytes, for a target that unpacks a block once for many rows
template <int BITS, int SEG>
static void block_rows(const Linear& w, int64_t nb, const Act& a, int64_t from, int64_t to, const Target& t, char* panel) {
#if defined(GAINZ_PANELS)
    if (to - from >= PANEL_ROWS)
        from = panel_rows<BITS, SEG>(w, nb, a, from, to, (uint8_t*)panel, [&](int64_t row, int lane, vf v) {
            put(t, row, nb * LANES + lane, v);
        });
#else
    (void)panel;
#endif
    while (from < to) {
        const int64_t n = least(to - from, TILE);
        if (n == 1) tile_rows<BITS, SEG, 1>(w, nb, a, from, n, t);
        else if (n == 2) tile_rows<BITS, SEG, 2>(w, nb, a, from, n, t);
        else if (n <= 4) tile_rows<BITS, SEG, 4>(w, nb, a, from, n, t);
        else if (n <= 6 || TILE == 6) tile_rows<BITS, SEG, 6>(w, nb, a, from, n, t);
        else tile_rows<BITS, SEG, TILE>(w, nb, a, from, n, t);
        from += n;
    }
}

typedef void (*BlockRows)(const Linear&, int64_t, const Act&, int64_t, int64_t, const Target&, char*);

static inline BlockRows pick(const Linear& w) {
    if (w.bits == 4) return w.segment == 32 ? block_rows<4, 32> : block_rows<4, 16>;
    return w.segment == 32 ? block_rows<8, 32> : block_rows<8, 16>;
}

constexpr int64_t TASK_ROWS = 128;          // of one task: their activations stay in the second cache

// Neighbouring blocks of a task: a few tasks for each thread, so that a core that somebody borrowed does not hold up the others.
static inline int64_t share(const Context& c, int64_t blocks) { return most(1, blocks / (c.pool->threads() * 6)); }

// activations in the order of a permuted or padded matrix, quantized anew
static inline Act gathered(Context& c, const Act& a, const Linear& w, int64_t rows) {
    const int64_t blocks = w.padded / BLOCK;
    Act g = a;
    g.k = g.padded = w.padded;
    char* p = c.gathered.need(static_cast<size_t>(rows * (w.padded * 5 + blocks * 36) + 64));
    g.rows = (float*)p; p += rows * w.padded * 4;
    g.scale = (float*)p; p += rows * blocks * 4;
    g.sum32 = (float*)p; p += rows * blocks * 4;
    g.sum16 = (float*)p; p += rows * blocks * 8;
    g.minus8 = (int32_t*)p; p += rows * blocks * 4;
    g.minus8_16 = (int32_t*)p; p += rows * blocks * 8;
    g.q = a.q ? (int8_t*)p : nullptr;
    each_row(c, rows, w.padded, [&](int64_t r) {
        for (int64_t i = 0; i < w.padded; i++) {
            const int32_t from = w.gather[i];
            g.rows[r * w.padded + i] = from < 0 ? 0.f : a.rows[r * a.k + from];
        }
        quantize(g, r);
    });
    return g;
}

}  // namespace GAINZ_NS

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define GAINZ_MANY
#include "many.h"
#endif

namespace GAINZ_NS {

static void quantized(Context& c, const Act& act, const Linear& w, int64_t rows, const Target& t) {
    const Act a = w.gather ? gathered(c, act, w, rows) : act;
#if defined(GAINZ_MANY)
    if (rows >= MANY) return many(c, a, w, rows, t);
#endif
    const BlockRows run = pick(w);
    const int64_t blocks = ceil_div(w.n, LANES), each = share(c, blocks), bands = ceil_div(rows, TASK_ROWS);
    auto job = [&](int64_t index, int thread) {
        const int64_t nb = index / bands * each, from = index % bands * TASK_ROWS, to = least(rows, from + TASK_ROWS);
        char* panel = c.own[thread].need(panel_bytes(w));
        for (int64_t b = nb; b < least(blocks, nb + each); b++) run(w, b, a, from, to, t, panel);
    };
    parallel(*c.pool, ceil_div(blocks, each) * bands, job);
}

}  // namespace GAINZ_NS
