// RMSNorm, with or without the residual add before it.

#pragma once

#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "scalar.h"

namespace {

template <typename T>
inline float norm_scale(const T* x, int64_t size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

template <typename T, typename W>
inline void scale_by(const T* x, float scale, const W* weight, int64_t size, T* out) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(widen(x[i]) * scale * widen(weight[i]));
}

// The norm of x [rows, size], or with a residual, of the rounded sum, which is written to `total`.
// Weights are of the type W.
template <typename T, typename W = T>
void rms_norm(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
              const W* weight, T* out, T* total, int64_t rows, int64_t size, float eps,
              int64_t threads) {
    for_each_row(rows, size, threads, [&](int64_t row) {
        const T* in = x + row * x_stride;
        if (residual) {
            const T* other = residual + row * residual_stride;
            T* sum = total + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) sum[i] = narrow<T>(widen(in[i]) + widen(other[i]));
            in = sum;
        }
        scale_by(in, norm_scale(in, size, eps), weight, size, out + row * size);
    });
}

}  // namespace
