// Plain bfloat16 weights in pairs of inputs, as processors with units for bfloat16 multiply them.
//
// A weight is divided into units of 32 inputs and 32 outputs. The units of a tile of 32 outputs
// follow each other in memory, in the order of their inputs; zeros fill up the last ones.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scalar.h"
#include "vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int UNIT_INPUTS = 32, UNIT_OUTPUTS = 32;
constexpr int HALF = UNIT_OUTPUTS / 2;

struct Pair {
    bf16 first, second;  // the weights of two inputs, which follow each other
};
typedef Pair Unit[2][UNIT_INPUTS / 2][HALF];
constexpr int UNIT_LINES = sizeof(Unit) / CACHE_LINE;

// Rows, which have the inputs of whole units, and the weight that they are multiplied by.
struct PairProduct {
    const Unit* units;  // [tiles, num_units]
    int64_t num_units, outputs;
    const bf16* bias;  // [outputs], or null
    const bf16* x;
    int64_t stride, rows;
    bf16* out;  // [rows, outputs]

    int64_t inputs() const { return num_units * UNIT_INPUTS; }
    int64_t tiles() const { return (outputs + UNIT_OUTPUTS - 1) / UNIT_OUTPUTS; }
    const Unit* tile(int64_t index) const { return units + index * num_units; }

    // Add the bias to the sums of `count` rows of a tile, from `row` on, and round them.
    void write(const float (*sums)[UNIT_OUTPUTS], int64_t tile, int64_t row, int64_t count) const {
        const int64_t start = tile * UNIT_OUTPUTS;
        const int64_t width = std::min<int64_t>(UNIT_OUTPUTS, outputs - start);
        alignas(CACHE_LINE) float added[UNIT_OUTPUTS] = {};
        for (int64_t n = 0; bias && n < width; n++) added[n] = widen(bias[start + n]);
        for (int64_t r = 0; r < count; r++) {
            bf16 rounded[UNIT_OUTPUTS];
            bf16* to = out + (row + r) * outputs + start;
            round(sums[r], added, width == UNIT_OUTPUTS ? to : rounded);
            if (width < UNIT_OUTPUTS) std::memcpy(to, rounded, width * sizeof(bf16));
        }
    }

private:
    static void round(const float* sums, const float* added, bf16* to) {
#ifdef __AVX512BF16__
        const __m512 low = (__m512)(load(sums) + load(added));
        const __m512 high = (__m512)(load(sums + HALF) + load(added + HALF));
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
        for (int n = 0; n < UNIT_OUTPUTS; n++) to[n] = narrow<bf16>(sums[n] + added[n]);
#endif
    }
};

}  // namespace
