// The C interface: contexts, choice of the instruction set, programs of instructions, packing of codes.
#include <cstdlib>
#include <cstring>
#include <new>

#include "abi.h"
#include "pool.h"

namespace gainz_avx512 { extern const gainz::Kernels table; }
namespace gainz_avx2 { extern const gainz::Kernels table; }
namespace gainz_avxvnni { extern const gainz::Kernels table; }
namespace gainz_neon { extern const gainz::Kernels table; }
namespace gainz_portable { extern const gainz::Kernels table; }

namespace gainz {

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

static const Kernels* named(const char* isa) {
#if defined(GAINZ_X86)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
                     && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx512 && (!*isa || !std::strcmp(isa, "avx512"))) return &gainz_avx512::table;
#if defined(GAINZ_AVX2)
    if (avx2 && (!*isa || !std::strcmp(isa, "avx2"))) return &gainz_avx2::table;
#endif
    (void)avx2;
#endif
#if defined(GAINZ_NEON)
    if (!*isa || !std::strcmp(isa, "neon")) return &gainz_neon::table;
#endif
#if defined(GAINZ_PORTABLE)
    if (!*isa || !std::strcmp(isa, "portable")) return &gainz_portable::table;
#endif
    return nullptr;
}

// bytes of [n, k] codes → a packed block of 16 rows; columns beyond k or rows beyond n are zeros
static void pack_block(const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather, int64_t bits, int shift,
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

}  // namespace gainz

using namespace gainz;
#define API extern "C" __attribute__((visibility("default")))

API int64_t gainz_abi() { return ABI; }

// isa "": the best this CPU has. Null: this CPU or this build lacks it.
API Context* gainz_open(const char* isa, int64_t threads) {
    const Kernels* kernels = named(isa);
    if (!kernels || threads < 1 || threads > 1024) return nullptr;
    Context* c = new (std::nothrow) Context{};
    if (!c) return nullptr;
    c->threads = static_cast<int>(threads);
    c->kernels = kernels;
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

API void gainz_pack(Context* c, const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather, int64_t bits,
                    int64_t shift, uint8_t* out) {
    auto job = [&](int64_t nb, int) {
        pack_block(codes, n, k, padded, gather, bits, static_cast<int>(shift), nb, out + nb * padded * LANES * bits / 8);
    };
    parallel(*c->pool, ceil_div(n, LANES), job);
}
