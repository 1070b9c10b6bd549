// No instruction set assumed.
#define GAINZ_NS gainz_portable
#define GAINZ_NAME "portable"
namespace GAINZ_NS { constexpr int TILE = 4; }
#include "simd_portable.h"
#include "isa.h"
