// Products with float matrices at any number of rows: blocks of 16 weight rows, column by column.
// One chain of multiply-adds for each pair of row and output runs over DEPTH columns and then joins the total, in the order
// of the columns: neither the tile a row falls into nor the number of rows shows in its bits. 16-bit weights are widened on
// the way; where the processor multiplies bfloat16 (PAIRED_DOT), rows are rounded to it and no width is made of the weights.
#pragma once
#include <type_traits>

namespace GAINZ_NS {

constexpr int64_t DEPTH = 1024;             // columns of one chain: 4 blocks of them stay in the L2 cache
constexpr int HEIGHT = 6;                   // rows of a tile
constexpr int BREADTH = W == 16 ? 4 : 1;    // blocks of a tile of many rows: as many as the registers hold
constexpr int64_t BAND = 16 * HEIGHT;       // rows of one task: a matrix of few outputs still feeds every thread
constexpr int VECTORS = LANES / W;

static inline int64_t column_bytes(int64_t type) { return type == F32 ? LANES * 4 : LANES * 2; }
static inline int64_t block_bytes(const Linear& w) { return w.padded * column_bytes(w.type); }

// The columns k and k + 1 of a block, as vectors of W rows from `lane` on. bfloat16 lies in pairs: [k / 2][16][2].
static inline vf column(const float* p, int64_t k, int lane) { return load(p + k * LANES + lane); }
static inline vf column(const half* p, int64_t k, int lane) { return load(p + k * LANES + lane); }
static inline vf column(const bfloat* p, int64_t k, int lane) {
    const uint32_t* pairs = (const uint32_t*)p + k / 2 * LANES + lane;
    return k & 1 ? upper(pairs) : lower(pairs);
}

// ------------------------------------------------------------------------------------------------ tiles
// N blocks against M rows over `depth` columns; blocks are `stride` bytes apart, rows x[m] begin at the first of the columns
template <class T, int N, int M>
static inline void chain(const char* block, int64_t stride, const float* const* x, int64_t depth, vf (&acc)[N][VECTORS][M]) {
    const T* p[N];
    for (int n = 0; n < N; n++) p[n] = (const T*)(block + n * stride);
    for (int n = 0; n < N; n++) for (int v = 0; v < VECTORS; v++) for (int m = 0; m < M; m++) acc[n][v][m] = zero();
    const auto step = [&](int64_t k) __attribute__((always_inline)) {
        vf w[N][VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) w[n][v] = column(p[n], k, v * W);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const vf xm = set1(x[m][k]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[n][v][m] = fma(w[n][v], xm, acc[n][v][m]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
        for (int n = 0; n < N; n++) __builtin_prefetch((const char*)(p[n] + k * LANES) + 1024);
        step(k);
        step(k + 1);
    }
    if (k < depth) step(k);
}

#if defined(GAINZ_PAIRED_DOT)
// the same with rows of bfloat16 pairs: each step takes two columns
template <int N, int M>
static inline void chain_pairs(const char* block, int64_t stride, const int32_t* const* x, int64_t depth,
                               vf (&acc)[N][VECTORS][M]) {
    for (int n = 0; n < N; n++) for (int m = 0; m < M; m++) acc[n][0][m] = zero();
    const char* p = block;
    for (int64_t k = 0; k < depth / 2; k++, p += 64) {
        pair w[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            w[n] = load_pair(p + n * stride);
            if (M <= 4) __builtin_prefetch(p + n * stride + 1024);
        }
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const pair xm = set1_pair(x[m][k]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[n][0][m] = dot_pair(w[n], xm, acc[n][0][m]);
        }
    }
}
#endif

// A row's total so far and one chain more. The first chain begins with the bias and with what stands there already.
static inline void join(const Target& t, int64_t row, int64_t column, vf v, bool first) {
    Target rest = t;
    rest.bias = nullptr;
    rest.adding = true;
    put(first ? t : rest, row, column, v);
}

// Rows of one product, as the tiles read them: floats, or bfloat16 pairs at `stride` words.
struct Operand { const float* floats; const int32_t* pairs; int64_t stride; };

template <class T, int N, int M>
static inline void dense_tile(const char* block, int64_t stride, const Operand& a, int64_t row, int64_t from, int64_t depth,
                              int64_t column, const Target& t) {
    vf acc[N][VECTORS][M];
#if defined(GAINZ_PAIRED_DOT)
    if (sizeof(T) == 2 && a.pairs) {
        const int32_t* x[M];
        for (int m = 0; m < M; m++) x[m] = a.pairs + (row + m) * a.stride + from / 2;
        chain_pairs<N, M>(block, stride, x, depth, acc);
    } else
#endif
    {
        const float* x[M];
        for (int m = 0; m < M; m++) x[m] = a.floats + (row + m) * a.stride + from;
        chain<T, N, M>(block, stride, x, depth, acc);
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) join(t, row + m, column + n * LANES + v * W, acc[n][v][m], from == 0);
}

template <class T, int N>
static inline void dense_band(const char* block, int64_t stride, const Operand& a, int64_t row, int64_t end, int64_t from,
                              int64_t depth, int64_t column, const Target& t) {
    for (; row + HEIGHT <= end; row += HEIGHT) dense_tile<T, N, HEIGHT>(block, stride, a, row, from, depth, column, t);
    const auto rest = [&](auto rows) { dense_tile<T, N, decltype(rows)::value>(block, stride, a, row, from, depth, column, t); };
    switch (end - row) {                        // in one tile, which reads the weights once
        case 5: return rest(std::integral_constant<int, 5>());
        case 4: return rest(std::integral_constant<int, 4>());
        case 3: return rest(std::integral_constant<int, 3>());
        case 2: return rest(std::integral_constant<int, 2>());
        case 1: return rest(std::integral_constant<int, 1>());
    }
}

// Blocks [nb, nb_end) for the rows [row, end), depth by depth. `panel`: where many rows make it worth while, a piece of the
// weights widened once into [block][column][16] floats; else null.
template <class T, int N>
static void dense_blocks(const Linear& w, int64_t nb, int64_t nb_end, const Operand& a, int64_t row, int64_t end,
                         float* panel, const Target& t) {
    const int64_t size = block_bytes(w), columns = a.pairs ? w.padded : w.k;
    for (int64_t from = 0; from < w.k; from += DEPTH) {
        const int64_t depth = least(DEPTH, columns - from);
        for (int64_t b = nb; b < nb_end;) {
            const int64_t count = b + N <= nb_end ? N : 1, out = b * LANES;
            const char* block = (const char*)w.codes + b * size + from * column_bytes(w.type);
            if (panel) {
                for (int64_t n = 0; n < count; n++)
                    for (int64_t k = 0; k < depth; k++)
                        for (int v = 0; v < LANES; v += W)
                            store(panel + (n * DEPTH + k) * LANES + v, column((const T*)(block + n * size), k, v));
                if (count == N) dense_band<float, N>((const char*)panel, DEPTH * LANES * 4, a, row, end, from, depth, out, t);
                else dense_band<float, 1>((const char*)panel, DEPTH * LANES * 4, a, row, end, from, depth, out, t);
            } else if (count == N) dense_band<T, N>(block, size, a, row, end, from, depth, out, t);
            else dense_band<T, 1>(block, size, a, row, end, from, depth, out, t);
            b += count;
        }
    }
}

template <class T>
static void dense_task(const Linear& w, int64_t nb, int64_t nb_end, const Operand& a, int64_t row, int64_t end, float* panel,
                       const Target& t) {
    // few rows wait for memory: narrow tiles share the outputs out evenly
    if (end - row <= 16) dense_blocks<T, BREADTH == 1 ? 1 : 2>(w, nb, nb_end, a, row, end, nullptr, t);
    else dense_blocks<T, BREADTH>(w, nb, nb_end, a, row, end, panel, t);
}

// ------------------------------------------------------------------------------------------------ the op
static inline Operand operand(Context& c, const Act& a, const Linear& w, int64_t rows) {
#if defined(GAINZ_PAIRED_DOT)
    if (w.type == BF16) {
        const int64_t words = w.padded / 2;
        int32_t* pairs = (int32_t*)c.gathered.need(static_cast<size_t>(rows * words) * 4 + 64);
        const auto one = [&](int64_t r) { round_pairs(a.rows + r * a.k, w.k, pairs + r * words); };
        if (rows <= 16) for (int64_t r = 0; r < rows; r++) one(r);
        else each_row(c, rows, w.k, one);
        return Operand{a.rows, pairs, words};
    }
#endif
    (void)c; (void)w; (void)rows;
    return Operand{a.rows, nullptr, a.k};
}

static void dense(Context& c, const Act& act, const Linear& w, int64_t rows, const Target& t) {
    const Operand a = operand(c, act, w, rows);
    const int64_t blocks = ceil_div(w.n, LANES), threads = c.pool->threads();
    const int64_t bands = rows <= BAND ? 1 : ceil_div(rows, BAND);
    const int64_t unit = rows <= 16 ? (BREADTH == 1 ? 1 : 2) : BREADTH;
    const int64_t each = most(1, blocks / (threads * 8) / unit) * unit, groups = ceil_div(blocks, each);
    auto job = [&](int64_t index, int thread) {
        const int64_t band = index % bands, nb = index / bands * each, row = band * BAND;
        const int64_t end = bands == 1 ? rows : least(rows, row + BAND), nb_end = least(blocks, nb + each);
        float* panel = nullptr;
        if (w.type != F32 && !a.pairs && end - row > 16)
            panel = (float*)c.own[thread].need(static_cast<size_t>(BREADTH * DEPTH * LANES) * 4);
        if (w.type == F32) dense_task<float>(w, nb, nb_end, a, row, end, panel, t);
        else if (w.type == F16) dense_task<half>(w, nb, nb_end, a, row, end, panel, t);
        else dense_task<bfloat>(w, nb, nb_end, a, row, end, panel, t);
    };
    parallel(*c.pool, groups * bands, job);
}

template <class T> static inline float one(const T* p) {
    float lane[W];
    store(lane, load_n(p, 1));
    return lane[0];
}

static inline float dense_element(const Linear& w, int64_t row, int64_t k) {
    const char* block = (const char*)w.codes + row / LANES * block_bytes(w);
    const int64_t lane = row % LANES;
    if (w.type == F32) return ((const float*)block)[k * LANES + lane];
    if (w.type == F16) return one((const half*)block + k * LANES + lane);
    const uint32_t bits = static_cast<uint32_t>(((const uint16_t*)block)[(k / 2 * LANES + lane) * 2 + k % 2]) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

}  // namespace GAINZ_NS
