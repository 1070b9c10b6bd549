// What Python and the kernels agree on: descriptors made of 64-bit words, and instructions of 12 words.
// Knows layouts; computes nothing. Every pointer is borrowed: Python keeps the memory alive.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gainz {

static_assert(sizeof(void*) == 8, "descriptors hold pointers in 64-bit words");

constexpr int64_t ABI = 5;         // raised whenever a descriptor or an instruction changes
constexpr int LANES = 16;          // weight rows side by side in a packed block
constexpr int BLOCK = 32;          // activations that share one scale
constexpr int CHAIN_ROWS = 16;     // most rows of a chain's first pass
constexpr int PAGE_CHUNK = 128;    // context tokens of one partial softmax; aligned to the sequence's start

enum Type : int64_t { F32 = 0, F16 = 1, BF16 = 2, U8 = 3 };
enum Offset : int64_t { CENTER = 0, ZERO = 1, BIAS = 2 };   // zero = 2^(bits-1) | u8 per group | float per group
enum Glu : int64_t { SILU = 0, GELU_TANH = 1, GELU = 2 };
enum Op : int64_t { EMBED, NORM, ACT, MATMUL, NORM_ADD, GLU, ATTEND, LOGITS, SCAN, GATED, CHAIN, OPS };

// Quantized: codes [n/16][k/32][16 * 32 * bits / 8] where a 64-byte line holds, for 16 rows, 4 codes of 8 bits, or 8 of 4
// bits:
// k … k+3 in the low nibbles, k+4 … k+7 in the high ones. scale, offset: [n/16][groups][16]. Dense: codes is [n/16][k][16]
// of `type`; bfloat16 in pairs of columns, [n/16][k/2][16][2].
struct Linear {
    const uint8_t* codes; const void* scale; const void* offset; const float* bias;
    const int32_t* gather;          // [padded] input feature of each packed column, -1 = nothing; null = in order
    int64_t n, k, padded;           // rows, input features, packed columns (a multiple of 32; dense: of 2 for BF16)
    int64_t bits;                   // 4 or 8; 0 = dense
    int64_t type;                   // dense: F32, F16, BF16
    int64_t segment;                // 16: scales change every 16 columns; 32: every `blocks` blocks
    int64_t blocks, groups;         // blocks of 32 in a group (segment 32); groups in a row
    int64_t wide;                   // scale and BIAS offset are float32, else float16
    int64_t offset_kind;
};

struct Act {                        // rows made ready for a matrix of k input features
    float* rows;                    // [R, k]
    int8_t* q;                      // [R, padded], null: no quantized matrix follows, or it takes floats
    float *scale, *sum32, *sum16;   // [R, padded/32], [R, padded/32], [R, padded/16]: scale, scale * sum of codes
    int32_t *minus8, *minus8_16;    // -8 * sum of codes, by 32 and by 16: what a centred 4-bit code owes
    int64_t k, padded;
};

struct Batch {
    const int64_t* positions; const int32_t *starts, *lengths, *pages; const int64_t* slots;
    const float *cos, *sin;         // [T, R, half]
    int64_t sequences, rows, page_stride, half;
};

struct KV {
    void *k, *v; float *k_scale, *k_low, *v_scale, *v_low;
    int64_t type, page, heads, key_width, value_width;
};

struct Spec {
    int64_t heads, kv_heads, head_dim, window, rope;   // window 0: all; rope -1: no rotation
    const float *q_norm, *k_norm; double scale, softcap, eps;
    int64_t paired;                 // 1: bfloat16 will do, where the processor multiplies it
};

// Ids that a model guesses one after another in the cache of one sequence. Programs: a pass, its norm and its head, the first of
// `rows` ids, the next of one; both read `ids` and `states` (null: none), and leave logits and, in a stream, the last row.
struct Chain {
    // of one call
    const int64_t* first; int64_t first_lines; const float* first_stream;
    const float* given; float* states;                      // [rows, width] that belong to the ids; where programs read them
    const int32_t* pages; int64_t before, rows;             // `before` tokens are in the cache
    int64_t most, known;                                    // ids wanted (0: one pass, nothing is chosen); from id `known` on they are not the caller's
    double temperature; const uint64_t* places;             // 0: the likeliest; the noise of each place
    int64_t top_k; double top_p, min_p;                     // 0, 1, 0: all
    const double *edges, *rates, *needs; int64_t bands;     // bands 0: made to the end. Else an id is followed by another while the
                                                            // product of rates[band of its probability] exceeds needs[ids so far]
    // of the model
    const int64_t* next; int64_t next_lines; const float* next_stream; int64_t width;       // of a row
    int64_t* ids; Batch* batch;
    const float *cos, *sin; int64_t half, page;             // [positions, half]
    const float* logits; const int64_t* names; int64_t columns; int32_t* found;     // names: null: a column is its id; found [columns]
    int64_t* out; double* sure;
    int64_t made, passes;                                   // results; made -1: the logits were no numbers
};

class Pool;

struct Scratch {                    // grows, never shrinks, freed with the context
    char* data = nullptr; size_t size = 0;
    char* need(size_t bytes);
};

struct Context {
    Pool* pool; const struct Kernels* kernels; int threads;
    Scratch shared, gathered, gates; Scratch* own;      // own: one for each thread
};

typedef void (*Kernel)(Context&, const int64_t* args);
struct Kernels { const char* name; Kernel run[OPS]; };

template <class T> static inline T* ptr(int64_t word) { return reinterpret_cast<T*>(word); }
static inline double real(int64_t word) { union { int64_t i; double d; } u; u.i = word; return u.d; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gainz
