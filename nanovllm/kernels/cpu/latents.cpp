// Attention to latent rows, which are keys of all heads and, in part, their values: as a library
// that is compiled when it is called. Its rows are wider than other keys.

#define MOST_COLUMNS 1024
#include "attention.h"

extern "C" {
void* attention_latents_float32 = (void*)&attention<float, float, true>;
void* attention_latents_bfloat16 = (void*)&attention<bf16, bf16, true>;
int64_t latent_state_bytes = sizeof(State);
}
