// Vectors of 4 floats and the 4/8-bit dot product on AArch64 with the dot-product extension.
#pragma once
#include <arm_neon.h>
#include <cstdint>
#include "abi.h"

namespace GAINZ_NS {
using namespace gainz;

constexpr int W = 4;
typedef float32x4_t vf;
struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };

static inline vf set1(float x) { return vdupq_n_f32(x); }
static inline vf zero() { return vdupq_n_f32(0.f); }
static inline vf load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, vf v) { vst1q_f32(p, v); }
static inline void store_n(float* p, vf v, int n) {
    float copy[W];
    store(copy, v);
    __builtin_memcpy(p, copy, static_cast<size_t>(n) * 4);
}
static inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf max(vf a, vf b) { return vmaxq_f32(a, b); }       // a NaN stays
static inline vf min(vf a, vf b) { return vminq_f32(a, b); }
static inline vf round(vf a) { return vrndnq_f32(a); }
static inline float sum(vf v) { return vaddvq_f32(v); }
static inline float largest(vf v) { return vmaxvq_f32(v); }
static inline vf power(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
static inline vf scale2(vf a, vf n) {
    const int32x4_t i = vcvtq_s32_f32(n), h = vshrq_n_s32(i, 1);
    return mul(mul(a, power(h)), power(vsubq_s32(i, h)));
}

static inline vf load(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
static inline vf load(const half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p))); }
static inline vf load(const bfloat* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p), 16)); }
template <class T> static inline vf load_n(const T* p, int n) {
    T copy[W] = {};
    __builtin_memcpy(copy, p, static_cast<size_t>(n) * sizeof(T));
    return load(copy);
}
static inline void store_n(half* p, vf v, int n) {
    uint16_t copy[W];
    vst1_u16(copy, vreinterpret_u16_f16(vcvt_f16_f32(v)));
    __builtin_memcpy(p, copy, static_cast<size_t>(n) * 2);
}
// words that hold two bfloat16 each → the first and the second of every one
static inline vf lower(const uint32_t* p) { return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(p), 16)); }
static inline vf upper(const uint32_t* p) {
    return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(p), vdupq_n_u32(0xffff0000u)));
}
static inline vf weight_scale(const void* scale, int64_t wide, int64_t index) {
    return wide ? load((const float*)scale + index) : load((const half*)scale + index);
}

// 32 floats → codes, scale = max|x| / 127, sums. The maximum is taken on the bits, so that a NaN stays one.
static inline void quantize32(const float* x, int8_t* q, float* scale, int32_t* sums) {
    uint32x4_t top = vdupq_n_u32(0);
    for (int k = 0; k < 8; k++)
        top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(load(x + 4 * k)), vdupq_n_u32(0x7fffffff)));
    const uint32_t bits = vmaxvq_u32(top);
    float most_value;
    __builtin_memcpy(&most_value, &bits, 4);
    *scale = most_value / 127.f;
    const vf inverse = set1(most_value > 1e-30f ? 127.f / most_value : 0.f);
    for (int part = 0; part < 2; part++) {
        int32x4_t i[4], total = vdupq_n_s32(0);
        for (int k = 0; k < 4; k++) { i[k] = vcvtnq_s32_f32(mul(load(x + 16 * part + 4 * k), inverse));
                                     total = vaddq_s32(total, i[k]); }
        const int16x8_t a = vcombine_s16(vmovn_s32(i[0]), vmovn_s32(i[1])),
            b = vcombine_s16(vmovn_s32(i[2]), vmovn_s32(i[3]));
        vst1q_s8(q + 16 * part, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
        sums[part] = vaddvq_s32(total);
    }
}

// rows[t][i], 16 rows of `width` floats at `stride` → columns[i][t]
static inline void transpose16(const float* rows, int64_t stride, int64_t width, float* columns) {
    for (int part = 0; part < 16; part += 4)
        for (int64_t c = 0; c < width; c += 4) {
            const vf r0 = load(rows + part * stride + c), r1 = load(rows + (part + 1) * stride + c);
            const vf r2 = load(rows + (part + 2) * stride + c), r3 = load(rows + (part + 3) * stride + c);
            const float32x4x2_t a = vtrnq_f32(r0, r1), b = vtrnq_f32(r2, r3);
            float* to = columns + c * 16 + part;
            store(to, vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0])));
            store(to + 16, vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1])));
            store(to + 32, vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])));
            store(to + 48, vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1])));
        }
}

template <class T> static inline bool narrow_columns(const T*, int64_t, float*) { return false; }

// One 16-row block of weights against M rows of activations; out(m, lane, vector) receives the products. Codes of 8 bits are
// made signed by flipping the top bit, which takes 128 from each: just what a centred matrix wants.
template <int BITS, int SEG, int M, class Store>
static inline void tile(const Linear& w, int64_t nb, const Act& act, const int64_t* rows, Store&& out) {
    constexpr int LINES = SEG / (BITS == 4 ? 8 : 4), Q = LANES / W;
    const int64_t segments = w.padded / SEG, blocks = w.padded / BLOCK;
    const uint8_t* code = w.codes + nb * w.padded * LANES * BITS / 8;
    const bool centred = w.offset_kind == CENTER;
    vf acc[M][Q], sw[Q], off[Q];
    for (int k = 0; k < Q; k++) { sw[k] = off[k] = zero(); for (int m = 0; m < M; m++) acc[m][k] = zero(); }
    int64_t left = 0, group = nb * w.groups;
    for (int64_t s = 0; s < segments; s++) {
        if (left == 0) {
            left = SEG == 32 ? w.blocks : 1;
            for (int k = 0; k < Q; k++) {
                sw[k] = weight_scale(w.scale, w.wide, group * LANES + k * W);
                if (w.offset_kind == BIAS) off[k] = weight_scale(w.offset, w.wide, group * LANES + k * W);
                else if (!centred) off[k] = mul(sub(zero(), load((const uint8_t*)w.offset + group * LANES + k * W)), sw[k]);
            }
            group++;
        }
        left--;
        int32x4_t ia[M][Q];
        for (int m = 0; m < M; m++) {
            const int32_t owed = (SEG == 32 ? act.minus8 : act.minus8_16)[rows[m] * segments + s];
            const int32_t start = BITS == 4 ? (centred ? owed : 0) : (centred ? 0 : owed * -16);
            for (int k = 0; k < Q; k++) ia[m][k] = vdupq_n_s32(start);
        }
        for (int j = 0; j < LINES; j++, code += 64)
            for (int k = 0; k < Q; k++) {
                const uint8x16_t line = vld1q_u8(code + 16 * k);
                const int8x16_t lo = vreinterpretq_s8_u8(BITS == 4 ? vandq_u8(line, vdupq_n_u8(15)) :
                                                         veorq_u8(line, vdupq_n_u8(128)));
                const int8x16_t hi = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
                for (int m = 0; m < M; m++) {
                    const int32_t* x = (const int32_t*)(act.q + rows[m] * w.padded + s * SEG) + (BITS == 4 ? 2 * j : j);
                    ia[m][k] = vdotq_s32(ia[m][k], lo, vreinterpretq_s8_s32(vdupq_n_s32(x[0])));
                    if (BITS == 4) ia[m][k] = vdotq_s32(ia[m][k], hi, vreinterpretq_s8_s32(vdupq_n_s32(x[1])));
                }
            }
        for (int m = 0; m < M; m++) {
            const vf scale = set1(act.scale[rows[m] * blocks + s * SEG / BLOCK]);
            const vf sum_of = set1((SEG == 32 ? act.sum32 : act.sum16)[rows[m] * segments + s]);
            for (int k = 0; k < Q; k++) {
                acc[m][k] = fma(vcvtq_f32_s32(ia[m][k]), mul(sw[k], scale), acc[m][k]);
                if (!centred) acc[m][k] = fma(off[k], sum_of, acc[m][k]);
            }
        }
    }
    for (int m = 0; m < M; m++) for (int k = 0; k < Q; k++) out(m, k * W, acc[m][k]);
}

}  // namespace GAINZ_NS
