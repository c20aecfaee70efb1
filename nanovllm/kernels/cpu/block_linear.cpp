// Weights in GGUF's blocks, as a separate library: other engines do not wait for its compilation
// when they start.

#include "block_floats.h"
#include "block_pack.h"
#include "block_products.h"
#include "byte_products.h"

extern "C" {
void* tile_bytes_any = (void*)&tile_bytes;
void* arrange_blocks_any = (void*)&arrange_blocks;
void* block_linear_float32 = (void*)&block_floats<float>;
void* block_linear_bfloat16 = (void*)&block_rounded;
void* byte_linear_bfloat16 = (void*)&byte_linear;
void* weights_of_rows_float32 = (void*)&weights_of_rows<float>;
void* weights_of_rows_bfloat16 = (void*)&weights_of_rows<bf16>;
int64_t outputs_of_tile = OUTPUTS;
int64_t inputs_of_chunk = CHUNK;
}
