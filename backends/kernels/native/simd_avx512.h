// Vectors of 16 floats and the 4/8-bit dot product on AVX-512 VNNI. Everything here is inlined into one file's namespace.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include "abi.h"

namespace GAINZ_NS {
using namespace gainz;

constexpr int W = 16;
typedef __m512 vf;
static inline __mmask16 head(int n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline vf set1(float x) { return _mm512_set1_ps(x); }
static inline vf zero() { return _mm512_setzero_ps(); }
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(head(n), p); }
static inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
static inline void store_n(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, head(n), v); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf round(vf a) { return _mm512_roundscale_ps(a, 8); }
static inline float sum(vf v) { return _mm512_reduce_add_ps(v); }
static inline float largest(vf v) { return _mm512_reduce_max_ps(v); }
static inline vf scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }      // a * 2^n

static inline vf load(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline vf load_n(const uint8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(head(n), p)));
}
struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };
static inline vf load(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf load_n(const half* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(head(n), p)); }
static inline vf widen(__m256i b) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)); }
static inline vf load(const bfloat* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf load_n(const bfloat* p, int n) { return widen(_mm256_maskz_loadu_epi16(head(n), p)); }
static inline void store_n(half* p, vf v, int n) {
    _mm256_mask_storeu_epi16(p, head(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// words that hold two bfloat16 each → the first and the second of every one
static inline vf lower(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
static inline vf upper(const uint32_t* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#if defined(GAINZ_PAIRED_DOT)
// Two products of bfloat16 added to a float, the second of a pair first; denormals count as zeros there.
typedef __m512bh pair;
static inline pair load_pair(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline pair set1_pair(int32_t x) { return (__m512bh)_mm512_set1_epi32(x); }
static inline vf dot_pair(pair a, pair b, vf c) { return _mm512_dpbf16_ps(c, a, b); }
static inline void round_pairs(const float* x, int64_t k, int32_t* out) {
    for (int64_t i = 0; i < k; i += 32) {
        const int n = static_cast<int>(least(32, k - i));
        const vf a = load_n(x + i, n < 16 ? n : 16), b = n > 16 ? load_n(x + i + 16, n - 16) : zero();
        _mm512_mask_storeu_epi32(out + i / 2, head((n + 1) / 2), (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}
#endif

static inline vf weight_scale(const void* scale, int64_t wide, int64_t index) {
    return wide ? load((const float*)scale + index * LANES) : load((const half*)scale + index * LANES);
}

// 32 floats → codes, scale = max|x| / 127, sums. The maximum is taken on the bits, so that a NaN stays one.
static inline void quantize32(const float* x, int8_t* q, float* scale, int32_t* sums) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i top = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                         _mm512_and_si512(_mm512_castps_si512(b), magnitude));
    const int bits = _mm512_reduce_max_epi32(top);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    *scale = largest / 127.f;
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 127.f / largest : 0.f);
    const __m512i ia = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), ib = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    const __m128i qa = _mm512_cvtepi32_epi8(ia), qb = _mm512_cvtepi32_epi8(ib), ones = _mm_set1_epi8(1), none = _mm_setzero_si128();
    _mm_storeu_si128((__m128i*)q, qa);
    _mm_storeu_si128((__m128i*)(q + 16), qb);
    const __m128i both = _mm_hadd_epi32(_mm_dpbusd_epi32(none, ones, qa), _mm_dpbusd_epi32(none, ones, qb));
    _mm_storel_epi64((__m128i*)sums, _mm_hadd_epi32(both, both));
}

// 16 rows of 16 words at `stride` (in words) → r[i] holds word i of every row
static inline void transpose_block(const float* rows, int64_t stride, __m512* r) {
    __m512 t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(rows + i * stride);
    for (int i = 0; i < 16; i += 2) { t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
                                     t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]); }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88); t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88); t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12],
            0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88); r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88); r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12],
            0xdd);
    }
}

// rows[t][i], 16 rows of `width` floats at `stride` → columns[i][t]
static inline void transpose16(const float* rows, int64_t stride, int64_t width, float* columns) {
    for (int64_t c = 0; c < width; c += 16) {
        __m512 r[16];
        transpose_block(rows + c, stride, r);
        for (int i = 0; i < 16; i++) _mm512_storeu_ps(columns + (c + i) * 16, r[i]);
    }
}

// A page of narrow numbers → columns, turned as 32-bit words and widened afterwards; false: not of a width that fits.
static inline bool narrow_columns(const float* page, int64_t width, float* columns) {
    if (width % 16) return false;
    transpose16(page, width, width, columns);
    return true;
}

static inline bool narrow_columns(const half* page, int64_t width, float* columns) {
    if (width % 32) return false;
    alignas(64) static const uint16_t apart[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                   1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i order = _mm512_load_si512(apart);
    for (int64_t c = 0; c < width; c += 32) {
        __m512 r[16];
        transpose_block((const float*)(page + c), width / 2, r);
        for (int i = 0; i < 16; i++) {
            const __m512i v = _mm512_permutexvar_epi16(order, _mm512_castps_si512(r[i]));
            _mm512_storeu_ps(columns + (c + 2 * i) * 16, _mm512_cvtph_ps(_mm512_castsi512_si256(v)));
            _mm512_storeu_ps(columns + (c + 2 * i + 1) * 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1)));
        }
    }
    return true;
}

static inline bool narrow_columns(const bfloat* page, int64_t width, float* columns) {
    if (width % 32) return false;
    for (int64_t c = 0; c < width; c += 32) {
        __m512 r[16];
        transpose_block((const float*)(page + c), width / 2, r);
        for (int i = 0; i < 16; i++) {
            const __m512i v = _mm512_castps_si512(r[i]);
            _mm512_storeu_si512(columns + (c + 2 * i) * 16, _mm512_slli_epi32(v, 16));
            _mm512_storeu_si512(columns + (c + 2 * i + 1) * 16, _mm512_and_si512(v,
                _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        }
    }
    return true;
}

// 16 bytes from each of 8 rows, `at` bytes in → words [4][8]: the first four bytes of every row, then the next four …
static inline void words_by_row(const int8_t* const* rows, int64_t at, int32_t* out) {
    __m128i r[8];
    for (int m = 0; m < 8; m++) r[m] = _mm_loadu_si128((const __m128i*)(rows[m] + at));
    for (int m = 0; m < 8; m += 4) {
        const __m128i a = _mm_unpacklo_epi32(r[m], r[m + 1]), b = _mm_unpacklo_epi32(r[m + 2], r[m + 3]);
        const __m128i c = _mm_unpackhi_epi32(r[m], r[m + 1]), d = _mm_unpackhi_epi32(r[m + 2], r[m + 3]);
        _mm_storeu_si128((__m128i*)(out + m), _mm_unpacklo_epi64(a, b));
        _mm_storeu_si128((__m128i*)(out + 8 + m), _mm_unpackhi_epi64(a, b));
        _mm_storeu_si128((__m128i*)(out + 16 + m), _mm_unpacklo_epi64(c, d));
        _mm_storeu_si128((__m128i*)(out + 24 + m), _mm_unpackhi_epi64(c, d));
    }
}

// One 16-row block of weights against M rows of activations; store(m, vector) receives the products.
template <int BITS, int SEG, int M, class Store>
static inline void tile(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, Store&& out) {
    constexpr int LINES = SEG / (BITS == 4 ? 8 : 4);               // 64-byte lines in a segment
    const int64_t segments = w.padded / SEG, blocks = w.padded / BLOCK;
    const uint8_t* code = w.codes + nb * w.padded * LANES * BITS / 8;
    const __m512i low = _mm512_set1_epi8(15);
    const float *sx[M], *xs[M];
    const int32_t *debt[M], *x[M];
    vf acc[M];
    for (int m = 0; m < M; m++) {
        const int64_t r = rows[m];
        x[m] = (const int32_t*)(act.q + r * w.padded);
        sx[m] = act.scale + r * blocks;
        xs[m] = SEG == 32 ? act.sum32 + r * blocks : act.sum16 + r * blocks * 2;
        debt[m] = SEG == 32 ? act.minus8 + r * blocks : act.minus8_16 + r * blocks * 2;
        acc[m] = zero();
    }
    const bool centred = w.offset_kind == CENTER;
    vf sw = zero(), off = zero();
    int64_t left = 0, group = nb * w.groups;
    for (int64_t s = 0; s < segments; s++) {
        if (left == 0) {
            left = SEG == 32 ? w.blocks : 1;
            sw = weight_scale(w.scale, w.wide, group);
            if (w.offset_kind == BIAS) off = weight_scale(w.offset, w.wide, group);
            else if (!centred) off = mul(sub(zero(), load((const uint8_t*)w.offset + group * LANES)), sw);
            group++;
        }
        left--;
        __m512i ia[M];
        for (int m = 0; m < M; m++)
            ia[m] = !centred ? _mm512_setzero_si512() : BITS == 4 ? _mm512_set1_epi32(debt[m][s]) :
                _mm512_slli_epi32(_mm512_set1_epi32(debt[m][s]), 4);
        _mm_prefetch((const char*)code + 3072, _MM_HINT_T0);
        if (LINES > 1) _mm_prefetch((const char*)code + 3072 + 64, _MM_HINT_T0);
        if (LINES > 2) _mm_prefetch((const char*)code + 3072 + 128, _MM_HINT_T0);
        if (LINES > 3) _mm_prefetch((const char*)code + 3072 + 192, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int j = 0; j < LINES; j++, code += 64) {
            const __m512i line = _mm512_loadu_si512(code);
            if (BITS == 4) {
                const __m512i lo = _mm512_and_si512(line, low), hi = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) ia[m] = _mm512_dpbusd_epi32(ia[m], lo,
                    _mm512_set1_epi32(x[m][s * (SEG / 4) + 2 * j]));
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) ia[m] = _mm512_dpbusd_epi32(ia[m], hi,
                    _mm512_set1_epi32(x[m][s * (SEG / 4) + 2 * j + 1]));
            } else {
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) ia[m] = _mm512_dpbusd_epi32(ia[m], line,
                    _mm512_set1_epi32(x[m][s * (SEG / 4) + j]));
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const vf both = mul(sw, set1(sx[m][SEG == 32 ? s : s / 2]));
            acc[m] = fma(_mm512_cvtepi32_ps(ia[m]), both, acc[m]);
            if (!centred) acc[m] = fma(off, set1(xs[m][s]), acc[m]);
        }
    }
    for (int m = 0; m < M; m++) out(m, 0, acc[m]);
}

}  // namespace GAINZ_NS
