// The CPU's kernels, as one library. library.py compiles and calls it; kernels/plain/ defines its
// results.
//
// T is the type of the tensors, float or bf16. All arithmetic is float32, with the same roundings
// as in kernels/plain/. A row's result depends only on the row, not on the rest of the batch or the
// number of threads. H query heads, KVH key heads, G = H / KVH, D head dimension.

#include "attention.h"
#include "mask.h"
#include "norm_rope_store.h"
#include "read_table.h"
#include "rms_norm.h"
#include "sample.h"
#include "silu_and_mul.h"
#ifdef __linux__
#include "pool.h"
#endif

// Python calls these functions: one of each kernel for each type.
#define EXPORT(kernel)                                \
    extern "C" {                                      \
    void* kernel##_float32 = (void*)&kernel<float>;   \
    void* kernel##_bfloat16 = (void*)&kernel<bf16>;   \
    }
EXPORT(rms_norm)
EXPORT(silu_and_mul)
EXPORT(gelu_and_mul)
EXPORT(sigmoid_and_mul)
EXPORT(norm_rope_store)
EXPORT(attention)
EXPORT(sample)

// The same with norms' weights in float32.
extern "C" {
void* rms_norm_wide_bfloat16 = (void*)&rms_norm<bf16, float>;
void* norm_rope_store_wide_bfloat16 = (void*)&norm_rope_store<bf16, float>;
}

// Functions without a tensor type, and the sizes that Python needs.
extern "C" {
#ifdef __linux__
void* pool = (void*)&run_in_pool;
#else
void* pool = nullptr;  // all work runs on PyTorch's threads
#endif
void* mask_any = (void*)&mask;
void* read_table_any = (void*)&read_table;
int64_t lanes = LANES;
int64_t few_rows = FEW;
int64_t tile_rows = TILE;
int64_t state_bytes = sizeof(State);
int64_t piece = PIECE;
}
