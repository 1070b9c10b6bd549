// The C interface: contexts, choice of the instruction set, programs of instructions, packing of codes.
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "abi.h"
#include "pool.h"

namespace gainz_avx512 { extern const gainz::Kernels table; }
namespace gainz_avx512bf16 { extern const gainz::Kernels table; }
namespace gainz_avx2 { extern const gainz::Kernels table; }
namespace gainz_avxvnni { extern const gainz::Kernels table; }
namespace gainz_neon { extern const gainz::Kernels table; }
namespace gainz_portable { extern const gainz::Kernels table; }

namespace gainz {

#if defined(__x86_64__)                     // what older compilers' __builtin_cpu_supports does not know
static inline bool f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
static inline bool avx512_bf16() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
static inline bool avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif
#if defined(GAINZ_NEON)
static bool dotprod() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;   // HWCAP_ASIMDDP
#else
    return true;                            // every AArch64 Mac has it
#endif
}
#endif

char* Scratch::need(size_t bytes) {
    if (bytes <= size) return data;
    const size_t rounded = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    char* fresh = static_cast<char*>(std::aligned_alloc(4096, rounded));
    if (!fresh) throw std::bad_alloc();
    if (size) std::memcpy(fresh, data, size);
    std::free(data);
    data = fresh;
    size = rounded;
    return data;
}

// A library holds one instruction set; whether this processor has it is asked here, whatever the builder thought.
static const Kernels* kernels() {
#if defined(GAINZ_AVX512) || defined(GAINZ_AVX512BF16) || defined(GAINZ_AVXVNNI) || defined(GAINZ_AVX2)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq")
                     && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    (void)avx512;
#if defined(GAINZ_AVX512BF16)
    return avx2 && avx512 && avx512_bf16() ? &gainz_avx512bf16::table : nullptr;
#elif defined(GAINZ_AVX512)
    return avx2 && avx512 ? &gainz_avx512::table : nullptr;
#elif defined(GAINZ_AVXVNNI) && defined(GAINZ_EVEX)
    return avx2 && avx512 ? &gainz_avxvnni::table : nullptr;
#elif defined(GAINZ_AVXVNNI)
    return avx2 && avx_vnni() ? &gainz_avxvnni::table : nullptr;
#else
    return avx2 ? &gainz_avx2::table : nullptr;
#endif
#elif defined(GAINZ_NEON)
    return dotprod() ? &gainz_neon::table : nullptr;
#else
    return &gainz_portable::table;
#endif
}

// bytes of [n, k] codes → a packed block of 16 rows; columns beyond k or rows beyond n are zeros
static void pack_block(const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather, int64_t bits,
                       int shift,
                       int64_t nb, uint8_t* out) {
    const int64_t line = bits == 4 ? 8 : 4;
    std::memset(out, 0, static_cast<size_t>(padded * LANES * bits / 8));
    for (int64_t lane = 0; lane < LANES && nb * LANES + lane < n; lane++) {
        const uint8_t* row = codes + (nb * LANES + lane) * k;
        for (int64_t j = 0; j < padded; j += line) {
            uint8_t v[8] = {0};
            for (int64_t i = 0; i < line; i++) {
                const int64_t from = gather ? gather[j + i] : j + i < k ? j + i : -1;
                if (from >= 0) v[i] = static_cast<uint8_t>(row[from] + shift);
            }
            uint8_t* to = out + j / line * 64 + lane * 4;
            for (int i = 0; i < 4; i++) to[i] = bits == 4 ? static_cast<uint8_t>(v[i] | v[i + 4] << 4) : v[i];
        }
    }
}

// rows of T [n, k] → blocks of 16 side by side, [k][16], or [k/2][16][2]; rows beyond n and an odd column's partner are zeros
template <class T, int PAIR>
static void pack_floats(const char* rows, int64_t n, int64_t k, int64_t nb, T* out) {
    constexpr int64_t STEP = 64;                    // columns at a time: the lines written stay in the L1 cache
    const int64_t padded = ceil_div(k, PAIR) * PAIR;
    if (n - nb * LANES < LANES || padded != k) std::memset(out, 0, static_cast<size_t>(padded * LANES) * sizeof(T));
    for (int64_t from = 0; from < k; from += STEP)
        for (int64_t lane = 0; lane < LANES && nb * LANES + lane < n; lane++) {
            const char* row = rows + (nb * LANES + lane) * k * static_cast<int64_t>(sizeof(T));
            const int64_t end = least(k, from + STEP);
            int64_t j = from;
            for (; j + PAIR <= end; j += PAIR)
                std::memcpy(out + (j * LANES + lane * PAIR), row + j * static_cast<int64_t>(sizeof(T)), sizeof(T) * PAIR);
            if (j < end) std::memcpy(out + (j * LANES + lane * PAIR), row + j * static_cast<int64_t>(sizeof(T)), sizeof(T));
        }
}

}  // namespace gainz

using namespace gainz;
#define API extern "C" __attribute__((visibility("default")))

API int64_t gainz_abi() { return ABI; }

// Null: this processor lacks what the library was built for, or there is no memory.
API Context* gainz_open(int64_t threads) {
    const Kernels* found = kernels();
    if (!found || threads < 1 || threads > 1024) return nullptr;
    Context* c = new (std::nothrow) Context{};
    if (!c) return nullptr;
    c->threads = static_cast<int>(threads);
    c->kernels = found;
    try {
        c->own = new Scratch[static_cast<size_t>(threads)];
        c->pool = new Pool(c->threads);
    } catch (...) { delete[] c->own; delete c; return nullptr; }
    return c;
}

API void gainz_close(Context* c) {
    delete c->pool;
    for (int i = 0; i < c->threads; i++) std::free(c->own[i].data);
    std::free(c->shared.data);
    std::free(c->gathered.data);
    delete[] c->own;
    delete c;
}

API const char* gainz_isa(Context* c) { return c->kernels->name; }

// instructions of 12 words: op, then its arguments. 0: done; 1: an unknown op; 2: no memory.
API int gainz_run(Context* c, const int64_t* program, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t* w = program + 12 * i;
        if (w[0] < 0 || w[0] >= OPS) return 1;
        try { c->kernels->run[w[0]](*c, w + 1); } catch (const std::bad_alloc&) { return 2; }
    }
    return 0;
}

API void gainz_pack(Context* c, const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather,
                    int64_t bits,
                    int64_t shift, uint8_t* out) {
    auto job = [&](int64_t nb, int) {
        pack_block(codes, n, k, padded, gather, bits, static_cast<int>(shift), nb, out + nb * padded * LANES * bits / 8);
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
