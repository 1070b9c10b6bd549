// The ops that meet a matrix, quantized or float: products, logits, rows of a table.
#pragma once

namespace GAINZ_NS {

// act, linear, rows, out, adding
static void matmul(Context& c, const int64_t* i) {
    const Linear& w = *ptr<const Linear>(i[1]);
    const Target t = target_of(ptr<float>(i[3]), w, w.bias, i[4] != 0);
    const Act& a = *ptr<const Act>(i[0]);
    if (w.bits && a.q) quantized(c, a, w, i[2], t);
    else if (w.bits) wide(c, a, w, i[2], t);
    else dense(c, a, w, i[2], t);
}

// act, linear, rows, out, softcap (a double; 0: none)
static void logits(Context& c, const int64_t* i) {
    const Linear& w = *ptr<const Linear>(i[1]);
    const int64_t words[5] = {i[0], i[1], i[2], i[3], 0};
    matmul(c, words);
    const float cap = static_cast<float>(real(i[4]));
    if (!(cap > 0.f)) return;
    each_row(c, i[2], w.n, [&](int64_t r) {
        float* y = ptr<float>(i[3]) + r * w.n;
        for (int64_t j = 0; j < w.n; j += W) {     // cap * tanh(x / cap) = cap * (1 - 2 / (1 + e^(2x/cap)))
            const int n = static_cast<int>(least(W, w.n - j));
            const vf e = exp(mul(load_n(y + j, n), set1(2.f / cap)));
            store_n(y + j, mul(set1(cap), sub(set1(1.f), div(set1(2.f), add(set1(1.f), e)))), n);
        }
    });
}

static inline float element(const Linear& w, int64_t row, int64_t column) {
    const int64_t nb = row / LANES, lane = row % LANES, group = column / (w.segment == 16 ? 16 : w.blocks * BLOCK);
    const uint8_t* block = w.codes + nb * w.padded * LANES * w.bits / 8;
    const uint8_t byte = w.bits == 8 ? block[column / 4 * 64 + lane * 4 + column % 4] :
        block[column / 8 * 64 + lane * 4 + column % 4];
    const float code = w.bits == 8 ? byte : (column % 8 < 4 ? byte & 15 : byte >> 4);
    const int64_t at = (nb * w.groups + group) * LANES + lane;
    const float scale = w.wide ? ((const float*)w.scale)[at] : one((const half*)w.scale + at);
    if (w.offset_kind == BIAS) return code * scale + (w.wide ? ((const float*)w.offset)[at] :
                                                      one((const half*)w.offset + at));
    return (code - (w.offset_kind == ZERO ? ((const uint8_t*)w.offset)[at] : w.bits == 8 ? 128.f : 8.f)) * scale;
}

// linear, ids, rows, out, scale
static void embed(Context& c, const int64_t* i) {
    const Linear& w = *ptr<const Linear>(i[0]);
    const int64_t* ids = ptr<const int64_t>(i[1]);
    float* out = ptr<float>(i[3]);
    const float scale = static_cast<float>(real(i[4]));
    each_row(c, i[2], w.k * 4, [&](int64_t r) {
        float* y = out + r * w.k;
        for (int64_t j = 0; w.bits && j < w.padded; j++) {
            const int64_t k = w.gather ? w.gather[j] : j;
            if (k >= 0 && k < w.k) y[k] = element(w, ids[r], j) * scale;
        }
        for (int64_t k = 0; !w.bits && k < w.k; k++) y[k] = dense_element(w, ids[r], k) * scale;
    });
}

}  // namespace GAINZ_NS
