// Quantized matrices against rows in float32, for whoever switches 8-bit activations off: codes become floats on the way.
// One sum for each segment of columns, then one multiply-add with its scale, in the order of the columns, whatever the tile.
#pragma once

namespace GAINZ_NS {

// W codes of one column, rows `lane` … of a block: bits shift … of the words of a line
#if defined(__AVX512F__) && defined(__AVX512BW__)
static inline vf column_codes(const uint8_t* line, int shift, int mask) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(line), _mm_cvtsi32_si128(shift)),
                                               _mm512_set1_epi32(mask)));
}
#elif defined(__AVX2__)
static inline vf column_codes(const uint8_t* line, int shift, int mask) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)line),
                                                                _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(mask)));
}
#else
static inline vf column_codes(const uint8_t* line, int shift, int mask) {
    float lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = static_cast<float>(line[4 * i + shift / 8] >> shift % 8 & mask);
    return load(lanes);
}
#endif

static inline vf group_values(const void* values, int64_t wide, int64_t at) {
    return wide ? load((const float*)values + at) : load((const half*)values + at);
}

template <int BITS, int M>
static void wide_tile(const Linear& w, int64_t nb, const Act& a, int64_t first, int64_t count, const Target& t) {
    constexpr int PER = BITS == 4 ? 8 : 4;                     // columns of a line
    const float* x[M];
    for (int m = 0; m < M; m++) x[m] = a.rows + least(first + m, first + count - 1) * a.k;
    for (int lane = 0; lane < LANES; lane += W) {
        const uint8_t* line = w.codes + nb * w.padded * LANES * BITS / 8 + lane * 4;
        vf acc[M];
        for (int m = 0; m < M; m++) acc[m] = zero();
        for (int64_t s = 0; s < w.padded / w.segment; s++) {
            const int64_t at = (nb * w.groups + (w.segment == 16 ? s : s / w.blocks)) * LANES + lane;
            const vf scale = group_values(w.scale, w.wide, at);
            const vf zero_point = w.offset_kind == ZERO ? load((const uint8_t*)w.offset + at) :
                set1(w.offset_kind == BIAS ? 0.f : BITS == 4 ? 8.f : 128.f);
            vf part[M];
            float all[M];
            for (int m = 0; m < M; m++) { part[m] = zero(); all[m] = 0.f; }
            for (int64_t k = s * w.segment; k < (s + 1) * w.segment; k += PER, line += 64)
                for (int c = 0; c < PER; c++) {
                    const vf code = sub(column_codes(line, BITS == 4 ? c % 4 * 8 + c / 4 * 4 : c * 8, BITS == 4 ? 15 : 255),
                                        zero_point);
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) {
                        const float y = k + c < a.k ? x[m][k + c] : 0.f;
                        part[m] = fma(code, set1(y), part[m]);
                        all[m] += y;
                    }
                }
            for (int m = 0; m < M; m++) acc[m] = fma(part[m], scale, acc[m]);
            if (w.offset_kind != BIAS) continue;
            const vf offset = group_values(w.offset, w.wide, at);
            for (int m = 0; m < M; m++) acc[m] = fma(offset, set1(all[m]), acc[m]);
        }
        for (int m = 0; m < M && m < count; m++) put(t, first + m, nb * LANES + lane, acc[m]);
    }
}

template <int BITS> static void wide_rows(const Linear& w, int64_t nb, const Act& a, int64_t rows, const Target& t) {
    for (int64_t r = 0; r < rows; r += 4) {
        const int64_t n = least(4, rows - r);
        if (n == 1) wide_tile<BITS, 1>(w, nb, a, r, n, t);
        else if (n == 2) wide_tile<BITS, 2>(w, nb, a, r, n, t);
        else wide_tile<BITS, 4>(w, nb, a, r, n, t);
    }
}

static void wide(Context& c, const Act& act, const Linear& w, int64_t rows, const Target& t) {
    const Act a = w.gather ? gathered(c, act, w, rows) : act;
    const int64_t blocks = ceil_div(w.n, LANES), each = most(1, blocks / (c.pool->threads() * 6));
    auto job = [&](int64_t chunk, int) {
        for (int64_t nb = chunk * each; nb < least(blocks, (chunk + 1) * each); nb++)
            w.bits == 4 ? wide_rows<4>(w, nb, a, rows, t) : wide_rows<8>(w, nb, a, rows, t);
    };
    parallel(*c.pool, ceil_div(blocks, each), job);
}

}  // namespace GAINZ_NS
