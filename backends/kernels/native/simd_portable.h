// The same vectors as plain arrays: any processor and compiler. Correct first; the compiler makes of it what it can.
#pragma once
#include <cstdint>
#include "abi.h"

namespace GAINZ_NS {
using namespace gainz;

constexpr int W = 8;
struct vf { float v[W]; };
struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };

#define GAINZ_LANES for (int i = 0; i < W; i++)
static inline vf set1(float x) { vf r; GAINZ_LANES r.v[i] = x; return r; }
static inline vf zero() { return set1(0.f); }
static inline vf load(const float* p) { vf r; GAINZ_LANES r.v[i] = p[i]; return r; }
static inline void store(float* p, vf a) { GAINZ_LANES p[i] = a.v[i]; }
static inline void store_n(float* p, vf a, int n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
static inline vf add(vf a, vf b) { GAINZ_LANES a.v[i] += b.v[i]; return a; }
static inline vf sub(vf a, vf b) { GAINZ_LANES a.v[i] -= b.v[i]; return a; }
static inline vf mul(vf a, vf b) { GAINZ_LANES a.v[i] *= b.v[i]; return a; }
static inline vf div(vf a, vf b) { GAINZ_LANES a.v[i] /= b.v[i]; return a; }
static inline vf fma(vf a, vf b, vf c) { GAINZ_LANES c.v[i] = a.v[i] * b.v[i] + c.v[i]; return c; }
static inline vf max(vf a, vf b) { GAINZ_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }     // NaN: the second
static inline vf min(vf a, vf b) { GAINZ_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline vf round(vf a) { GAINZ_LANES a.v[i] = __builtin_rintf(a.v[i]); return a; }
static inline float sum(vf a) { return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }
static inline float largest(vf a) { float m = a.v[0]; for (int i = 1; i < W; i++) m = m > a.v[i] ? m : a.v[i]; return m; }
static inline float power(int n) {
    const uint32_t u = static_cast<uint32_t>(n + 127) << 23;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
static inline vf scale2(vf a, vf n) {
    GAINZ_LANES { const int k = n.v[i] == n.v[i] ? static_cast<int>(n.v[i]) : 0;
                 a.v[i] = a.v[i] * power(k / 2) * power(k - k / 2); }
    return a;
}

static inline float number(half h) {           // by the exponent's place, subnormals through a product
    const uint32_t sign = (h.bits & 0x8000u) << 16, rest = (h.bits & 0x7fffu) << 13, top = 0x0f800000u;
    uint32_t u = rest >= top ? rest + 0x70000000u : rest;      // infinity and NaN keep their exponent
    float f;
    __builtin_memcpy(&f, &u, 4);
    if (rest < top) f *= 5.192296858534828e33f;                // 2^112
    __builtin_memcpy(&u, &f, 4);
    u |= sign;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
static inline float number(bfloat b) { const uint32_t u = static_cast<uint32_t>(b.bits) << 16; float f;
                                      __builtin_memcpy(&f, &u, 4); return f; }
static inline float number(uint8_t b) { return b; }
static inline float number(float f) { return f; }
template <class T> static inline vf load(const T* p) { vf r; GAINZ_LANES r.v[i] = number(p[i]); return r; }
template <class T> static inline vf load_n(const T* p, int n) { vf r; GAINZ_LANES r.v[i] = i < n ? number(p[i]) : 0.f;
                                                               return r; }

// words that hold two bfloat16 each → the first and the second of every one
static inline vf lower(const uint32_t* p) { vf r; GAINZ_LANES r.v[i] = number(bfloat{static_cast<uint16_t>(p[i])}); return r; }
static inline vf upper(const uint32_t* p) { vf r; GAINZ_LANES r.v[i] = number(bfloat{static_cast<uint16_t>(p[i] >> 16)});
                                            return r; }

static inline uint16_t to_half(float f) {      // to nearest, ties to even
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (u < 0x38800000u) {                     // subnormal: the sum with 0.5 rounds at the right bit
        float a;
        __builtin_memcpy(&a, &u, 4);
        a += 0.5f;
        __builtin_memcpy(&u, &a, 4);
        return static_cast<uint16_t>(sign | (u - 0x3f000000u));
    }
    u += 0xc8000000u + 0xfffu + (u >> 13 & 1);
    return static_cast<uint16_t>(sign | u >> 13);
}
static inline void store_n(half* p, vf a, int n) { for (int i = 0; i < n; i++) p[i].bits = to_half(a.v[i]); }

static inline void quantize32(const float* x, int8_t* q, float* scale, int32_t* sums) {
    uint32_t top = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t u;
        __builtin_memcpy(&u, x + i, 4);
        u &= 0x7fffffffu;
        top = top > u ? top : u;
    }
    float most_value;
    __builtin_memcpy(&most_value, &top, 4);
    *scale = most_value / 127.f;
    const float inverse = most_value > 1e-30f ? 127.f / most_value : 0.f;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) {
        const float y = __builtin_rintf(x[i] * inverse);
        q[i] = y == y ? static_cast<int8_t>(y) : 0;
        sums[i / 16] += q[i];
    }
}

static inline void transpose16(const float* rows, int64_t stride, int64_t width, float* columns) {
    for (int64_t c = 0; c < width; c++) for (int t = 0; t < 16; t++) columns[c * 16 + t] = rows[t * stride + c];
}

template <class T> static inline bool narrow_columns(const T*, int64_t, float*) { return false; }

template <int BITS, int SEG, int M, class Store>
static inline void tile(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, Store&& out) {
    constexpr int LINES = SEG / (BITS == 4 ? 8 : 4);
    const int64_t segments = w.padded / SEG, blocks = w.padded / BLOCK;
    const bool centred = w.offset_kind == CENTER;
    for (int m = 0; m < M; m++) {
        const uint8_t* code = w.codes + nb * w.padded * LANES * BITS / 8;
        float acc[LANES] = {};
        for (int64_t s = 0; s < segments; s++) {
            const int8_t* x = act.q + rows[m] * w.padded + s * SEG;
            int32_t total[LANES] = {};
            for (int j = 0; j < LINES; j++, code += 64)
                for (int lane = 0; lane < LANES; lane++) {
                    int32_t t = 0;
                    for (int k = 0; k < 4; k++) {
                        const uint8_t c = code[lane * 4 + k];
                        t += BITS == 4 ? (c & 15) * x[8 * j + k] + (c >> 4) * x[8 * j + 4 + k] : c * x[4 * j + k];
                    }
                    total[lane] += t;
                }
            const int64_t at = rows[m] * segments + s, group = (nb * w.groups + (SEG == 32 ? s / w.blocks : s)) * LANES;
            const int32_t owed = centred ? (SEG == 32 ? act.minus8 : act.minus8_16)[at] * (BITS == 4 ? 1 : 16) : 0;
            const float scale = act.scale[rows[m] * blocks + s * SEG / BLOCK], sum = (SEG == 32 ? act.sum32 : act.sum16)[at];
            for (int lane = 0; lane < LANES; lane++) {
                const float sw = w.wide ? ((const float*)w.scale)[group + lane] :
                    number(((const half*)w.scale)[group + lane]);
                acc[lane] += static_cast<float>(total[lane] + owed) * (sw * scale);
                if (w.offset_kind == BIAS)
                    acc[lane] += sum * (w.wide ? ((const float*)w.offset)[group + lane] :
                                        number(((const half*)w.offset)[group + lane]));
                else if (!centred) acc[lane] -= sum * (sw * ((const uint8_t*)w.offset)[group + lane]);
            }
        }
        for (int lane = 0; lane < LANES; lane += W) out(m, lane, load(acc + lane));
    }
}

}  // namespace GAINZ_NS
