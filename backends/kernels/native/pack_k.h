// Super-blocks of 256 weights as GGUF files hold them (Q4_K, Q5_K, Q6_K) into the layout of `Linear`. Included by stored.h.
// Scales and offsets are products of two stored numbers; they leave here as float32, and Python decides what holds them.
#pragma once

namespace gainz {
namespace {

inline float half_value(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13, top = 0x0f800000u;
    uint32_t u = rest >= top ? rest + 0x70000000u : rest;          // infinity and NaN keep their exponent
    float f;
    std::memcpy(&f, &u, 4);
    if (rest < top) f *= 5.192296858534828e33f;                    // 2^112
    std::memcpy(&u, &f, 4);
    u |= sign;
    std::memcpy(&f, &u, 4);
    return f;
}

// the 8 scales and 8 minima of 6 bits in 12 bytes
inline void sixes(const uint8_t* p, uint8_t* scale, uint8_t* low) {
    for (int j = 0; j < 4; j++) {
        scale[j] = p[j] & 63;
        low[j] = p[4 + j] & 63;
        scale[4 + j] = static_cast<uint8_t>((p[8 + j] & 15) | (p[j] >> 2 & 48));
        low[4 + j] = static_cast<uint8_t>(p[8 + j] >> 4 | (p[4 + j] >> 2 & 48));
    }
}

constexpr uint64_t LOW4 = 0x0f0f0f0f0f0f0f0fu, BIT = 0x0101010101010101u, TWO = 0x0303030303030303u;

// eight codes of a byte each → two lines
inline void put_bytes(uint8_t* out, uint64_t v) {
    put32(out, static_cast<uint32_t>(v));
    put32(out + 64, static_cast<uint32_t>(v >> 32));
}

// One super-block of one row. out: its lane in the first of its lines. scale, low: its lane in the first of its groups.
struct Q4K {
    static constexpr int64_t SIZE = 144, GROUPS = 8, BITS = 4;
    static void unpack(const uint8_t* p, uint8_t* out, float* scale, float* low) {
        heads(p, scale, low);
        for (int sub = 0; sub < 8; sub++)
            for (int j = 0; j < 4; j++, out += 64)
                put32(out, nibbles(load64(p + 16 + sub / 2 * 32 + 8 * j) >> (sub % 2 ? 4 : 0) & LOW4));
    }
    static void heads(const uint8_t* p, float* scale, float* low) {
        uint8_t s[8], m[8];
        sixes(p + 4, s, m);
        const float d = half_value(load16(p)), dm = half_value(load16(p + 2));
        for (int j = 0; j < 8; j++) { scale[j * LANES] = d * s[j]; low[j * LANES] = -(dm * m[j]); }
    }
};

struct Q5K {
    static constexpr int64_t SIZE = 176, GROUPS = 8, BITS = 8;
    static void unpack(const uint8_t* p, uint8_t* out, float* scale, float* low) {
        Q4K::heads(p, scale, low);
        for (int sub = 0; sub < 8; sub++)
            for (int j = 0; j < 4; j++, out += 128)
                put_bytes(out, (load64(p + 48 + sub / 2 * 32 + 8 * j) >> (sub % 2 ? 4 : 0) & LOW4)
                               | (load64(p + 16 + 8 * j) >> sub & BIT) << 4);
    }
};

// symmetric about 32, which is moved to 128
struct Q6K {
    static constexpr int64_t SIZE = 210, GROUPS = 16, BITS = 8;
    static void unpack(const uint8_t* p, uint8_t* out, float* scale, float*) {
        const float d = half_value(load16(p + 208));
        for (int j = 0; j < 16; j++) scale[j * LANES] = d * static_cast<float>(static_cast<int8_t>(p[192 + j]));
        for (int c = 0; c < 256; c += 8, out += 128) {
            const int half = c / 128, in = c % 128;
            const uint64_t four = load64(p + half * 64 + in % 64) >> (in < 64 ? 0 : 4) & LOW4;
            const uint64_t two = load64(p + 128 + half * 32 + in % 32) >> (2 * (in / 32)) & TWO;
            put_bytes(out, (four | two << 4) + 96 * BIT);
        }
    }
};

template <class K>
void pack_super(const uint8_t* rows, int64_t n, int64_t k, int64_t nb, uint8_t* codes, float* scale, float* low) {
    const int64_t supers = k / 256, lanes = least(LANES, n - nb * LANES), lines = 256 * K::BITS / 32;
    codes += nb * supers * lines * 64;
    scale += nb * supers * K::GROUPS * LANES;
    if (low) low += nb * supers * K::GROUPS * LANES;
    if (lanes < LANES) {                                            // rows that are not there
        const size_t groups = static_cast<size_t>(supers * K::GROUPS * LANES) * 4;
        std::memset(codes, 0, static_cast<size_t>(supers * lines * 64));
        std::memset(scale, 0, groups);
        if (low) std::memset(low, 0, groups);
    }
    for (int64_t s = 0; s < supers; s++)
        for (int64_t lane = 0; lane < lanes; lane++) {
            const int64_t group = s * K::GROUPS * LANES + lane;
            K::unpack(rows + ((nb * LANES + lane) * supers + s) * K::SIZE, codes + s * lines * 64 + lane * 4, scale + group,
                      low ? low + group : nullptr);
        }
}

}  // namespace
}  // namespace gainz
