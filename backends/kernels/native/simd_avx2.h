// Vectors of 8 floats and the 4/8-bit dot product on AVX2, with 256-bit VNNI where GAINZ_VNNI256 names its instruction.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include "abi.h"

namespace GAINZ_NS {
using namespace gainz;

constexpr int W = 8;
typedef __m256 vf;
struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };
constexpr int64_t AHEAD = 1024;         // bytes of codes that are fetched ahead of a product, line by line

static inline __m256i head(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf set1(float x) { return _mm256_set1_ps(x); }
static inline vf zero() { return _mm256_setzero_ps(); }
static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline vf load_n(const float* p, int n) { return _mm256_maskload_ps(p, head(n)); }
static inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
static inline void store_n(float* p, vf v, int n) { _mm256_maskstore_ps(p, head(n), v); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline float sum(vf v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float largest(vf v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline vf power(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n,
    _mm256_set1_epi32(127)), 23)); }
static inline vf scale2(vf a, vf n) {          // a * 2^n in two steps: 2^128 is no float
    const __m256i i = _mm256_cvtps_epi32(n), h = _mm256_srai_epi32(i, 1);
    return mul(mul(a, power(h)), power(_mm256_sub_epi32(i, h)));
}

static inline vf load(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf load(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline vf load(const bfloat* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
template <class T> static inline vf load_n(const T* p, int n) {
    T copy[W] = {};
    __builtin_memcpy(copy, p, static_cast<size_t>(n) * sizeof(T));
    return load(copy);
}
static inline void store_n(half* p, vf v, int n) {
    uint16_t copy[W];
    _mm_storeu_si128((__m128i*)copy, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    __builtin_memcpy(p, copy, static_cast<size_t>(n) * 2);
}
// words that hold two bfloat16 each → the first and the second of every one
static inline vf lower(const uint32_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
static inline vf upper(const uint32_t* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p),
                                                _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
static inline vf weight_scale(const void* scale, int64_t wide, int64_t index) {
    return wide ? load((const float*)scale + index) : load((const half*)scale + index);
}

static inline int32_t total(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// 32 floats → codes, scale = max|x| / 127, sums. The maximum is taken on the bits, so that a NaN stays one.
static inline void quantize32(const float* x, int8_t* q, float* scale, int32_t* sums) {
    vf v[4];
    __m256i top = _mm256_setzero_si256(), i[4];
    for (int k = 0; k < 4; k++) {
        v[k] = load(x + 8 * k);
        top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[k]), _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    const int bits = _mm_cvtsi128_si32(t);
    float most_value;
    __builtin_memcpy(&most_value, &bits, 4);
    *scale = most_value / 127.f;
    const vf inverse = set1(most_value > 1e-30f ? 127.f / most_value : 0.f);
    for (int k = 0; k < 4; k++) i[k] = _mm256_cvtps_epi32(mul(v[k], inverse));
    const __m256i a = _mm256_packs_epi32(i[0], i[1]), b = _mm256_packs_epi32(i[2], i[3]);
    _mm256_storeu_si256((__m256i*)q, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b),
                                                                 _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    sums[0] = total(_mm256_add_epi32(i[0], i[1]));
    sums[1] = total(_mm256_add_epi32(i[2], i[3]));
}

// rows[t][i], 16 rows of `width` floats at `stride` → columns[i][t]
static inline void transpose16(const float* rows, int64_t stride, int64_t width, float* columns) {
    for (int part = 0; part < 16; part += 8)
        for (int64_t c = 0; c < width; c += 8) {
            vf r[8], t[8];
            for (int i = 0; i < 8; i++) r[i] = load(rows + (part + i) * stride + c);
            for (int i = 0; i < 8; i += 2) { t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                                            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]); }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
                    r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
                }
            for (int i = 0; i < 4; i++) {
                store(columns + (c + i) * 16 + part, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
                store(columns + (c + i + 4) * 16 + part, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
            }
        }
}

template <class T> static inline bool narrow_columns(const T*, int64_t, float*) { return false; }

}  // namespace GAINZ_NS

#define GAINZ_DIRECT_KEYS
#if !defined(GAINZ_VNNI256)
#define GAINZ_PANELS
#include "nibbles.h"
#else

namespace GAINZ_NS {

// ------------------------------------------------------------------------------------------------ integer sums of 8 rows
struct Sum {
    __m256i v = _mm256_setzero_si256();
    void add(__m256i codes, int32_t x) { v = GAINZ_VNNI256(v, codes, _mm256_set1_epi32(x)); }
};

// H halves (8 rows each, from `first`) of a 16-row block against M rows of activations
template <int BITS, int SEG, int M, int H, class Store>
static inline void halves(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, int first, Store&& out) {
    constexpr int LINES = SEG / (BITS == 4 ? 8 : 4);
    const int64_t segments = w.padded / SEG, blocks = w.padded / BLOCK;
    const uint8_t* code = w.codes + nb * w.padded * LANES * BITS / 8 + first * 4;
    const __m256i low = _mm256_set1_epi8(15);
    const bool centred = w.offset_kind == CENTER;
    vf acc[M][H], sw[H], off[H];
    for (int h = 0; h < H; h++) { sw[h] = off[h] = zero(); for (int m = 0; m < M; m++) acc[m][h] = zero(); }
    int64_t left = 0, group = nb * w.groups;
    for (int64_t s = 0; s < segments; s++) {
        if (left == 0) {
            left = SEG == 32 ? w.blocks : 1;
            for (int h = 0; h < H; h++) {
                const int64_t at = group * LANES + first + h * 8;
                sw[h] = weight_scale(w.scale, w.wide, at);
                if (w.offset_kind == BIAS) off[h] = weight_scale(w.offset, w.wide, at);
                else if (!centred) off[h] = mul(sub(zero(), load((const uint8_t*)w.offset + at)), sw[h]);
            }
            group++;
        }
        left--;
        Sum total[M][H];
        for (int j = 0; j < LINES; j++, code += 64) {
            if (first == 0) _mm_prefetch((const char*)code + AHEAD, _MM_HINT_T0);
            for (int h = 0; h < H; h++) {
                const __m256i line = _mm256_loadu_si256((const __m256i*)(code + 32 * h));
                const __m256i lo = BITS == 4 ? _mm256_and_si256(line, low) : line;
                const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(line, 4), low);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    const int32_t* x = (const int32_t*)(act.q + rows[m] * w.padded + s * SEG) + (BITS == 4 ? 2 * j : j);
                    total[m][h].add(lo, x[0]);
                    if (BITS == 4) total[m][h].add(hi, x[1]);
                }
            }
        }
        for (int m = 0; m < M; m++) {
            const int64_t at = rows[m] * blocks + s * SEG / BLOCK, at_segment = rows[m] * segments + s;
            const int32_t owed = (SEG == 32 ? act.minus8 : act.minus8_16)[at_segment] * (BITS == 4 ? 1 : 16);
            const vf scale = set1(act.scale[at]), debt = set1((SEG == 32 ? act.sum32 : act.sum16)[at_segment]);
            for (int h = 0; h < H; h++) {
                __m256i i = total[m][h].v;
                if (centred) i = _mm256_add_epi32(i, _mm256_set1_epi32(owed));
                acc[m][h] = fma(_mm256_cvtepi32_ps(i), mul(sw[h], scale), acc[m][h]);
                if (!centred) acc[m][h] = fma(off[h], debt, acc[m][h]);
            }
        }
    }
    for (int m = 0; m < M; m++) for (int h = 0; h < H; h++) out(m, first + h * 8, acc[m][h]);
}

// One 16-row block of weights against M rows of activations; out(m, lane, vector) receives the products.
template <int BITS, int SEG, int M, class Store>
static inline void tile(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, Store&& out) {
    if (M <= 2) return halves<BITS, SEG, M, 2>(w, nb, act, rows, 0, out);
    halves<BITS, SEG, M, 1>(w, nb, act, rows, 0, out);        // 16 registers hold one half's sums of four rows
    halves<BITS, SEG, M, 1>(w, nb, act, rows, 8, out);
}

}  // namespace GAINZ_NS
#endif
