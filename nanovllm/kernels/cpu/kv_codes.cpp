// The kernels of a quantized KV cache, as a library that is compiled when one of them is called.
//
// T is the type of the tensors, float or bf16, as in kernels.cpp.

#include "attention.h"
#include "kv_codes.h"

extern "C" {
void* attention_codes_float32 = (void*)&attention<float, e4m3>;
void* attention_codes_bfloat16 = (void*)&attention<bf16, e4m3>;
void* norm_rope_store_codes_float32 = (void*)&norm_rope_store_codes<float>;
void* norm_rope_store_codes_bfloat16 = (void*)&norm_rope_store_codes<bf16>;
void* norm_rope_store_codes_wide_bfloat16 = (void*)&norm_rope_store_codes<bf16, float>;
}
