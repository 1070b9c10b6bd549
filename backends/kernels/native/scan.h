// Looking through one row of logits: which tokens reach a level, and which of them have noise that reaches a bound.
// The noise is the engine's (SplitMix64's finalizer over place + (id + 1) · golden ratio, its upper 32 bits): integers, so that
// this finds exactly what a plain reading of the rule finds.
#pragma once

namespace GAINZ_NS {

static inline int64_t reaching(const float* x, int64_t n, float level, int32_t* ids) {
    int64_t found = 0, i = 0;
#if defined(__AVX512BW__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16) {
        const __mmask16 hit = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), _mm512_set1_ps(level), _CMP_GE_OQ);
        if (!hit) continue;
        _mm512_mask_compressstoreu_epi32(ids + found, hit, _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i))));
        found += __builtin_popcount(hit);
    }
#endif
    for (; i < n; i++) if (x[i] >= level) ids[found++] = static_cast<int32_t>(i);
    return found;
}

static inline uint32_t noise_bits(uint64_t place, uint64_t id) {
    uint64_t x = (id + 1) * 0x9E3779B97F4A7C15ull + place;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return static_cast<uint32_t>((x ^ x >> 31) >> 32);
}

// logits, n, level (a double), place, bound (-1: every one is taken, no noise), ids [n], noise [n], number found
static void scan(Context&, const int64_t* w) {
    const int64_t n = w[1], bound = w[4];
    int32_t* ids = ptr<int32_t>(w[5]);
    uint32_t* noise = ptr<uint32_t>(w[6]);
    int64_t found = reaching(ptr<const float>(w[0]), n, static_cast<float>(real(w[2])), ids), kept = 0;
    if (bound >= 0) {
        const uint64_t place = static_cast<uint64_t>(w[3]);
        for (int64_t i = 0; i < found; i++) noise[i] = noise_bits(place, static_cast<uint64_t>(ids[i]));
        for (int64_t i = 0; i < found; i++) {
            ids[kept] = ids[i];
            noise[kept] = noise[i];
            kept += noise[i] >= static_cast<uint64_t>(bound);
        }
        found = kept;
    }
    *ptr<int64_t>(w[7]) = found;
}

}  // namespace GAINZ_NS
