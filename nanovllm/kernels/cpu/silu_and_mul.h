// The activation of a gated feed-forward layer: silu(gate) * up, or gelu(gate) * up; and the gate of
// an attention layer's output.

#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "scalar.h"

namespace {

// 1 + exp(-x), the divisor in sigmoids. exp(-x) is computed as twice its half: `exp2_of` ends at
// 2^127.5, float32 at 2^128.
inline float sigmoid_divisor(float x) {
    return 1.0f + 2 * exp2_of(std::min(-x * LOG2E - 1, 128.0f));
}

template <typename T, typename Divisor>
inline void gate_and_mul(const T* x, int64_t x_stride, T* out, int64_t rows, int64_t size,
                         int64_t threads, const Divisor& divisor) {
    for_each_row(rows, size, threads, [&](int64_t row) {
        const T* gate = x + row * x_stride;
        const T* up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float g = widen(gate[i]);
            to[i] = narrow<T>(round_to<T>(g / divisor(g)) * widen(up[i]));
        }
    });
}

template <typename T>
void silu_and_mul(const T* x, int64_t x_stride, T* out, int64_t rows, int64_t size,
                  int64_t threads) {
    gate_and_mul(x, x_stride, out, rows, size, threads,
                 [](float g) { return sigmoid_divisor(g); });
}

// The approximation of gelu by tanh: g * (1 + tanh(u)) / 2 is g / (1 + exp(-2 u)).
template <typename T>
void gelu_and_mul(const T* x, int64_t x_stride, T* out, int64_t rows, int64_t size,
                  int64_t threads) {
    constexpr float TWICE_ROOT = 1.59576912f;  // 2 * sqrt(2 / pi)
    gate_and_mul(x, x_stride, out, rows, size, threads, [](float g) {
        return sigmoid_divisor(TWICE_ROOT * (g + 0.044715f * g * g * g));
    });
}

// x *= sigmoid(gate), which is rounded first.
template <typename T>
void sigmoid_and_mul(T* x, int64_t x_stride, const T* gates, int64_t gate_stride, int64_t rows,
                     int64_t size, int64_t threads) {
    for_each_row(rows, size, threads, [&](int64_t row) {
        const T* gate = gates + row * gate_stride;
        T* to = x + row * x_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float opened = round_to<T>(1.0f / sigmoid_divisor(widen(gate[i])));
            to[i] = narrow<T>(widen(to[i]) * opened);
        }
    });
}

}  // namespace
