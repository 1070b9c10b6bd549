// AVX2 with 256-bit VNNI: Alder Lake and later, which lack AVX-512. GAINZ_EVEX (tests) takes AVX-512VL's form of the same
// instruction, so that this path runs on a processor that has only that one.
#define GAINZ_NS gainz_avxvnni
#define GAINZ_NAME "avx-vnni"
#ifdef GAINZ_EVEX
#define GAINZ_VNNI256 _mm256_dpbusd_epi32
#else
#define GAINZ_VNNI256 _mm256_dpbusd_avx_epi32
#endif
namespace GAINZ_NS { constexpr int TILE = 4; }
#include "simd_avx2.h"
#include "isa.h"
