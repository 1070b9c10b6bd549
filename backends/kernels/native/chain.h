// Ids guessed one after another by a model whose passes are recorded: pass, head, choice, and the next pass over what was
// chosen, without the caller. Between two passes of a large model everything is cold, and what asks for a pass costs more
// than a small model's pass itself. The rules of choosing are engine/sampler.py's; a guess costs time only, so its sums are
// float32, but noise and order are the same. Knows rows of logits and programs; nothing of what they compute.
#pragma once
#include <algorithm>
#include <cmath>

namespace GAINZ_NS {

constexpr float BANDS[] = {4.f, 7.f, 10.f, 15.f, 25.f};     // nats below the best where the leading columns are looked for first
constexpr double NOISE_STEP = 1.0 / 4294967296.0;  // of 32 random bits

static inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * NOISE_STEP)); }

// the smallest bits whose noise may exceed level
static inline int64_t bits_above(double level) {
    return level > -20 ? most(0, static_cast<int64_t>(std::exp(-std::exp(-level)) / NOISE_STEP) - 1) : 0;
}

static inline float best_of(const float* x, int64_t n) {
    float lane[W];
    vf top = set1(x[0]);
    int64_t i = 0;
    for (; i + W <= n; i += W) top = max(top, load(x + i));
    store(lane, top);
    float best = lane[0];
    for (int j = 1; j < W; j++) best = lane[j] > best ? lane[j] : best;
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// Σ e^((x - top) / temperature); not a number where some x is none
static inline float mass_of(const float* x, int64_t n, float top, float by) {
    float lane[W];
    vf total = zero();
    int64_t i = 0;
    for (; i + W <= n; i += W) total = add(total, exp(mul(sub(load(x + i), set1(top)), set1(by))));
    float rest = 0.f;
    if (i < n) {
        store(lane, exp(mul(sub(load_n(x + i, static_cast<int>(n - i)), set1(top)), set1(by))));
        for (int j = 0; j < n - i; j++) rest += lane[j];
    }
    return sum(total) + rest;
}

struct Choice { int64_t column; float probability; };

static inline float chance(const float* x, int32_t column, float top, float by) { return std::exp((x[column] - top) * by); }

static float chances(const float* x, const int32_t* ids, int64_t n, float top, float by) {
    float all = 0.f;
    for (int64_t i = 0; i < n; i++) all += chance(x, ids[i], top, by);
    return all;
}

// the columns among which top-k, top-p and min-p choose, rising
static int64_t leading(const Chain& g, const float* x, float top, float by, float mass) {
    if (g.top_k <= 0 && g.top_p >= 1) return reaching(x, g.columns, top + (std::log(static_cast<float>(g.min_p)) - 1e-4f) / by, g.found);
    int64_t found = 0;
    for (const float band : BANDS) {
        found = reaching(x, g.columns, top - band / by, g.found);
        if (g.top_k > 0 ? found >= least(g.top_k, g.columns) : chances(x, g.found, found, top, by) >= g.top_p * mass) break;
    }
    return found;
}

// those that they leave, any order
static int64_t survivors(const Chain& g, const float* x, float top, float by, float mass) {
    int32_t* ids = g.found;
    int64_t found = leading(g, x, top, by, mass), kept = 0;
    if (g.top_k > 0 || g.top_p < 1)
        std::sort(ids, ids + found, [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    if (g.top_k > 0) {
        found = least(found, g.top_k);
        mass = chances(x, ids, found, top, by);
    }
    float reached = 0.f;
    for (int64_t i = 0; i < found && g.top_p < 1; i++) {
        reached += chance(x, ids[i], top, by);
        if (reached >= (g.top_p - 1e-6) * mass) found = i + 1;
    }
    for (int64_t i = 0; i < found; i++) {
        ids[kept] = ids[i];
        kept += !(g.min_p > 0) || chance(x, ids[i], top, by) >= g.min_p * (1 - 1e-6);
    }
    return kept;
}

struct Winner { int64_t column; double score; };

static inline uint64_t name_of(const Chain& g, int64_t column) { return static_cast<uint64_t>(g.names ? g.names[column] : column); }

static void compete(const Chain& g, const float* x, float top, double by, uint64_t place, int64_t found, Winner& best) {
    for (int64_t i = 0; i < found; i++) {
        const double score = (static_cast<double>(x[g.found[i]]) - top) * by + gumbel(noise_bits(place, name_of(g, g.found[i])));
        const bool wins = score > best.score || (score == best.score && g.found[i] < best.column);
        if (wins) best = {g.found[i], score};
    }
}

// the likeliest, or at a temperature the one with the best noise; column -1: the logits are no numbers
static Choice choose(const Chain& g, const float* x, uint64_t place) {
    const int64_t n = g.columns;
    const float top = best_of(x, n), by = g.temperature > 0 ? static_cast<float>(1 / g.temperature) : 1.f;
    const float mass = mass_of(x, n, top, by);
    if (!std::isfinite(top) || !std::isfinite(mass)) return {-1, 0.f};
    if (!(g.temperature > 0)) {
        reaching(x, n, top, g.found);
        return {g.found[0], 1.f / mass};
    }
    const bool whole = g.top_k <= 0 && g.top_p >= 1 && !(g.min_p > 0);
    int64_t found = whole ? reaching(x, n, top - BANDS[0] / by, g.found) : survivors(g, x, top, by, mass);
    Winner best = {g.found[0], -HUGE_VAL};
    compete(g, x, top, by, place, found, best);
    if (whole) {                                   // any other needs noise above what separates it from the winner
        const int64_t bound = bits_above(best.score + BANDS[0]);
        found = reaching(x, n, static_cast<float>(top + (best.score - gumbel(0xffffffffu)) / by), g.found);
        int64_t kept = 0;
        for (int64_t i = 0; i < found; i++) {
            g.found[kept] = g.found[i];
            kept += noise_bits(place, name_of(g, g.found[i])) >= static_cast<uint64_t>(bound);
        }
        compete(g, x, top, by, place, kept, best);
    }
    return {best.column, chance(x, static_cast<int32_t>(best.column), top, by) / mass};
}

static inline double rate_of(const Chain& g, double probability) {
    int64_t band = 0;
    while (band < g.bands && g.edges[band] <= probability) band++;
    return g.rates[band];
}

// the next pass reads `rows` ids from place `before` on
static void stand(const Chain& g, int64_t before, int64_t rows, int64_t* positions, int64_t* slots, int32_t* ends) {
    for (int64_t i = 0; i < rows; i++) {
        positions[i] = before + i;
        slots[i] = static_cast<int64_t>(g.pages[(before + i) / g.page]) * g.page + (before + i) % g.page;
    }
    ends[1] = static_cast<int32_t>(rows);
    ends[2] = static_cast<int32_t>(before + rows);
    Batch& b = *g.batch;
    b = {positions, ends, ends + 2, g.pages, slots, g.cos + before * g.half, g.sin + before * g.half, 1, rows,
         ceil_div(before + rows, g.page), g.half};
}

// a Chain; of no ids: one pass. Leaves the batch's descriptor to be written anew.
static void chain(Context& c, const int64_t* w) {
    Chain& g = *ptr<Chain>(w[0]);
    int64_t positions[CHAIN_ROWS], slots[CHAIN_ROWS], before = g.before, rows = g.rows;
    int32_t ends[3] = {0, 0, 0};
    double through = 1;
    if (g.states) __builtin_memcpy(g.states, g.given, static_cast<size_t>(rows * g.width) * sizeof(float));
    for (g.made = g.passes = 0; ; ) {
        stand(g, before, rows, positions, slots, ends);
        const int64_t* line = g.passes ? g.next : g.first;
        const int64_t lines = g.passes ? g.next_lines : g.first_lines;
        for (int64_t i = 0; i < lines; i++) c.kernels->run[line[12 * i]](c, line + 12 * i + 1);
        if (!g.most) return;                       // one pass, and its logits
        before += rows;
        const Choice choice = choose(g, g.logits, g.temperature > 0 ? g.places[g.passes] : 0);
        g.passes++;
        if (choice.column < 0) { g.made = -1; return; }
        const int64_t token = static_cast<int64_t>(name_of(g, choice.column));
        if (token >= g.known) return;
        g.out[g.made] = token;
        g.sure[g.made++] = choice.probability;
        if (g.made >= g.most) return;
        if (g.bands) {
            through *= rate_of(g, choice.probability);
            if (!(through > g.needs[g.made])) return;
        }
        g.ids[0] = token;
        if (g.states) __builtin_memcpy(g.states, g.passes > 1 ? g.next_stream : g.first_stream, static_cast<size_t>(g.width) * sizeof(float));
        rows = 1;
    }
}

}  // namespace GAINZ_NS
