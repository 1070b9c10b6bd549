// Products of quantized matrices on AVX2 without VNNI: unsigned codes below 16 times signed bytes, eight of which fit 16 bits. A
// code of 8 bits is two nibbles. For many rows a block's codes are unpacked once, a byte to a nibble, and its scales widened (the
// panel, some 12 KB for 576 columns), and four rows at a time meet them. Every tile adds the same sums in the same order.
#pragma once

namespace GAINZ_NS {

constexpr int64_t PANEL_ROWS = 8;           // rows from which unpacking first pays
constexpr int PANEL_HEIGHT = 4;             // rows of a panel's tile: 16 registers hold their sums and two vectors of codes

// what M rows hold for a matrix, from `first` on
template <int SEG, int M> struct Lines {
    const int8_t* x[M];
    const float *scale[M], *sum_of[M];
    const int32_t* owed[M];
    template <class Row> Lines(const Linear& w, const Act& a, const Row& row) {
        const int64_t segments = w.padded / SEG, blocks = w.padded / BLOCK;
        for (int m = 0; m < M; m++) {
            const int64_t r = row(m);
            x[m] = a.q + r * w.padded;
            scale[m] = a.scale + r * blocks;
            sum_of[m] = (SEG == 32 ? a.sum32 : a.sum16) + r * segments;
            owed[m] = (SEG == 32 ? a.minus8 : a.minus8_16) + r * segments;
        }
    }
    __m256i word(int m, int64_t at) const { return _mm256_set1_epi32(*(const int32_t*)(x[m] + at)); }
    // a segment's integer sums of row m times `by`, with what a centred code owes, joins v
    template <int BITS, bool CENTRED> vf join(int m, int64_t s, __m256i sums, vf by, vf offset, vf v) const {
        if (CENTRED) sums = _mm256_add_epi32(sums, _mm256_set1_epi32(owed[m][s] * (BITS == 4 ? 1 : 16)));
        v = fma(_mm256_cvtepi32_ps(sums), mul(by, set1(scale[m][s * SEG / BLOCK])), v);
        return CENTRED ? v : fma(offset, set1(sum_of[m][s]), v);
    }
};

// sum + codes · word in 16 bits, in the order written: a compiler that adds in a tree needs more registers than there are, hence
// the empty assembly
static inline void add_products(__m256i& sum, __m256i codes, __m256i word) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, word));
    __asm__("" : "+x"(sum));
}
static inline __m256i widened(__m256i low, __m256i high) {      // 8 bits: low nibbles + 16 high ones
    return _mm256_add_epi32(_mm256_madd_epi16(low, _mm256_set1_epi16(1)), _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}

// ------------------------------------------------------------------------------------------------ few rows
// H halves (8 rows each, from `first`) of a 16-row block against M rows of activations
template <int BITS, int SEG, int M, int H, bool CENTRED, class Store>
static inline void halves(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, int first, Store&& out) {
    constexpr int LINES = SEG / (BITS == 4 ? 8 : 4), SETS = BITS == 4 ? 1 : 2;
    const uint8_t* code = w.codes + nb * w.padded * LANES * BITS / 8 + first * 4;
    const __m256i low = _mm256_set1_epi8(15);
    const Lines<SEG, M> lines(w, act, [&](int m) { return rows[m]; });
    vf acc[M][H], sw[H], off[H];
#pragma GCC unroll 2
    for (int h = 0; h < H; h++) {
        sw[h] = off[h] = zero();
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) acc[m][h] = zero();
    }
    int64_t left = 0, group = nb * w.groups;
    for (int64_t s = 0; s < w.padded / SEG; s++) {
        if (left == 0) {
            left = SEG == 32 ? w.blocks : 1;
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                const int64_t at = group * LANES + first + h * 8;
                sw[h] = weight_scale(w.scale, w.wide, at);
                if (w.offset_kind == BIAS) off[h] = weight_scale(w.offset, w.wide, at);
                else if (!CENTRED) off[h] = mul(sub(zero(), load((const uint8_t*)w.offset + at)), sw[h]);
            }
            group++;
        }
        left--;
        __m256i sums[SETS][M][H];
#pragma GCC unroll 2
        for (int i = 0; i < SETS; i++)
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int h = 0; h < H; h++) sums[i][m][h] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = 0; j < LINES; j++, code += 64) {
            if (first == 0) _mm_prefetch((const char*)code + AHEAD, _MM_HINT_T0);      // the other half reads the same lines
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                const __m256i line = _mm256_loadu_si256((const __m256i*)(code + 32 * h));
                const __m256i a = _mm256_and_si256(line, low), b = _mm256_and_si256(_mm256_srli_epi16(line, 4), low);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    const int64_t at = s * SEG + (BITS == 4 ? 8 : 4) * j;
                    add_products(sums[0][m][h], a, lines.word(m, at));
                    add_products(sums[SETS - 1][m][h], b, lines.word(m, BITS == 4 ? at + 4 : at));
                }
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                const __m256i all = BITS == 4 ? _mm256_madd_epi16(sums[0][m][h], _mm256_set1_epi16(1)) :
                    widened(sums[0][m][h], sums[SETS - 1][m][h]);
                acc[m][h] = lines.template join<BITS, CENTRED>(m, s, all, sw[h], off[h], acc[m][h]);
            }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) out(m, first + h * 8, acc[m][h]);
}

template <int BITS, int SEG, int M, bool CENTRED, class Store>
static inline void both_halves(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, Store&& out) {
    if (M <= 2) return halves<BITS, SEG, M, 2, CENTRED>(w, nb, act, rows, 0, out);
    halves<BITS, SEG, M, 1, CENTRED>(w, nb, act, rows, 0, out);    // 16 registers hold one half's sums of four rows
    halves<BITS, SEG, M, 1, CENTRED>(w, nb, act, rows, 8, out);
}

// One 16-row block of weights against M rows of activations; out(m, lane, vector) receives the products.
template <int BITS, int SEG, int M, class Store>
static inline void tile(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, Store&& out) {
    if (w.offset_kind == CENTER) both_halves<BITS, SEG, M, true>(w, nb, act, rows, out);
    else both_halves<BITS, SEG, M, false>(w, nb, act, rows, out);
}

// ------------------------------------------------------------------------------------------------ many rows
static inline int64_t panel_codes(const Linear& w) { return w.padded * LANES * (w.bits == 4 ? 1 : 2); }
static inline size_t panel_bytes(const Linear& w) { return static_cast<size_t>(panel_codes(w) + w.groups * LANES * 8); }

// [word of 4 columns][2][32]: the block's halves, in 8 bits for each half [word][low nibbles, high ones][32]; then for each
// group 16 scales and 16 offsets
template <int BITS> static inline void unpack(const Linear& w, int64_t nb, uint8_t* panel) {
    const __m256i low = _mm256_set1_epi8(15);
    const uint8_t* line = w.codes + nb * w.padded * LANES * BITS / 8;
    const auto keep = [&](int64_t vector, __m256i v) { _mm256_store_si256((__m256i*)(panel + vector * 32), v); };
    const int64_t block = w.padded * LANES * BITS / 8;
    for (int64_t j = 0; j < w.padded * BITS / 32; j++, line += 64) {
        _mm_prefetch((const char*)line + block, _MM_HINT_T1);       // the next block, while this one is multiplied
        for (int h = 0; h < 2; h++) {
            const __m256i part = _mm256_loadu_si256((const __m256i*)(line + 32 * h));
            keep(BITS == 4 ? 4 * j + h : h * w.padded / 2 + 2 * j, _mm256_and_si256(part, low));
            keep(BITS == 4 ? 4 * j + 2 + h : h * w.padded / 2 + 2 * j + 1, _mm256_and_si256(_mm256_srli_epi16(part, 4), low));
        }
    }
    float* numbers = (float*)(panel + panel_codes(w));
    for (int64_t g = nb * w.groups; g < (nb + 1) * w.groups; g++, numbers += 2 * LANES)
        for (int lane = 0; lane < LANES; lane += W) {
            const int64_t at = g * LANES + lane;
            const vf scale = weight_scale(w.scale, w.wide, at);
            store(numbers + lane, scale);
            if (w.offset_kind == BIAS) store(numbers + LANES + lane, weight_scale(w.offset, w.wide, at));
            if (w.offset_kind == ZERO) store(numbers + LANES + lane, mul(sub(zero(), load((const uint8_t*)w.offset + at)), scale));
        }
}

// sums in 16 bits of M rows from column `at` on, with two vectors of codes a word
template <int WORDS, int SEG, int M>
static inline void panel_sums(const uint8_t* codes, const Lines<SEG, M>& lines, int64_t at, __m256i (&sums)[M][2]) {
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < WORDS; j++) {
        const __m256i a = _mm256_load_si256((const __m256i*)(codes + 64 * j));
        const __m256i b = _mm256_load_si256((const __m256i*)(codes + 64 * j + 32));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const __m256i word = lines.word(m, at + 4 * j);
            add_products(sums[m][0], a, word);
            add_products(sums[m][1], b, word);
        }
    }
}

template <int BITS, int SEG, int M, bool CENTRED, class Store>
static inline void panel_tile(const Linear& w, const Act& a, int64_t first, const uint8_t* panel, Store&& out) {
    const Lines<SEG, M> lines(w, a, [&](int m) { return first + m; });
    const float* numbers = (const float*)(panel + panel_codes(w));
    alignas(32) float acc[M][LANES] = {};
    int64_t left = SEG == 32 ? w.blocks : 1;
    for (int64_t s = 0; s < w.padded / SEG; s++) {
        __m256i sums[M][2];
        const auto join = [&](int m, int h, __m256i all) __attribute__((always_inline)) {
            float* to = acc[m] + h * W;
            store(to, lines.template join<BITS, CENTRED>(m, s, all, load(numbers + h * W), load(numbers + LANES + h * W), load(to)));
        };
        for (int part = 0; part < (BITS == 4 ? 1 : 2); part++) {
            panel_sums<SEG / 4>(panel + part * w.padded * 16 + s * SEG * 16, lines, s * SEG, sums);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
                if (BITS == 8) join(m, part, widened(sums[m][0], sums[m][1]));
                else
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) join(m, h, _mm256_madd_epi16(sums[m][h], _mm256_set1_epi16(1)));
        }
        if (--left == 0) { left = SEG == 32 ? w.blocks : 1; numbers += 2 * LANES; }
    }
    for (int m = 0; m < M; m++) for (int lane = 0; lane < LANES; lane += W) out(first + m, lane, load(acc[m] + lane));
}

// Rows [from, to) as far as they fill tiles; returns the first that is left. out(row, lane, vector) receives the products.
template <int BITS, int SEG, class Store>
static inline int64_t panel_rows(const Linear& w, int64_t nb, const Act& a, int64_t from, int64_t to, uint8_t* panel, Store&& out) {
    unpack<BITS>(w, nb, panel);
    for (; from + PANEL_HEIGHT <= to; from += PANEL_HEIGHT)
        if (w.offset_kind == CENTER) panel_tile<BITS, SEG, PANEL_HEIGHT, true>(w, a, from, panel, out);
        else panel_tile<BITS, SEG, PANEL_HEIGHT, false>(w, a, from, panel, out);
    return from;
}

}  // namespace GAINZ_NS
