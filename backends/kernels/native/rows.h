// Row-wise operations: norm, quantize, gated activation. One row is always computed by one thread in one order.
#pragma once

namespace GAINZ_NS {

// e^x to about 1 ulp: 2^n * p(r), |r| ≤ ln2/2; below the smallest normal float it stays there
static inline vf exp(vf x) {
    x = min(set1(88.72f), max(set1(-87.33f), x));      // in this order a NaN passes through
    const vf n = round(mul(x, set1(1.44269504088896341f)));
    vf r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    return scale2(fma(p, mul(r, r), add(r, set1(1.f))), n);
}

// columns 32 b … of a row, from 32 floats
static inline void quantize_block(const Act& a, int64_t row, int64_t b, const float* from) {
    const int64_t at = row * (a.padded / BLOCK) + b;
    int32_t sums[2];
    quantize32(from, a.q + row * a.padded + b * BLOCK, a.scale + at, sums);
    a.sum16[2 * at] = a.scale[at] * static_cast<float>(sums[0]);
    a.sum16[2 * at + 1] = a.scale[at] * static_cast<float>(sums[1]);
    a.sum32[at] = a.scale[at] * static_cast<float>(sums[0] + sums[1]);
    a.minus8_16[2 * at] = -8 * sums[0];
    a.minus8_16[2 * at + 1] = -8 * sums[1];
    a.minus8[at] = -8 * (sums[0] + sums[1]);
}

static inline void quantize(const Act& a, int64_t row) {
    if (!a.q) return;
    const float* x = a.rows + row * a.k;
    for (int64_t b = 0; b < a.padded / BLOCK; b++) {
        float tail[BLOCK];
        const float* from = x + b * BLOCK;
        if ((b + 1) * BLOCK > a.k) {
            for (int64_t i = 0; i < BLOCK; i++) tail[i] = b * BLOCK + i < a.k ? from[i] : 0.f;
            from = tail;
        }
        quantize_block(a, row, b, from);
    }
}

template <class Body> static inline void each_row(Context& c, int64_t rows, int64_t width, Body&& body) {
    // small work stays on the caller: waking another core costs more than a few thousand floats
    const int64_t per = most(1, 4096 / most(1, width));
    const int64_t chunks = ceil_div(rows, per);
    auto job = [&](int64_t chunk, int) { for (int64_t r = chunk * per; r < least(rows, (chunk + 1) * per); r++) body(r); };
    parallel(*c.pool, chunks, job);
}

static inline float inverse_rms(const float* x, int64_t k, float eps) {
    vf s[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * W <= k; i += 4 * W)
        for (int j = 0; j < 4; j++) { const vf v = load(x + i + j * W); s[j] = fma(v, v, s[j]); }
    for (; i < k; i += W) {
        const vf v = i + W <= k ? load(x + i) : load_n(x + i, static_cast<int>(k - i));
        s[0] = fma(v, v, s[0]);
    }
    const float mean = sum(add(add(s[0], s[1]), add(s[2], s[3]))) / static_cast<float>(k);
    return 1.f / __builtin_sqrtf(mean + eps);
}

// y = x * r * weight (+ y where adding)
static inline void scaled(const float* x, float r, const float* weight, float* y, int64_t k, bool adding) {
    for (int64_t i = 0; i < k; i += W) {
        const int n = static_cast<int>(least(W, k - i));
        const vf v = mul(mul(n == W ? load(x + i) : load_n(x + i, n), set1(r)), n == W ? load(weight + i) :
                         load_n(weight + i, n));
        if (n == W) store(y + i, adding ? add(load(y + i), v) : v);
        else store_n(y + i, adding ? add(load_n(y + i, n), v) : v, n);
    }
}

// x, rows, weight, eps, act
static void norm(Context& c, const int64_t* w) {
    const float *x = ptr<const float>(w[0]), *weight = ptr<const float>(w[2]);
    const Act& a = *ptr<const Act>(w[4]);
    const float eps = static_cast<float>(real(w[3]));
    each_row(c, w[1], a.k, [&](int64_t r) {
        scaled(x + r * a.k, inverse_rms(x + r * a.k, a.k, eps), weight, a.rows + r * a.k, a.k, false);
        quantize(a, r);
    });
}

// y, rows, weight, eps, x, k
static void norm_add(Context& c, const int64_t* w) {
    const float *y = ptr<const float>(w[0]), *weight = ptr<const float>(w[2]);
    float* x = ptr<float>(w[4]);
    const int64_t k = w[5];
    const float eps = static_cast<float>(real(w[3]));
    each_row(c, w[1], k, [&](int64_t r) { scaled(y + r * k, inverse_rms(y + r * k, k, eps), weight, x + r * k, k, true); });
}

// x, rows, act
static void act(Context& c, const int64_t* w) {
    const float* x = ptr<const float>(w[0]);
    const Act& a = *ptr<const Act>(w[2]);
    each_row(c, w[1], a.k, [&](int64_t r) {
        if (x != a.rows) __builtin_memcpy(a.rows + r * a.k, x + r * a.k, static_cast<size_t>(a.k) * sizeof(float));
        quantize(a, r);
    });
}

static inline vf gate(vf x, int64_t kind) {
    if (kind == SILU) return div(x, add(set1(1.f), exp(sub(zero(), x))));
    if (kind == GELU_TANH) {     // x/2 (1 + tanh u) = x / (1 + e^-2u)
        const vf u = mul(mul(x, fma(mul(x, x), set1(0.044715f), set1(1.f))), set1(-1.5957691216057308f));
        return div(x, add(set1(1.f), exp(u)));
    }
    float lane[W];
    store(lane, x);
    for (int i = 0; i < W; i++) lane[i] *= 0.5f * (1.f + __builtin_erff(lane[i] * 0.70710678118654752f));
    return load(lane);
}

static inline void gate_all(const float* g, const float* u, int64_t k, int64_t kind, float* out) {
    for (int64_t i = 0; i < k; i += W) {
        const int n = static_cast<int>(least(W, k - i));
        if (n == W) store(out + i, mul(gate(load(g + i), kind), load(u + i)));
        else store_n(out + i, mul(gate(load_n(g + i, n), kind), load_n(u + i, n)), n);
    }
}

// gate_up, rows, kind, act
static void glu(Context& c, const int64_t* w) {
    const float* gate_up = ptr<const float>(w[0]);
    const int64_t kind = w[2];
    const Act& a = *ptr<const Act>(w[3]);
    each_row(c, w[1], a.k * 4, [&](int64_t r) {
        const float *g = gate_up + r * 2 * a.k, *u = g + a.k;
        float* out = a.rows + r * a.k;
        gate_all(g, u, a.k, kind, out);
        quantize(a, r);
    });
}

}  // namespace GAINZ_NS
