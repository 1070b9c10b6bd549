// Products with packed matrices at any number of rows. A row's sums run over its own columns in one fixed order, whatever
// tile it falls into: the tiles decide only how often a weight is read.
#pragma once

namespace GAINZ_NS {

struct Target { float* out; int64_t n; const float* bias; bool adding; };

// writes lanes [first, first + W) of a 16-row block
static inline void put(const Target& t, int64_t row, int64_t column, vf v) {
    const int64_t left = t.n - column;
    if (left <= 0) return;
    float* p = t.out + row * t.n + column;
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

template <int BITS, int SEG>
static void block_rows(const Linear& w, int64_t nb, const Act& a, int64_t from, int64_t to, const Target& t) {
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

typedef void (*BlockRows)(const Linear&, int64_t, const Act&, int64_t, int64_t, const Target&);

static inline BlockRows pick(const Linear& w) {
    if (w.bits == 4) return w.segment == 32 ? block_rows<4, 32> : block_rows<4, 16>;
    return w.segment == 32 ? block_rows<8, 32> : block_rows<8, 16>;
}

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
    g.q = (int8_t*)p;
    each_row(c, rows, w.padded, [&](int64_t r) {
        for (int64_t i = 0; i < w.padded; i++) {
            const int32_t from = w.gather[i];
            g.rows[r * w.padded + i] = from < 0 ? 0.f : a.rows[r * a.k + from];
        }
        quantize(g, r);
    });
    return g;
}

static void quantized(Context& c, const Act& act, const Linear& w, int64_t rows, const Target& t) {
    const Act a = w.gather ? gathered(c, act, w, rows) : act;
    const BlockRows run = pick(w);
    const int64_t blocks = ceil_div(w.n, LANES), threads = c.pool->threads();
    // a few chunks for each thread, so that a core that somebody borrowed does not hold up the others
    const int64_t each = most(1, blocks / (threads * 6)), chunks = ceil_div(blocks, each);
    // activations that stay in the L2 cache
    const int64_t band = most(TILE, least(rows, (384 << 10) / w.padded / TILE * TILE));
    auto job = [&](int64_t chunk, int) {
        for (int64_t from = 0; from < rows; from += band)
            for (int64_t nb = chunk * each; nb < least(blocks, (chunk + 1) * each); nb++)
                run(w, nb, a, from, least(rows, from + band), t);
    };
    parallel(*c.pool, chunks, job);
}

// N weight rows of a dense matrix against M rows, one accumulator for each pair
template <class T, int N, int M>
static inline void dense_tile(const Linear& w, int64_t n0, const Act& a, const int64_t* rows, int64_t count, const Target&
                              t) {
    const T* p[N];
    const float* x[M];
    vf acc[N][M];
    for (int n = 0; n < N; n++) p[n] = (const T*)w.codes + least(n0 + n, w.n - 1) * w.k;
    for (int m = 0; m < M; m++) x[m] = a.rows + rows[m] * w.k;
    for (int n = 0; n < N; n++) for (int m = 0; m < M; m++) acc[n][m] = zero();
    int64_t i = 0;
    for (; i + W <= w.k; i += W) {
        vf v[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) { v[n] = load(p[n] + i); __builtin_prefetch(p[n] + i + 512); }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const vf xm = load(x[m] + i);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[n][m] = fma(v[n], xm, acc[n][m]);
        }
    }
    if (i < w.k) {
        const int left = static_cast<int>(w.k - i);
        for (int n = 0; n < N; n++) for (int m = 0; m < M; m++) acc[n][m] = fma(load_n(p[n] + i, left),
            load_n(x[m] + i, left), acc[n][m]);
    }
    for (int n = 0; n < N && n0 + n < w.n; n++)
        for (int m = 0; m < M && m < count; m++) {
            float* out = t.out + rows[m] * t.n + n0 + n;
            float y = sum(acc[n][m]);
            if (t.bias) y += t.bias[n0 + n];
            *out = t.adding ? *out + y : y;
        }
}

template <class T> static void dense_rows(const Linear& w, int64_t n0, int64_t n1, const Act& a, int64_t rows,
                                          const Target& t) {
    for (int64_t m0 = 0; m0 < rows; m0 += 4) {
        int64_t r[4];
        const int64_t count = least(4, rows - m0);
        for (int m = 0; m < 4; m++) r[m] = least(m0 + m, rows - 1);
        for (int64_t n = n0; n < n1; n += 4) {
            if (count == 1) dense_tile<T, 4, 1>(w, n, a, r, count, t);
            else if (count == 2) dense_tile<T, 4, 2>(w, n, a, r, count, t);
            else dense_tile<T, 4, 4>(w, n, a, r, count, t);
        }
    }
}

static void dense(Context& c, const Act& a, const Linear& w, int64_t rows, const Target& t) {
    // rows of a chunk stay in the L1/L2 cache
    const int64_t each = most(1, least(16, w.n / (c.pool->threads() * 24))) * 4;
    auto job = [&](int64_t chunk, int) {
        const int64_t n0 = chunk * each, n1 = least(w.n, n0 + each);
        if (w.type == F32) dense_rows<float>(w, n0, n1, a, rows, t);
        else if (w.type == F16) dense_rows<half>(w, n0, n1, a, rows, t);
        else dense_rows<bfloat>(w, n0, n1, a, rows, t);
    };
    parallel(*c.pool, ceil_div(w.n, each), job);
}

// act, linear, rows, out, adding
static void matmul(Context& c, const int64_t* i) {
    const Linear& w = *ptr<const Linear>(i[1]);
    const Target t{ptr<float>(i[3]), w.n, w.bias, i[4] != 0};
    if (w.bits) quantized(c, *ptr<const Act>(i[0]), w, i[2], t);
    else dense(c, *ptr<const Act>(i[0]), w, i[2], t);
}

// act, linear, rows, out, softcap (a double; 0: none)
static void logits(Context& c, const int64_t* i) {
    const Linear& w = *ptr<const Linear>(i[1]);
    const int64_t words[5] = {i[0], i[1], i[2], i[3], 0};
    matmul(c, words);
    const float cap = static_cast<float>(real(i[4]));
    if (!(cap > 0.f)) return;
    each_row(c, i[2], w.n, [&](int64_t r) {
        float* y = ptr<float>(i[3]) + r * w.n;
        for (int64_t j = 0; j < w.n; j += W) {     // cap * tanh(x / cap) = cap * (1 - 2 / (1 + e^(2x/cap)))
            const int n = static_cast<int>(least(W, w.n - j));
            const vf e = exp(mul(load_n(y + j, n), set1(2.f / cap)));
            store_n(y + j, mul(set1(cap), sub(set1(1.f), div(set1(2.f), add(set1(1.f), e)))), n);
        }
    });
}

template <class T> static inline float one(const T* p) {
    float lane[W];
    store(lane, load_n(p, 1));
    return lane[0];
}

static inline float element(const Linear& w, int64_t row, int64_t column) {
    const int64_t nb = row / LANES, lane = row % LANES, group = column / (w.segment == 16 ? 16 : w.blocks * BLOCK);
    const uint8_t* block = w.codes + nb * w.padded * LANES * w.bits / 8;
    const uint8_t byte = w.bits == 8 ? block[column / 4 * 64 + lane * 4 + column % 4] :
        block[column / 8 * 64 + lane * 4 + column % 4];
    const float code = w.bits == 8 ? byte : (column % 8 < 4 ? byte & 15 : byte >> 4);
    const int64_t at = (nb * w.groups + group) * LANES + lane;
    const float scale = w.wide ? ((const float*)w.scale)[at] : one((const half*)w.scale + at);
    if (w.offset_kind == BIAS) return code * scale + (w.wide ? ((const float*)w.offset)[at] :
                                                      one((const half*)w.offset + at));
    return (code - (w.offset_kind == ZERO ? ((const uint8_t*)w.offset)[at] : w.bits == 8 ? 128.f : 8.f)) * scale;
}

// linear, ids, rows, out, scale
static void embed(Context& c, const int64_t* i) {
    const Linear& w = *ptr<const Linear>(i[0]);
    const int64_t* ids = ptr<const int64_t>(i[1]);
    float* out = ptr<float>(i[3]);
    const float scale = static_cast<float>(real(i[4]));
    each_row(c, i[2], w.k * 4, [&](int64_t r) {
        float* y = out + r * w.k;
        for (int64_t j = 0; w.bits && j < w.padded; j++) {
            const int64_t k = w.gather ? w.gather[j] : j;
            if (k >= 0 && k < w.k) y[k] = element(w, ids[r], j) * scale;
        }
        for (int64_t j = 0; !w.bits && j < w.k; j += W) {
            const int n = static_cast<int>(least(W, w.k - j));
            const int64_t at = ids[r] * w.k + j;
            const vf v = w.type == F32 ? load_n((const float*)w.codes + at, n)
                       : w.type == F16 ? load_n((const half*)w.codes + at, n) : load_n((const bfloat*)w.codes + at, n);
            store_n(y + j, mul(v, set1(scale)), n);
        }
    });
}

}  // namespace GAINZ_NS
