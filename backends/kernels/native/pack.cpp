// Matrices into the layout of `Linear` (abi.h): codes of a byte each, floats, and the blocks of GGUF files (stored.h).
// Every block of 16 rows is a job of its own.
#include <cstring>

#include "abi.h"
#include "pool.h"
#include "stored.h"

namespace gainz {
namespace {

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

// rows: n rows of whole blocks of a GGUF type, k columns. See pack_any.
API void gainz_pack_stored(Context* c, int64_t kind, const uint8_t* rows, int64_t n, int64_t k, uint8_t* codes, void* scale,
                           void* offset) {
    auto job = [&](int64_t nb, int) { pack_any(kind, rows, n, k, nb, codes, scale, offset); };
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
