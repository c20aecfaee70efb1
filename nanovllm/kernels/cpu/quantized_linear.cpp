// Linear layers with quantized weights, as a library of their own: models without them do not wait
// for its compilation.

#include "quantized_linear.h"

extern "C" {
void* quantized_linear_float32 = (void*)&quantized_linear<float>;
void* quantized_linear_bfloat16 = (void*)&quantized_linear<bf16>;
int64_t tile_outputs = WIDTH;
int64_t step_inputs = STEP;
int64_t max_depth = MAX_DEPTH;
int64_t e4m3_unit = int64_t(E4m3::UNIT);
}
