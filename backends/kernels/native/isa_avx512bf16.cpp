// AVX-512 with VNNI and BF16: Zen 4, Cooper Lake, Sapphire Rapids and later.
#define GAINZ_NS gainz_avx512bf16
#define GAINZ_NAME "avx512-bf16"
#define GAINZ_PAIRED_DOT
namespace GAINZ_NS { constexpr int TILE = 8; }
#include "simd_avx512bf16.h"
#include "isa.h"
