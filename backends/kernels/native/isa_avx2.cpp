// AVX2 with FMA and F16C: Haswell, Zen 1 and later.
#define GAINZ_NS gainz_avx2
#define GAINZ_NAME "avx2"
namespace GAINZ_NS { constexpr int TILE = 4; }
#include "simd_avx2.h"
#include "isa.h"
