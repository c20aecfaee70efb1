// The kernels of layers with states, as a separate library: other models do not wait for its
// compilation.
//
// T is the type of the tensors, float or bf16. All arithmetic is float32, with the same roundings
// as in kernels/plain/. Each number adds up its products in an order that depends only on the sizes
// of a layer: not on the rest of the batch, on the number of threads, nor on the steps into which a
// sequence is divided. So the states after a token are equal in all of these, to the last bit.

#include "causal_conv.h"
#include "gated_delta.h"
#include "gated_norm.h"
#include "state_space.h"

extern "C" {
void* causal_conv_float32 = (void*)&causal_conv<float>;
void* causal_conv_bfloat16 = (void*)&causal_conv<bf16>;
void* channel_delta_float32 = (void*)&any_delta<float, true>;
void* channel_delta_bfloat16 = (void*)&any_delta<bf16, true>;
void* gated_delta_float32 = (void*)&any_delta<float, false>;
void* gated_delta_bfloat16 = (void*)&any_delta<bf16, false>;
void* gated_norm_float32 = (void*)&gated_norm<float>;
void* gated_norm_bfloat16 = (void*)&gated_norm<bf16>;
void* state_space_float32 = (void*)&state_space<float>;
void* state_space_bfloat16 = (void*)&state_space<bf16>;
int64_t most_taps = MOST_TAPS;
}
