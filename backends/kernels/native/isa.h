// The ops of one instruction set, as a table. Included last by each isa_*.cpp, whose namespace keeps its code apart: an
// inline function shared by name could be linked from the wrong file and stop an older CPU.
#pragma once
#include "pool.h"

#include "rows.h"
#include "matmul.h"
#include "wide.h"
#include "dense.h"
#include "linear.h"
#include "gated.h"
#include "attention.h"
#if defined(GAINZ_PAIRED_DOT)
#include "paired.h"
#endif
#include "attend.h"
#include "scan.h"
#include "chain.h"

namespace GAINZ_NS {
extern const Kernels table;
const Kernels table = {GAINZ_NAME, {embed, norm, act, matmul, norm_add, glu, attend, logits, scan, gated, chain}};
}  // namespace GAINZ_NS
