// Norm, rotate and store: from a step's projections to the inputs of attention.

#pragma once

#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "rms_norm.h"
#include "scalar.h"

namespace {

// Compute one head: the norm, if there is a weight, then a rotation of the pairs (i, i + half).
// Elements after the first 2 * half are not rotated.
template <typename T, typename W>
inline void norm_and_rotate(const T* x, const W* weight, float eps, const float* cos,
                            const float* sin, int64_t half, int64_t head_dim, T* out) {
    const float scale = weight ? norm_scale(x, head_dim, eps) : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float x1 = widen(x[i]), x2 = widen(x[half + i]);
        if (weight) {
            x1 = round_to<T>(x1 * scale * widen(weight[i]));
            x2 = round_to<T>(x2 * scale * widen(weight[half + i]));
        }
        out[i] = narrow<T>(x1 * cos[i] - x2 * sin[i]);
        out[half + i] = narrow<T>(x2 * cos[i] + x1 * sin[i]);
    }
    for (int64_t i = 2 * half; i < head_dim; i++)
        out[i] = weight ? narrow<T>(widen(x[i]) * scale * widen(weight[i])) : x[i];
}

// qkv [tokens, heads, D]: the last 2 * kv_heads of the heads are keys and values. The norms' weights
// are of the type W.
template <typename T, typename W = T>
void norm_rope_store(const T* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                     int64_t rope_stride, const W* q_weight, const W* k_weight, float eps, T* q,
                     T* k, T* k_cache, T* v_cache, const int64_t* slots, int64_t tokens,
                     int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t half,
                     int64_t threads) {
    const int64_t q_size = q_heads * head_dim, kv_size = kv_heads * head_dim;
    for_each_row(tokens, q_size + 2 * kv_size, threads, [&](int64_t token) {
        const T* in = qkv + token * qkv_stride;
        const float* c = cos + token * rope_stride;
        const float* s = sin + token * rope_stride;
        T* keys = k + token * kv_size;
        for (int64_t at = 0; at < q_size; at += head_dim)
            norm_and_rotate(in + at, q_weight, eps, c, s, half, head_dim, q + token * q_size + at);
        for (int64_t at = 0; at < kv_size; at += head_dim)
            norm_and_rotate(in + q_size + at, k_weight, eps, c, s, half, head_dim, keys + at);
        if (!k_cache || slots[token] < 0) return;
        const int64_t to = slots[token] * kv_size;
        std::memcpy(k_cache + to, keys, kv_size * sizeof(T));
        std::memcpy(v_cache + to, in + q_size + kv_size, kv_size * sizeof(T));
    });
}

}  // namespace
