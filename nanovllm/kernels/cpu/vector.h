// The processor's vectors, and sizes in attention that depend on them.

#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>

#include "scalar.h"

#ifndef MOST_COLUMNS  // of a key: a library of larger keys defines it
#define MOST_COLUMNS 512
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
constexpr int BLOCK = 8;  // rows of a product: their sums stay in registers
#else
constexpr int LANES = 8;
constexpr int BLOCK = 4;
#endif
constexpr int KEYS = 32;  // keys that are computed together: in float32 they fit the L1 cache
constexpr int FEW = 16;   // up to this many rows read the keys directly from memory
constexpr int TILE = 2 * LANES;  // rows of a tile, for sequences of more rows
constexpr int MAX_HEAD_DIM = MOST_COLUMNS;
constexpr int CACHE_LINE = 64;
constexpr float NO_SCORE = -1e30f;  // the maximum over no keys: finite, as inf - inf is NaN

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

inline Vec& vec(float* x) { return *(Vec*)x; }
inline Vec load(const float* x) { return *(const Vec*)x; }
inline Vec load(const bf16* x) {
#ifdef __AVX512F__  // gcc 12 widens the halves one by one
    const __m256i bits = _mm256_loadu_si256((const __m256i*)x);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    return (Vec)(__builtin_convertvector(*(const HalfVec*)x, IntVec) << 16);
#endif
}

// `load` returns codes times 2^-120. Factors of 2^60 before and after a product of codes stay far
// from infinity.
constexpr float CODE_FACTOR = 0x1p60f;

inline float sum_of(Vec x) {
    IntVec lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int half = LANES / 2; half; half /= 2) x += __builtin_shuffle(x, lanes ^ half);
    return x[0];
}

}  // namespace
