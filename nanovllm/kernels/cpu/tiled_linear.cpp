// Linear layers, as a separate library: if oneDNN multiplies all matrices, an engine does not wait
// for its compilation when it starts.

#include "pair_linear.h"
#include "tiled_linear.h"

extern "C" {
void* tiled_linear_float32 = (void*)&any_linear<float>;
void* tiled_linear_bfloat16 = (void*)&any_linear<bf16>;
void* heads_linear_float32 = (void*)&heads_linear<float>;
void* heads_linear_bfloat16 = (void*)&heads_linear<bf16>;
int64_t tile_outputs = WIDTH;
int64_t step_inputs = STEP;
int64_t max_depth = MAX_DEPTH;
int64_t e4m3_unit = int64_t(E4m3::UNIT);
#ifdef PAIRS_BY_AMX
int64_t unit_size = has_amx() ? UNIT_INPUTS : 0;
#else
int64_t unit_size = 0;
#endif
#ifdef PAIRS_BY_VECTORS
int64_t vector_unit_size = UNIT_INPUTS;
#else
int64_t vector_unit_size = 0;
#endif
}
