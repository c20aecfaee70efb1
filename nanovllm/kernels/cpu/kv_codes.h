// Write a quantized cache: e4m3 codes with a scale for each head of a token.

#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "norm_rope_store.h"
#include "parallel.h"
#include "scalar.h"
#include "vector.h"

namespace {

constexpr float LARGEST_CODE = 448.0f;
constexpr float SMALLEST_SCALE = 0x1p-100f;

// Codes times 2^-120. Without this function, GCC 12 widens the bytes of a vector one by one.
inline Vec load(const e4m3* x) {
#if defined(__AVX512F__)
    const IntVec wide = (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
    const IntVec wide = (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    IntVec wide;
    for (int i = 0; i < LANES; i++) wide[i] = int8_t(x[i].bits);
#endif
    return (Vec)(wide << CODE_SHIFT & CODE_BITS);
}

// The scale of a head, as in plain/kv_codes.py. The bits of a NaN are larger than all numbers'
// bits.
template <typename T>
inline bf16 scale_of(const T* x, int64_t size, float fixed) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; i++)
        largest = std::max(largest, bit_cast<uint32_t>(widen(x[i])) & 0x7fffffff);
    const float amax = bit_cast<float>(largest);
    if (amax != amax) return bf16{0x7fc0};
    const float exact = std::max(fixed > 0 ? fixed : amax / LARGEST_CODE, SMALLEST_SCALE);
    return bf16{uint16_t((bit_cast<uint32_t>(exact) + 0xffff) >> 16)};
}

// Round to the nearest code, ties to even. Numbers from 2^-6 on keep three bits of the mantissa.
// Smaller ones are rounded to a multiple of 2^-9, which is the last bit of floats from 2^14 on.
inline e4m3 narrow_code(float x) {
    const uint32_t sign = bit_cast<uint32_t>(x) >> 24 & 0x80;
    const uint32_t size = std::min(bit_cast<uint32_t>(x) & 0x7fffffff, 0x43e00000u);  // 448
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(size) + 0x1p14f) - 0x46800000;
    const uint32_t code = size < 0x3c800000 ? subnormal : normal;
    return e4m3{uint8_t((x != x ? 0x7f : code) | sign)};
}

// Write the codes of a head, and the values of these codes. Returns the scale.
template <typename T>
__attribute__((noinline)) bf16 quantize(const T* x, int64_t size, float fixed, e4m3* codes, T* kept) {
    const bf16 rounded = scale_of(x, size, fixed);
    const float scale = widen(rounded);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        codes[i] = narrow_code(widen(x[i]) / scale);
        kept[i] = narrow<T>(widen(codes[i]) * scale);
    }
    return rounded;
}

// A step's keys or values, and where the cache stores their codes and scales.
template <typename T>
struct Codes {
    e4m3* cache;  // null: nothing is stored
    bf16* scales;
    float fixed;
    int64_t kv_heads, head_dim, block_size;

    // Quantize a token's heads x, and write the cached values to `kept`, which may be x.
    void store(const T* x, T* kept, int64_t slot) const {
        e4m3 codes[MAX_HEAD_DIM];
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t at = head * head_dim;
            const bf16 scale = quantize(x + at, head_dim, fixed, codes, kept + at);
            if (!cache || slot < 0) continue;
            std::memcpy(cache + (slot * kv_heads + head) * head_dim, codes, head_dim);
            const int64_t first = (slot / block_size * kv_heads + head) * block_size;
            scales[first + slot % block_size] = scale;
        }
    }
};

// norm_rope_store for a cache of codes. It returns keys and values [tokens, KVH, D] as cached.
template <typename T, typename W = T>
void norm_rope_store_codes(const T* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                           int64_t rope_stride, const W* q_weight, const W* k_weight, float eps,
                           T* q, T* k, T* v, e4m3* k_cache, e4m3* v_cache, bf16* k_scales,
                           bf16* v_scales, float k_fixed, float v_fixed, int64_t block_size,
                           const int64_t* slots, int64_t tokens, int64_t q_heads,
                           int64_t kv_heads, int64_t head_dim, int64_t half, int64_t threads) {
    const int64_t q_size = q_heads * head_dim, kv_size = kv_heads * head_dim;
    const Codes<T> keys{k_cache, k_scales, k_fixed, kv_heads, head_dim, block_size};
    const Codes<T> values{v_cache, v_scales, v_fixed, kv_heads, head_dim, block_size};
    norm_rope_store<T, W>(qkv, qkv_stride, cos, sin, rope_stride, q_weight, k_weight, eps, q, k,
                          nullptr, nullptr, slots, tokens, q_heads, kv_heads, head_dim, half,
                          threads);
    for_each_row(tokens, 2 * kv_size, threads, [&](int64_t token) {
        keys.store(k + token * kv_size, k + token * kv_size, slots[token]);
        values.store(qkv + token * qkv_stride + q_size + kv_size, v + token * kv_size,
                     slots[token]);
    });
}

}  // namespace
