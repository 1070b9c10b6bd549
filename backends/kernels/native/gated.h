// The gated activation in one with the product before it: a task takes 32 gates and what they let through for its rows, and
// leaves their activations in 8 bits. The numbers are those of `matmul` and `glu` one after the other, bit for bit.
#pragma once

namespace GAINZ_NS {

static void gated_in_tasks(Context& c, const Act& act, const Linear& w, int64_t rows, int64_t kind, const Act& out) {
    const Act a = w.gather ? gathered(c, act, w, rows) : act;
    const BlockRows run = pick(w);
    const int64_t units = out.k / BLOCK, each = share(c, units), bands = ceil_div(rows, TASK_ROWS);
    constexpr int64_t WIDTH = 2 * BLOCK;                       // of a row's sums: gates, then what they let through
    const size_t panel = (panel_bytes(w) + 63) / 64 * 64;
    auto job = [&](int64_t index, int thread) {
        const int64_t first = index / bands * each, from = index % bands * TASK_ROWS, to = least(rows, from + TASK_ROWS);
        char* room = c.own[thread].need(panel + static_cast<size_t>((to - from) * WIDTH) * 4);
        float* sums = (float*)(room + panel);
        for (int64_t unit = first; unit < least(units, first + each); unit++) {
            for (int64_t part = 0; part < WIDTH / LANES; part++) {
                const int64_t half = part * LANES / BLOCK, column = half * out.k + unit * BLOCK + part * LANES % BLOCK;
                const Target t{sums + part * LANES, w.n, w.bias, false, WIDTH, from, column};
                run(w, column / LANES, a, from, to, t, room);
            }
            for (int64_t r = from; r < to; r++) {
                const float* x = sums + (r - from) * WIDTH;
                float* y = out.rows + r * out.k + unit * BLOCK;
                gate_all(x, x + BLOCK, BLOCK, kind, y);
                quantize_block(out, r, unit, y);
            }
        }
    };
    parallel(*c.pool, ceil_div(units, each) * bands, job);
}

// act, linear, rows, kind, act of half as many columns
static void gated(Context& c, const int64_t* i) {
    const Act &a = *ptr<const Act>(i[0]), &out = *ptr<const Act>(i[4]);
    const Linear& w = *ptr<const Linear>(i[1]);
#if defined(GAINZ_MANY)
    constexpr bool TOGETHER = false;                           // many rows have tiles of their own; at few it was never timed there
#else
    constexpr bool TOGETHER = true;
#endif
    if (TOGETHER && w.bits && a.q && out.q && out.k % BLOCK == 0) return gated_in_tasks(c, a, w, i[2], i[3], out);
    float* both = (float*)c.gates.need(static_cast<size_t>(i[2] * w.n) * 4);
    const int64_t product[5] = {i[0], i[1], i[2], (int64_t)both, 0}, rest[4] = {(int64_t)both, i[2], i[3], i[4]};
    matmul(c, product);
    glu(c, rest);
}

}  // namespace GAINZ_NS
