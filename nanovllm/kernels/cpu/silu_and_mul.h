// The activation of a gated feed-forward layer: silu(gate) * up.

#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "scalar.h"

namespace {

template <typename T>
void silu_and_mul(const T* x, int64_t x_stride, T* out, int64_t rows, int64_t size,
                  int64_t threads) {
    for_each_row(rows, size, threads, [&](int64_t row) {
        const T* gate = x + row * x_stride;
        const T* up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = widen(gate[i]);
            // exp(-g), computed as twice its half: `exp2_of` ends at 2^127.5, float32 at 2^128.
            float e = 2 * exp2_of(std::min(-g * LOG2E - 1, 128.0f));
            to[i] = narrow<T>(round_to<T>(g / (1.0f + e)) * widen(up[i]));
        }
    });
}

}  // namespace
