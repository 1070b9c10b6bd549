// AVX-512 with VNNI: Ice Lake, Sapphire Rapids, Zen 4 and later.
#define GAINZ_NS gainz_avx512
#define GAINZ_NAME "avx512-vnni"
namespace GAINZ_NS { constexpr int TILE = 8; }
#include "simd_avx512.h"
#include "isa.h"
