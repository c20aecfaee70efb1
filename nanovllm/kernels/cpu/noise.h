// The random numbers of sampling. kernels/plain/noise.py defines and explains them; library.py
// passes its constants to the compiler.

#pragma once

#include <cmath>
#include <cstdint>

#include "scalar.h"

namespace {

inline uint64_t rotate_left(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

// The key of a draw: XXH64 of the number of tokens as eight bytes, minus 2^63.
inline int64_t noise_key(uint64_t seed, uint64_t num_tokens) {
    uint64_t x = seed + NOISE_P5 + 8;
    x ^= rotate_left(num_tokens * NOISE_P2, 31) * NOISE_P1;
    x = rotate_left(x, 27) * NOISE_P1 + NOISE_P4;
    x = (x ^ x >> 33) * NOISE_P2;
    x = (x ^ x >> 29) * NOISE_P3;
    return int64_t(x ^ x >> 32 ^ NOISE_TOP_BIT);
}

// The logarithm of a token's exponential number, for the halves of the key.
inline float log_exponential(uint32_t low, uint32_t high, uint32_t id) {
    uint32_t x = ((id * NOISE_GOLDEN) ^ low) * NOISE_MIXER_1;
    x = (x ^ uint32_t(int32_t(x) >> 15)) + high;
    x *= NOISE_MIXER_2;
    x ^= uint32_t(int32_t(x) >> 15);
    const float u = std::fabs(float(int32_t(x))) * NOISE_SHRINK + NOISE_SMALLEST;
    // -log1p(-u): by its series where 1 - u would round away the differences of small times.
    const float series =
        u * (1.0f + u * (1.0f / 2 + u * (1.0f / 3 + u * (1.0f / 4 + u * (1.0f / 5)))));
    return log_of(u < 1.0f / 16 ? series : -log_of(1.0f - u));
}

}  // namespace
