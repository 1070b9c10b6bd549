// The blocks of GGUF files into the layout of `Linear` (abi.h): one block of 16 rows at a time, from wherever its rows lie.
// It only moves numbers: what a block's numbers mean, Python and the kernels know.
#pragma once
#include <cstring>

#include "abi.h"

namespace gainz {
namespace {

enum Kind : int64_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2, Q4_K = 3, Q5_K = 4, Q6_K = 5 };

inline uint64_t load64(const uint8_t* p) { uint64_t v; std::memcpy(&v, p, 8); return v; }
inline uint32_t load32(const uint8_t* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }
inline uint16_t load16(const uint8_t* p) { uint16_t v; std::memcpy(&v, p, 2); return v; }
inline void put32(uint8_t* p, uint32_t v) { std::memcpy(p, &v, 4); }
// eight values below 16, a byte each → four bytes: the first four in the low nibbles, the others in the high ones
inline uint32_t nibbles(uint64_t v) { return static_cast<uint32_t>(v) | static_cast<uint32_t>(v >> 32) << 4; }

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

}  // namespace
}  // namespace gainz

#include "pack_k.h"

namespace gainz {
namespace {

struct Shape { int64_t weights, bytes, bits, groups, number; };    // of a block; `number`: bytes of a scale
inline Shape shape_of(int64_t kind) {
    switch (kind) {
        case Q4_0: return {32, 18, 4, 1, 2};
        case Q4_1: return {32, 20, 4, 1, 2};
        case Q8_0: return {32, 34, 8, 1, 2};
        case Q4_K: return {256, Q4K::SIZE, Q4K::BITS, Q4K::GROUPS, 4};
        case Q5_K: return {256, Q5K::SIZE, Q5K::BITS, Q5K::GROUPS, 4};
        default: return {256, Q6K::SIZE, Q6K::BITS, Q6K::GROUPS, 4};
    }
}

// Rows 16 nb … of n rows of k columns. scale, offset: float16 for blocks of 32, float32 for those of 256; offset is null where
// the type has none.
inline void pack_any(int64_t kind, const uint8_t* rows, int64_t n, int64_t k, int64_t nb, uint8_t* codes, void* scale,
                     void* offset) {
    uint16_t *half_scale = (uint16_t*)scale, *half_offset = (uint16_t*)offset;
    float *wide_scale = (float*)scale, *wide_offset = (float*)offset;
    if (kind == Q4_0) pack_stored<Q4_0>(rows, n, k, nb, codes, half_scale, half_offset);
    else if (kind == Q4_1) pack_stored<Q4_1>(rows, n, k, nb, codes, half_scale, half_offset);
    else if (kind == Q8_0) pack_stored<Q8_0>(rows, n, k, nb, codes, half_scale, half_offset);
    else if (kind == Q4_K) pack_super<Q4K>(rows, n, k, nb, codes, wide_scale, wide_offset);
    else if (kind == Q5_K) pack_super<Q5K>(rows, n, k, nb, codes, wide_scale, wide_offset);
    else pack_super<Q6K>(rows, n, k, nb, codes, wide_scale, nullptr);
}

}  // namespace
}  // namespace gainz
