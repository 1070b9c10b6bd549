// How the attention of one pass is shared out: tiles of rows, KV heads, and for few rows the chunks of the context too.
#pragma once

namespace GAINZ_NS {

static int64_t make_tiles(const Task& t, int64_t per, Tile* tiles) {
    int64_t n = 0;
    for (int64_t s = 0; s < t.batch.sequences; s++)
        for (int64_t r = t.batch.starts[s]; r < t.batch.starts[s + 1]; r += per) {
            const int64_t rows = least(per, t.batch.starts[s + 1] - r);
            const int64_t low = t.spec.window ? most(0, t.batch.positions[r] - t.spec.window + 1) : 0;
            tiles[n++] = Tile{s, r, rows, low / PAGE_CHUNK, t.batch.positions[r + rows - 1] / PAGE_CHUNK + 1, 0};
        }
    return n;
}

// every chunk of a tile in turn
static void whole(const Task& t, const Tile& tile, Heads heads, Scratch& scratch) {
#if defined(GAINZ_PAIRED_DOT)
    if (t.pair_width) return pair_whole(t, tile, heads, scratch);
#endif
    Room r = room(scratch, t);
    const int64_t each = tile.rows * t.group, queries = each * heads.count;
    float *part[MAX_QUERIES], *state[MAX_QUERIES];
    for (int64_t i = 0; i < queries; i++) {
        part[i] = r.parts + i * t.state();
        state[i] = t.partial + (t.row_of(tile, i % each) * t.spec.heads + t.head_of(heads, i, each)) * t.state();
        state[i][1] = 0.f;
    }
    for (int64_t chunk = tile.first; chunk < tile.last; chunk++) {
        chunk_sums(t, tile, heads, chunk, r, part);
        for (int64_t i = 0; i < queries; i++) combine(state[i], part[i], t.value);
    }
    for (int64_t i = 0; i < queries; i++) finish(t, t.row_of(tile, i % each), t.head_of(heads, i, each), state[i]);
}

static void piece(const Task& t, const Tile& tile, Heads heads, int64_t chunk, Scratch& scratch) {
    const int64_t each = tile.rows * t.group, chunks = tile.last - tile.first;
    float* part[PAIR_QUERIES];
    for (int64_t i = 0; i < each * heads.count; i++)
        part[i] = t.partial + (tile.slot + (heads.first * each + i) * chunks + chunk - tile.first) * t.state();
#if defined(GAINZ_PAIRED_DOT)
    if (t.pair_width) return pair_piece(t, tile, heads, chunk, scratch, part);
#endif
    Room r = room(scratch, t);
    chunk_sums(t, tile, heads, chunk, r, part);
}

static inline void combine_in(const Task& t, float* state, const float* next) {
#if defined(GAINZ_PAIRED_DOT)
    if (t.pair_width) return combine_pairs(state, next, t.value);
#endif
    combine(state, next, t.value);
}

static void join(const Task& t, const Tile& tile) {
    const int64_t each = tile.rows * t.group, chunks = tile.last - tile.first;
    const Heads all{0, t.spec.kv_heads};
    for (int64_t i = 0; i < each * all.count; i++) {
        float* state = t.partial + (tile.slot + i * chunks) * t.state();
        for (int64_t c = 1; c < chunks; c++) combine_in(t, state, state + c * t.state());
        finish(t, t.row_of(tile, i % each), t.head_of(all, i, each), state);
    }
}

static void split(Context& c, const Task& t, Tile* tiles, int64_t count, bool alone) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; i++) pieces += (tiles[i].last - tiles[i].first) * t.spans(tiles[i]);
    auto job = [&](int64_t index, int thread) {
        for (int64_t i = 0; i < count; i++) {
            const Tile& tile = tiles[i];
            const int64_t chunks = tile.last - tile.first, mine = chunks * t.spans(tile);
            if (index < mine) return piece(t, tile, t.span(tile, index / chunks), tile.first + index % chunks, c.own[thread]);
            index -= mine;
        }
    };
    if (alone) for (int64_t i = 0; i < pieces; i++) job(i, 0);
    else parallel(*c.pool, pieces, job);
    for (int64_t i = 0; i < count; i++) join(t, tiles[i]);
}

// Chooses bfloat16 where it will do, and then the rows of a tile: many share a chunk's keys and values, every thread has some.
static inline void in_pairs(const Context& c, Task& t, int64_t rows, int64_t& per) {
#if defined(GAINZ_PAIRED_DOT)
    if (!t.spec.paired || t.kv.type == F32) return;
    t.pair_width = ceil_div(t.spec.head_dim, 32) * 32;
    t.unit = t.spec.softcap > 0 ? 1.f : LOG2E;
    t.most_queries = PAIR_QUERIES;
    t.most_heads = t.most_staged = most(1, least(t.spec.kv_heads, STAGED / (PAGE_CHUNK * t.pair_width * 2)));
    per = most(per, least(PAIR_QUERIES / t.group, rows * t.spec.kv_heads / (8 * c.threads)));
#else
    (void)c; (void)t; (void)rows; (void)per;
#endif
}

// qkv, rows, spec, kv, batch, act
static void attend(Context& c, const int64_t* w) {
    const Spec& spec = *ptr<const Spec>(w[2]);
    const KV& kv = *ptr<const KV>(w[3]);
    const Batch& batch = *ptr<const Batch>(w[4]);
    const Act& out = *ptr<const Act>(w[5]);
    Task t{ptr<const float>(w[0]), spec, kv, batch, out, nullptr, nullptr, spec.heads / spec.kv_heads,
           ceil_div(spec.head_dim, 16) * 16, ceil_div(kv.value_width, 16) * 16,
           kv.type == U8 ? ceil_div(kv.key_width, BYTES) * BYTES : 0, nullptr, nullptr, spec.kv_heads, MAX_QUERIES, 0, nullptr,
           spec.kv_heads, 1.f};
    const int64_t rows = w[1];
    int64_t per = most(1, MAX_QUERIES / t.group);
    in_pairs(c, t, rows, per);
    const int64_t most_tiles = rows / per + batch.sequences;
    const size_t for_tiles = static_cast<size_t>(most_tiles) * sizeof(Tile),
        for_q = static_cast<size_t>(rows * spec.heads * t.key) * 4,
        for_bytes = t.byte_width ? static_cast<size_t>(rows * spec.heads * (t.byte_width + 8)) : 0,
        for_pairs = t.byte_width ? 0 : static_cast<size_t>(rows * spec.heads * t.pair_width) * 2;
    Tile* tiles = (Tile*)c.shared.need(for_tiles);
    const int64_t count = make_tiles(t, per, tiles);
    int64_t states = rows * spec.heads, work = 0, spans = 0, chunks = 0;
    for (int64_t i = 0; i < count; i++) {
        work += batch.lengths[tiles[i].sequence] * tiles[i].rows * spec.heads * t.key;
        chunks += tiles[i].last - tiles[i].first;
    }
    const bool alone = work < 40000;                           // less than it costs to wake another core
    if (!alone && chunks < 2 * c.threads) t.most_heads = least(t.most_heads, ceil_div(spec.kv_heads, c.threads));
    for (int64_t i = 0; i < count; i++) spans += t.spans(tiles[i]);
    const bool splitting = spans < 8 * c.threads;
    for (int64_t i = 0, slot = 0; i < count; i++) {
        tiles[i].slot = slot;
        slot += (tiles[i].last - tiles[i].first) * spec.kv_heads * tiles[i].rows * t.group;
        if (splitting) states = slot;
    }
    // asked for again with the true size; what was written is kept
    char* p = c.shared.need(for_tiles + for_q + for_bytes + for_pairs + static_cast<size_t>(states * t.state()) * 4 + 64);
    tiles = (Tile*)p;
    t.q = (float*)(p + for_tiles);
    t.q8_scale = t.q + for_q / 4;
    t.q8 = (int8_t*)(t.q8_scale + 2 * rows * spec.heads);
    t.partial = t.q8_scale + (for_bytes + for_pairs) / 4;
    if (for_pairs) t.q16 = (int32_t*)t.q8_scale;
    each_row(c, rows, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, [&](int64_t r) { place(t, r); });
    if (splitting) split(c, t, tiles, count, alone);
    else {
        auto job = [&](int64_t index, int thread) {            // the longest first: they come last in a prompt
            for (int64_t i = count - 1; i >= 0; i--) {
                const int64_t mine = t.spans(tiles[i]);
                if (index < mine) return whole(t, tiles[i], t.span(tiles[i], index), c.own[thread]);
                index -= mine;
            }
        };
        parallel(*c.pool, spans, job);
    }
    each_row(c, rows, out.k, [&](int64_t r) { quantize(out, r); });
}

}  // namespace GAINZ_NS
