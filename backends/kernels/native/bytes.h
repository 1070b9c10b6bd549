// Keys in 8 bits against queries in 8 bits: exact integer dot products of a page's 16 tokens, by whatever instruction there is.
// A page is first put in order (`byte_columns`), which many queries share. Integers have one sum in any order, so nothing here
// can make a row depend on its company.
#pragma once

namespace GAINZ_NS {

constexpr int64_t BYTES = 64;       // widths are padded to it; codes of the padding are zeros on the query's side

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
// [16][width] → [padded / 4][16 tokens][4 bytes], `stride` bytes from one four columns to the next
static inline const uint8_t* byte_columns(const uint8_t* page, int64_t width, int64_t padded, uint8_t* out, int64_t stride = 64) {
    for (int64_t c = 0; c < padded; c += BYTES) {
        __m512 r[16];
        if (c + BYTES <= width) transpose_block((const float*)(page + c), width / 4, r);
        else {
            uint8_t copy[16 * BYTES];
            for (int t = 0; t < 16; t++)
                _mm512_storeu_si512(copy + t * BYTES, _mm512_maskz_loadu_epi8((1ull << (width - c)) - 1, page + t * width + c));
            transpose_block((const float*)copy, BYTES / 4, r);
        }
        for (int i = 0; i < 16; i++) _mm512_storeu_ps((float*)(out + (c / 4 + i) * stride), r[i]);
    }
    return out;
}

static inline void byte_dots(const uint8_t* columns, int64_t padded, const int8_t* q, float* out) {
    __m512i s[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    const int32_t* words = (const int32_t*)q;
    for (int64_t d = 0; d < padded / 4; d += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            s[j] = _mm512_dpbusd_epi32(s[j], _mm512_loadu_si512(columns + (d + j) * 64), _mm512_set1_epi32(words[d + j]));
    const __m512i all = _mm512_add_epi32(_mm512_add_epi32(s[0], s[1]), _mm512_add_epi32(s[2], s[3]));
    _mm512_storeu_ps(out, _mm512_cvtepi32_ps(all));
}

#else
// [16][width] → [16][padded], zeros between: the page itself where that is the same
static inline const uint8_t* byte_columns(const uint8_t* page, int64_t width, int64_t padded, uint8_t* out) {
    if (padded == width) return page;
    for (int64_t t = 0; t < 16; t++) {
        __builtin_memcpy(out + t * padded, page + t * width, static_cast<size_t>(width));
        __builtin_memset(out + t * padded + width, 0, static_cast<size_t>(padded - width));
    }
    return out;
}

#if defined(__AVX2__)
// eight tokens at once, in 16 bits: a sum of two products would not fit 8 × 8
static inline void byte_dots(const uint8_t* page, int64_t padded, const int8_t* q, float* out) {
    for (int first = 0; first < 16; first += 8) {
        __m256i s[8];
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) s[t] = _mm256_setzero_si256();
        for (int64_t d = 0; d < padded; d += 16) {
            const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(q + d)));
#pragma GCC unroll 8
            for (int t = 0; t < 8; t++)
                s[t] = _mm256_add_epi32(s[t], _mm256_madd_epi16(
                    _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(page + (first + t) * padded + d))), x));
        }
        const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
        const __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(s[4], s[5]), _mm256_hadd_epi32(s[6], s[7]));
        store(out + first, _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                                               _mm256_permute2x128_si256(low, high, 0x31))));
    }
}
#elif defined(__ARM_FEATURE_DOTPROD)
static inline int32_t byte_dot(const uint8_t* k, const int8_t* q, int64_t padded) {
    int32x4_t s = vdupq_n_s32(0), sum = s;                     // k = (k - 128) + 128
    const int8x16_t ones = vdupq_n_s8(1);
    for (int64_t d = 0; d < padded; d += 16) {
        const int8x16_t b = vld1q_s8(q + d);
        s = vdotq_s32(s, vreinterpretq_s8_u8(veorq_u8(vld1q_u8(k + d), vdupq_n_u8(128))), b);
        sum = vdotq_s32(sum, ones, b);
    }
    return vaddvq_s32(s) + 128 * vaddvq_s32(sum);
}
#else
static inline int32_t byte_dot(const uint8_t* k, const int8_t* q, int64_t padded) {
    int32_t lanes[16] = {};
    for (int64_t d = 0; d < padded; d += 16)
        for (int j = 0; j < 16; j++) lanes[j] += static_cast<int32_t>(k[d + j]) * q[d + j];
    int32_t all = 0;
    for (int j = 0; j < 16; j++) all += lanes[j];
    return all;
}
#endif

#if !defined(__AVX2__)
static inline void byte_dots(const uint8_t* page, int64_t padded, const int8_t* q, float* out) {
    for (int t = 0; t < 16; t++) out[t] = static_cast<float>(byte_dot(page + t * padded, q, padded));
}
#endif
#endif

// x [width] → codes [padded], scale = max|x| / 127 and scale * the codes' sum, which a key's lowest value multiplies
static inline void byte_query(const float* x, int64_t width, int64_t padded, int8_t* q, float* scale, float* sum_of) {
    vf most_value = zero(), any = zero();
    for (int64_t i = 0; i < width; i += W) {
        const vf v = load_n(x + i, static_cast<int>(least(W, width - i)));
        most_value = max(most_value, max(v, sub(zero(), v)));
        any = add(any, v);
    }
    const float largest_value = largest(most_value), inverse = largest_value > 1e-30f ? 127.f / largest_value : 0.f;
    int32_t all = 0;
    for (int64_t i = 0; i < padded; i++) {
        const float code = i < width ? __builtin_rintf(x[i] * inverse) : 0.f;
        q[i] = static_cast<int8_t>(code < -127.f ? -127.f : code < 127.f ? code : 127.f);
        all += q[i];
    }
    *scale = largest_value / 127.f + 0.f * sum(any);           // a NaN or an infinity stays one
    *sum_of = *scale * static_cast<float>(all);
}

}  // namespace GAINZ_NS
