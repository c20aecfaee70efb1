// Write the outputs of linear layers with weights in blocks.

#pragma once

#include <algorithm>
#include <cstdint>

#include "block_kinds.h"
#include "scalar.h"
#include "vector.h"

namespace {

constexpr int ROWS_AHEAD = 16;  // rows of outputs that are prefetched

inline void store(Vec x, float* to) { vec(to) = x; }
inline void store(Vec x, bf16* to) {  // to the nearest, ties to even
    typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
    const Bits bits = (Bits)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Bits is_nan = (Bits)(x != x);
    const HalfVec halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), HalfVec);
    *(HalfVec*)to = halves;
}

// Write the outputs of tiles from `tile` on: totals [tiles, padded rows, OUTPUTS] and their bias,
// rounded once.
template <typename T>
inline void write_outputs(const float (*totals)[OUTPUTS], int64_t outputs, int64_t tile,
                          int64_t tiles, const T* bias, int64_t rows, int64_t padded, T* out) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t start = (tile + t) * OUTPUTS;
            const int64_t count = std::min<int64_t>(OUTPUTS, outputs - start);
            const float* from = totals[t * padded + row];
            T* to = out + row * outputs + start;
            __builtin_prefetch(to + ROWS_AHEAD * outputs, 1);
            if (count == OUTPUTS) {
                for (int n = 0; n < OUTPUTS; n += LANES) {
                    const Vec sum = load(from + n);
                    store(bias ? sum + load(bias + start + n) : sum, to + n);
                }
            } else {
                for (int64_t n = 0; n < count; n++)
                    to[n] = narrow<T>(from[n] + (bias ? widen(bias[start + n]) : 0.0f));
            }
        }
}

}  // namespace
