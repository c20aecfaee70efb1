// Weights in GGUF's blocks, as a separate library: other engines do not wait for its compilation
// when they start.

#include "block_amx.h"
#include "block_floats.h"
#include "block_integers.h"
#include "block_pack.h"

extern "C" {
void* tile_bytes_any = (void*)&tile_bytes;
void* arrange_blocks_any = (void*)&arrange_blocks;
void* block_integers_bfloat16 = (void*)&block_integers;
void* block_amx_bfloat16 = (void*)&block_amx;
void* block_floats_float32 = (void*)&block_floats<float>;
void* block_floats_bfloat16 = (void*)&block_floats<bf16>;
void* decode_tiles_bfloat16 = (void*)&decode_tiles<bf16>;
void* rows_of_blocks_float32 = (void*)&rows_of_blocks<float>;
void* rows_of_blocks_bfloat16 = (void*)&rows_of_blocks<bf16>;
int64_t outputs_of_tile = OUTPUTS;
int64_t blocks_by_amx = has_amx();
}
