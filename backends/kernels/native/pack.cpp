// Matrices into the layout of `Linear` (abi.h): codes of a byte each, floats, and the blocks of GGUF files as they lie there.
// It only moves numbers: what a block's numbers mean, Python and the kernels know. Every block of 16 rows is a job of its own.
#include <cstring>

#include "abi.h"
#include "pool.h"

namespace gainz {
namespace {

enum Kind : int64_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2, Q4_K = 3, Q5_K = 4, Q6_K = 5 };

inline uint64_t load64(const uint8_t* p) { uint64_t v; std::memcpy(&v, p, 8); return v; }
inline uint32_t load32(const uint8_t* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }
inline uint16_t load16(const uint8_t* p) { uint16_t v; std::memcpy(&v, p, 2); return v; }
inline void put32(uint8_t* p, uint32_t v) { std::memcpy(p, &v, 4); }
// eight values below 16, a byte each → four bytes: the first four in the low nibbles, the others in the high ones
inline uint32_t nibbles(uint64_t v) { return static_cast<uint32_t>(v) | static_cast<uint32_t>(v >> 32) << 4; }

// ------------------------------------------------------------------------------------------------ codes
// one row's codes, in order, into its lane; the tail that fills no line is done byte by byte
template <int BITS> void pack_row(const uint8_t* row, int64_t k, uint8_t shift, uint8_t* out) {
    constexpr int64_t LINE = BITS == 4 ? 8 : 4;
    const uint64_t shifts = 0x0101010101010101u * shift;
    int64_t j = 0;
    for (; j + LINE <= k; j += LINE, out += 64)
        put32(out, BITS == 4 ? nibbles(load64(row + j) + shifts) : load32(row + j) + static_cast<uint32_t>(shifts));
    if (j == k) return;
    uint8_t v[8] = {0};
    for (int64_t i = 0; j + i < k; i++) v[i] = static_cast<uint8_t>(row[j + i] + shift);
    put32(out, BITS == 4 ? nibbles(load64(v)) : load32(v));
}

void gather_row(const uint8_t* row, int64_t padded, const int32_t* gather, int64_t bits, int shift, uint8_t* out) {
    const int64_t line = bits == 4 ? 8 : 4;
    for (int64_t j = 0; j < padded; j += line, out += 64) {
        uint8_t v[8] = {0};
        for (int64_t i = 0; i < line; i++)
            if (gather[j + i] >= 0) v[i] = static_cast<uint8_t>(row[gather[j + i]] + shift);
        put32(out, bits == 4 ? nibbles(load64(v)) : load32(v));
    }
}

// bytes of [n, k] codes → a packed block of 16 rows; columns beyond k or rows beyond n are zeros
void pack_block(const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather, int64_t bits, int shift,
                int64_t nb, uint8_t* out) {
    std::memset(out, 0, static_cast<size_t>(padded * LANES * bits / 8));
    for (int64_t lane = 0; lane < LANES && nb * LANES + lane < n; lane++) {
        const uint8_t* row = codes + (nb * LANES + lane) * k;
        if (gather) gather_row(row, padded, gather, bits, shift, out + lane * 4);
        else if (bits == 4) pack_row<4>(row, k, static_cast<uint8_t>(shift), out + lane * 4);
        else pack_row<8>(row, k, static_cast<uint8_t>(shift), out + lane * 4);
    }
}

// ------------------------------------------------------------------------------------------------ blocks of 32 weights
// 16 bytes that hold columns 0 … 15 in their low nibbles and 16 … 31 in the high ones → four lines
inline void split_nibbles(const uint8_t* q, uint8_t* out) {
    constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0fu;
    const uint64_t a = load64(q), b = load64(q + 8);
    put32(out, nibbles(a & LOW));
    put32(out + 64, nibbles(b & LOW));
    put32(out + 128, nibbles(a >> 4 & LOW));
    put32(out + 192, nibbles(b >> 4 & LOW));
}

// Q4_0: scale, 16 bytes. Q4_1: scale, offset, 16 bytes. Q8_0: scale, 32 signed bytes. Scales and offsets are float16.
template <int64_t KIND>
void pack_stored(const uint8_t* rows, int64_t n, int64_t k, int64_t nb, uint8_t* codes, uint16_t* scale, uint16_t* offset) {
    constexpr int64_t HEAD = KIND == Q4_1 ? 4 : 2, SIZE = HEAD + (KIND == Q8_0 ? 32 : 16), LINES = KIND == Q8_0 ? 8 : 4;
    const int64_t groups = k / BLOCK, lanes = least(LANES, n - nb * LANES);
    const uint8_t* first = rows + nb * LANES * groups * SIZE;
    codes += nb * groups * LINES * 64;
    scale += nb * groups * LANES;
    if (KIND == Q4_1) offset += nb * groups * LANES;
    for (int64_t g = 0; g < groups; g++, codes += LINES * 64, scale += LANES) {
        for (int64_t lane = 0; lane < lanes; lane++) {
            const uint8_t* block = first + (lane * groups + g) * SIZE;
            uint8_t* out = codes + lane * 4;
            scale[lane] = load16(block);
            if (KIND == Q4_1) offset[g * LANES + lane] = load16(block + 2);
            if (KIND != Q8_0) split_nibbles(block + HEAD, out);
            else for (int64_t j = 0; j < LINES; j++) put32(out + j * 64, load32(block + HEAD + 4 * j) ^ 0x80808080u);
        }
        for (int64_t lane = lanes; lane < LANES; lane++) {      // rows that are not there
            scale[lane] = 0;
            if (KIND == Q4_1) offset[g * LANES + lane] = 0;
            for (int64_t j = 0; j < LINES; j++) put32(codes + lane * 4 + j * 64, 0);
        }
    }
}

// ------------------------------------------------------------------------------------------------ floats
// rows of T [n, k] → blocks of 16 side by side, [k][16], or [k/2][16][2]; rows beyond n and an odd column's partner are zeros
template <class T, int PAIR> void pack_floats(const char* rows, int64_t n, int64_t k, int64_t nb, T* out) {
    constexpr int64_t STEP = 64;                    // columns at a time: the lines written stay in the L1 cache
    constexpr int64_t WIDTH = sizeof(T);
    const int64_t padded = ceil_div(k, PAIR) * PAIR;
    if (n - nb * LANES < LANES || padded != k) std::memset(out, 0, static_cast<size_t>(padded * LANES * WIDTH));
    for (int64_t from = 0; from < k; from += STEP)
        for (int64_t lane = 0; lane < LANES && nb * LANES + lane < n; lane++) {
            const char* row = rows + (nb * LANES + lane) * k * WIDTH;
            const int64_t end = least(k, from + STEP);
            int64_t j = from;
            for (; j + PAIR <= end; j += PAIR) std::memcpy(out + (j * LANES + lane * PAIR), row + j * WIDTH, WIDTH * PAIR);
            if (j < end) std::memcpy(out + (j * LANES + lane * PAIR), row + j * WIDTH, WIDTH);
        }
}

}  // namespace
}  // namespace gainz

#include "pack_k.h"

using namespace gainz;
#define API extern "C" __attribute__((visibility("default")))

// gather: the column of the codes for each packed one, -1 = nothing; null = in order
API void gainz_pack(Context* c, const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather,
                    int64_t bits, int64_t shift, uint8_t* out) {
    auto job = [&](int64_t nb, int) {
        pack_block(codes, n, k, padded, gather, bits, static_cast<int>(shift), nb, out + nb * padded * LANES * bits / 8);
    };
    parallel(*c->pool, ceil_div(n, LANES), job);
}

// rows: n rows of whole blocks of a GGUF type, k columns. scale, offset: float16 for blocks of 32, float32 for those of 256;
// offset is null where the type has none.
API void gainz_pack_stored(Context* c, int64_t kind, const uint8_t* rows, int64_t n, int64_t k, uint8_t* codes, void* scale,
                           void* offset) {
    uint16_t *half_scale = (uint16_t*)scale, *half_offset = (uint16_t*)offset;
    float *wide_scale = (float*)scale, *wide_offset = (float*)offset;
    auto job = [&](int64_t nb, int) {
        if (kind == Q4_0) pack_stored<Q4_0>(rows, n, k, nb, codes, half_scale, half_offset);
        else if (kind == Q4_1) pack_stored<Q4_1>(rows, n, k, nb, codes, half_scale, half_offset);
        else if (kind == Q8_0) pack_stored<Q8_0>(rows, n, k, nb, codes, half_scale, half_offset);
        else if (kind == Q4_K) pack_super<Q4K>(rows, n, k, nb, codes, wide_scale, wide_offset);
        else if (kind == Q5_K) pack_super<Q5K>(rows, n, k, nb, codes, wide_scale, wide_offset);
        else pack_super<Q6K>(rows, n, k, nb, codes, wide_scale, nullptr);
    };
    parallel(*c->pool, ceil_div(n, LANES), job);
}

// rows: [n, k] of `type`, at any address
API void gainz_pack_floats(Context* c, const char* rows, int64_t n, int64_t k, int64_t type, char* out) {
    auto job = [&](int64_t nb, int) {
        if (type == F32) pack_floats<uint32_t, 1>(rows, n, k, nb, (uint32_t*)out + nb * k * LANES);
        else if (type == F16) pack_floats<uint16_t, 1>(rows, n, k, nb, (uint16_t*)out + nb * k * LANES);
        else pack_floats<uint16_t, 2>(rows, n, k, nb, (uint16_t*)out + nb * ceil_div(k, 2) * 2 * LANES);
    };
    parallel(*c->pool, ceil_div(n, LANES), job);
}
