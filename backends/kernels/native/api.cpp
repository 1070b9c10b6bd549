// The C interface: contexts, choice of the instruction set, programs of instructions. Packing is in pack.cpp.
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

}  // namespace gainz

using namespace gainz;
#define API extern "C" __attribute__((visibility("default")))

API int64_t gainz_abi() { return ABI; }

// Threads for any number of contexts. Null: too many, or no memory.
API Pool* gainz_pool_open(int64_t threads) {
    if (threads < 1 || threads > 1024) return nullptr;
    try { return new Pool(static_cast<int>(threads)); } catch (...) { return nullptr; }
}

API void gainz_pool_close(Pool* pool) { delete pool; }

// Null: this processor lacks what the library was built for, or there is no memory. The pool outlives the context.
API Context* gainz_open(Pool* pool) {
    const Kernels* found = kernels();
    Context* c = found && pool ? new (std::nothrow) Context{} : nullptr;
    if (!c) return nullptr;
    c->pool = pool;
    c->threads = pool->threads();
    c->kernels = found;
    c->own = new (std::nothrow) Scratch[static_cast<size_t>(c->threads)];
    if (c->own) return c;
    delete c;
    return nullptr;
}

API void gainz_close(Context* c) {
    for (int i = 0; i < c->threads; i++) std::free(c->own[i].data);
    std::free(c->shared.data);
    std::free(c->gathered.data);
    std::free(c->gates.data);
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
