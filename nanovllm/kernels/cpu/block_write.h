// Write the outputs of linear layers with weights in blocks.

#pragma once

#include <algorithm>
#include <cstdint>

#include "block_kinds.h"
#include "scalar.h"

namespace {

// Write the outputs from `start` on: totals [rows, WIDTH] and their bias, rounded once.
template <typename T, int WIDTH>
inline void write_outputs(const float (*totals)[WIDTH], const Blocks& weight, int64_t start,
                          const T* bias, int64_t rows, T* out) {
    const int count = int(std::min<int64_t>(WIDTH, weight.outputs - start));
    for (int64_t row = 0; row < rows; row++)
        for (int n = 0; n < count; n++)
            out[row * weight.outputs + start + n] =
                narrow<T>(totals[row][n] + (bias ? widen(bias[start + n]) : 0.0f));
}

}  // namespace
