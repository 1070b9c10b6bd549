// What attention in bfloat16 (paired.h) asks of a processor beside the vectors of simd_avx512.h: pairs of bfloat16, masked
// lanes, powers of two, and dot products of four bytes.
#pragma once
#include <type_traits>
#include "simd_avx512.h"

namespace GAINZ_NS {

template <int N> using Count = std::integral_constant<int, N>;
constexpr float LOG2E = 1.44269504088896341f;

// ------------------------------------------------------------------------------------------------ pairs of bfloat16
static inline pair round_pair(vf a, vf b) { return (pair)_mm512_cvtne2ps_pbh(b, a); }      // a's 16 numbers, then b's
static inline void store_pair(int32_t* p, pair v) { _mm512_storeu_si512(p, (__m512i)v); }

// 16 rows of 32 numbers at `width` → r[i] holds the numbers 2i, 2i + 1 of every row
static inline void pair_columns(const bfloat* rows, int64_t width, vf* r) {
    transpose_block((const float*)rows, width / 2, r);
}
static inline void pair_columns(const half* rows, int64_t width, vf* r) {
    alignas(64) int32_t rounded[16 * 16];
    for (int i = 0; i < 16; i++)
        store_pair(rounded + i * 16, round_pair(load(rows + i * width), load(rows + i * width + 16)));
    transpose_block((const float*)rounded, 16, r);
}

// 16 numbers of one row and 16 of the next → 16 pairs of one number each
static inline pair woven(__m512i two) {
    alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (pair)_mm512_permutexvar_epi16(_mm512_load_si512(order), two);
}
static inline pair value_pair(const bfloat* even, const bfloat* odd) {
    return woven(_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)even)),
                                    _mm256_loadu_si256((const __m256i*)odd), 1));
}
static inline pair value_pair(const half* even, const half* odd) {
    return woven((__m512i)round_pair(load(even), load(odd)));
}
static inline pair value_pair(const uint8_t* even, const uint8_t* odd) {                   // code - 128, which is exact
    const vf middle = set1(128.f);
    return woven((__m512i)round_pair(sub(load(even), middle), sub(load(odd), middle)));
}

// ------------------------------------------------------------------------------------------------ lanes
typedef __mmask16 lanes;
static inline lanes between(int64_t lo, int64_t hi) {          // lo … hi - 1, as far as there are such lanes
    const uint32_t below = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1, under = lo >= 16 ? 0xffffu :
        lo <= 0 ? 0u : (1u << lo) - 1;
    return static_cast<lanes>(below & ~under);
}
static inline vf only(lanes l, vf v) { return _mm512_maskz_mov_ps(l, v); }
static inline vf load_only(lanes l, const float* p) { return _mm512_maskz_loadu_ps(l, p); }
static inline vf max_of(lanes l, vf m, vf v) { return _mm512_mask_max_ps(m, l, m, v); }

// 2^x to 3e-6, x ≤ 127: 2^(x - floor x) by a polynomial that is 1 at 0, then the exponent
static inline vf power2(vf x) {
    const vf r = _mm512_reduce_ps(x, 9);
    vf p = set1(0.013426688499748707f);
    p = fma(p, r, set1(0.0522424653172493f));
    p = fma(p, r, set1(0.2412802129983902f));
    p = fma(p, r, set1(0.6930448412895203f));
    return scale2(fma(p, r, set1(1.f)), x);
}

// ------------------------------------------------------------------------------------------------ bytes
typedef __m512i byte_sum;
static inline byte_sum no_bytes() { return _mm512_setzero_si512(); }
static inline byte_sum load_bytes(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline byte_sum set1_bytes(int32_t x) { return _mm512_set1_epi32(x); }
static inline byte_sum dot_bytes(byte_sum u, byte_sum s, byte_sum c) { return _mm512_dpbusd_epi32(c, u, s); }
static inline vf floats(byte_sum s) { return _mm512_cvtepi32_ps(s); }

}  // namespace GAINZ_NS
