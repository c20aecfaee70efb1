// RMS norms of groups of channels, with a gate before or after.

#pragma once

#include "rms_norm.h"
#include "silu_and_mul.h"
#include "state_rows.h"

namespace {

// The norms of x [rows, groups, size]: of silu(gate) * x, or multiplied by silu(gate). The weights
// of a group follow those of the last one after `weight_stride`, which is 0 for common weights.
template <typename T>
void gated_norm(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, const T* weight,
                int64_t weight_stride, T* out, int64_t rows, int64_t groups, int64_t size,
                float eps, int64_t gate_first, int64_t threads) {
    for_each_row(rows * groups, size, threads, [&](int64_t i) {
        const int64_t row = i / groups, group = i % groups;
        const T *in = x + row * x_stride + group * size, *w = weight + group * weight_stride;
        const T* opens = gate + row * gate_stride + group * size;
        T* to = out + i * size;
        float *opened = scratch(2 * size), *values = opened + size;
#pragma omp simd
        for (int64_t j = 0; j < size; j++) {
            const float g = widen(opens[j]);
            opened[j] = g / sigmoid_divisor(g);
        }
#pragma omp simd
        for (int64_t j = 0; j < size; j++) values[j] = widen(in[j]) * (gate_first ? opened[j] : 1);
        const float scale = norm_scale(values, size, eps);
#pragma omp simd
        for (int64_t j = 0; j < size; j++) {
            const float normed = round_to<T>(widen(w[j]) * round_to<T>(values[j] * scale));
            to[j] = narrow<T>(normed * (gate_first ? 1 : opened[j]));
        }
    });
}

}  // namespace
