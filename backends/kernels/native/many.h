// Products of quantized matrices with many rows: rows are laid out eight at a time, in the order in which a tile reads them,
// so that one pointer runs through codes, scales and sums. The sums are those of `tile` in the same order: the same bits.
#pragma once

namespace GAINZ_NS {

constexpr int64_t MANY = 17;                // rows from which laying them out pays
constexpr int64_t MANY_BAND = 8;            // tiles of a task: some 50 KB for 576 columns

// a segment of a tile: SEG / 4 words of codes for each of 8 rows, then their scales, their sums and what a centred code owes
template <int SEG> constexpr int64_t segment_words() { return SEG / 4 * 8 + 24; }

template <int SEG> static inline void lay_out(const Linear& w, const Act& a, int64_t first, int32_t* to) {
    const int64_t blocks = w.padded / BLOCK, per = BLOCK / SEG;
    for (int64_t s = 0; s < w.padded / SEG; s++, to += segment_words<SEG>()) {
        const int8_t* x[8];
        float* numbers = (float*)(to + SEG / 4 * 8);
        for (int64_t m = 0; m < 8; m++) {
            const int64_t row = first + m;
            x[m] = a.q + row * w.padded + s * SEG;
            numbers[m] = a.scale[row * blocks + s / per];
            numbers[8 + m] = SEG == 32 ? a.sum32[row * blocks + s] : a.sum16[row * blocks * 2 + s];
            to[SEG / 4 * 8 + 16 + m] = SEG == 32 ? a.minus8[row * blocks + s] : a.minus8_16[row * blocks * 2 + s];
        }
        for (int part = 0; part < SEG / 16; part++) words_by_row(x, part * 16, to + part * 32);
    }
}

template <int BITS, int SEG, bool CENTRED>
static inline void many_tile(const Linear& w, int64_t nb, const int32_t* x, vf (&acc)[8]) {
    constexpr int LINES = SEG / (BITS == 4 ? 8 : 4), NUMBERS = SEG / 4 * 8;
    const uint8_t* code = w.codes + nb * w.padded * LANES * BITS / 8;
    const __m512i low = _mm512_set1_epi8(15);
    for (int m = 0; m < 8; m++) acc[m] = zero();
    vf sw = zero(), off = zero();
    int64_t left = 0, group = nb * w.groups;
    for (int64_t s = 0; s < w.padded / SEG; s++, x += segment_words<SEG>()) {
        if (left == 0) {
            left = SEG == 32 ? w.blocks : 1;
            sw = weight_scale(w.scale, w.wide, group);
            if (!CENTRED) off = w.offset_kind == BIAS ? weight_scale(w.offset, w.wide, group) :
                mul(sub(zero(), load((const uint8_t*)w.offset + group * LANES)), sw);
            group++;
        }
        left--;
        __m512i sum_of[8];
#pragma GCC unroll 8
        for (int m = 0; m < 8; m++)
            sum_of[m] = !CENTRED ? _mm512_setzero_si512() : BITS == 4 ? _mm512_set1_epi32(x[NUMBERS + 16 + m]) :
                _mm512_slli_epi32(_mm512_set1_epi32(x[NUMBERS + 16 + m]), 4);
#pragma GCC unroll 8
        for (int j = 0; j < LINES; j++, code += 64) {
            const __m512i line = _mm512_loadu_si512(code);
            if (BITS == 4) {
                const __m512i lo = _mm512_and_si512(line, low), hi = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
#pragma GCC unroll 8
                for (int m = 0; m < 8; m++)
                    sum_of[m] = _mm512_dpbusd_epi32(sum_of[m], lo, _mm512_set1_epi32(x[2 * j * 8 + m]));
#pragma GCC unroll 8
                for (int m = 0; m < 8; m++)
                    sum_of[m] = _mm512_dpbusd_epi32(sum_of[m], hi, _mm512_set1_epi32(x[(2 * j + 1) * 8 + m]));
            } else {
#pragma GCC unroll 8
                for (int m = 0; m < 8; m++)
                    sum_of[m] = _mm512_dpbusd_epi32(sum_of[m], line, _mm512_set1_epi32(x[j * 8 + m]));
            }
        }
        const float* numbers = (const float*)(x + NUMBERS);
#pragma GCC unroll 8
        for (int m = 0; m < 8; m++) {
            acc[m] = fma(_mm512_cvtepi32_ps(sum_of[m]), mul(sw, set1(numbers[m])), acc[m]);
            if (!CENTRED) acc[m] = fma(off, set1(numbers[8 + m]), acc[m]);
        }
    }
}

// tiles [from, to), and the rows from there to `rows` that fill none, against blocks [nb, nb_end)
template <int BITS, int SEG, bool CENTRED>
static void many_blocks(const Linear& w, int64_t nb, int64_t nb_end, const Act& a, const int32_t* laid, int64_t from,
                        int64_t to, int64_t rows, const Target& t) {
    const int64_t size = w.padded / SEG * segment_words<SEG>();
    for (; nb < nb_end; nb++) {
        for (int64_t i = from; i < to; i++) {
            vf acc[8];
            many_tile<BITS, SEG, CENTRED>(w, nb, laid + i * size, acc);
            for (int64_t m = 0; m < 8; m++) put(t, i * 8 + m, nb * LANES, acc[m]);
        }
        block_rows<BITS, SEG>(w, nb, a, to * 8, rows, t, nullptr);
    }
}

template <int BITS, int SEG>
static void many_rows(Context& c, const Act& a, const Linear& w, int64_t rows, const Target& t) {
    const int64_t tiles = rows / 8, size = w.padded / SEG * segment_words<SEG>();
    int32_t* laid = (int32_t*)c.shared.need(static_cast<size_t>(tiles * size) * 4 + 64);
    auto lay = [&](int64_t i, int) { lay_out<SEG>(w, a, i * 8, laid + i * size); };
    parallel(*c.pool, tiles, lay);
    const int64_t blocks = ceil_div(w.n, LANES), bands = ceil_div(tiles, MANY_BAND);
    // tasks of some 10^7 multiply-adds: a borrowed core holds nobody up, and taking one costs nothing beside it
    const int64_t each = most(1, least(ceil_div(blocks, 2 * c.threads), (10 << 20) / (MANY_BAND * 8 * LANES * w.padded)));
    auto job = [&](int64_t index, int) {
        const int64_t nb = index / bands * each, from = index % bands * MANY_BAND, to = least(tiles, from + MANY_BAND);
        const int64_t end = least(blocks, nb + each), rest = to == tiles ? rows : to * 8;
        if (w.offset_kind == CENTER) many_blocks<BITS, SEG, true>(w, nb, end, a, laid, from, to, rest, t);
        else many_blocks<BITS, SEG, false>(w, nb, end, a, laid, from, to, rest, t);
    };
    parallel(*c.pool, ceil_div(blocks, each) * bands, job);
}

static void many(Context& c, const Act& a, const Linear& w, int64_t rows, const Target& t) {
    if (w.bits == 4) w.segment == 32 ? many_rows<4, 32>(c, a, w, rows, t) : many_rows<4, 16>(c, a, w, rows, t);
    else w.segment == 32 ? many_rows<8, 32>(c, a, w, rows, t) : many_rows<8, 16>(c, a, w, rows, t);
}

}  // namespace GAINZ_NS
