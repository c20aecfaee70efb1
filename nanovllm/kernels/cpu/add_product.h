// Sums of products, of vectors or of numbers, that are rounded once for each product.

#pragma once

#ifdef __FMA__
#include <immintrin.h>
#endif

#include "vector.h"

namespace {

inline Vec all_lanes(float x) { return x - Vec{}; }

// sum + x * y, rounded once. In loops with one sum, GCC also rounds x * y for some processors.
inline Vec add_product(Vec sum, Vec x, Vec y) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
    return sum + x * y;
#endif
}

inline float add_product(float sum, float x, float y) {
#ifdef __FMA__
    return __builtin_fmaf(x, y, sum);
#else
    return sum + x * y;
#endif
}

}  // namespace
