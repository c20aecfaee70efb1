// Adapters, as a separate library: an engine without adapters does not wait for its compilation
// when it starts.

#include "lora.h"

extern "C" {
void* lora_down_float32 = (void*)&lora_down<float>;
void* lora_down_bfloat16 = (void*)&lora_down<bf16>;
void* lora_up_float32 = (void*)&lora_up<float>;
void* lora_up_bfloat16 = (void*)&lora_up<bf16>;
void* group_rows_any = (void*)&group_rows;
int64_t block_rows = BLOCK_ROWS;
}
