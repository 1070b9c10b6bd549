// AArch64 with the dot-product extension: Apple M1, Cortex-A76, Neoverse N1 and later.
#define GAINZ_NS gainz_neon
#define GAINZ_NAME "neon-dotprod"
namespace GAINZ_NS { constexpr int TILE = 4; }
#include "simd_neon.h"
#include "isa.h"
