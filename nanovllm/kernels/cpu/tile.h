// Attention of a tile: TILE rows of a sequence, each in one lane of the vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "context.h"
#include "scalar.h"
#include "vector.h"

namespace {

// c [rows, TILE] = a [rows, depth] @ b [depth, TILE], or c * shrink + a @ b. `rows` is a multiple
// of BLOCK; a's element (i, j) is at i * a_row + j * a_column.
template <bool ADD>
inline void multiply(float (*c)[TILE], const float* a, int64_t a_row, int64_t a_column,
                     const float (*b)[TILE], int rows, int depth, const float* shrink) {
    for (int row = 0; row < rows; row += BLOCK) {
        Vec sums[BLOCK][2];
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < 2; v++)
                sums[i][v] = ADD ? load(c[row + i] + v * LANES) * load(shrink + v * LANES) : Vec{};
        const float* from = a + row * a_row;
        for (int j = 0; j < depth; j++)
            for (int i = 0; i < BLOCK; i++)
                for (int v = 0; v < 2; v++)
                    sums[i][v] += from[i * a_row + j * a_column] * load(b[j] + v * LANES);
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < 2; v++) vec(c[row + i] + v * LANES) = sums[i][v];
    }
}

// Attention of a tile to the keys first .. end - 1; row r sees the `window` keys before limits[r].
// No operation crosses lanes. q [D, TILE] includes the factors scale and log2(e). Writes the sums
// of weighted values [D, TILE] and of weights, in units of 2^top; they begin with the values that
// `total` and `top` have. Scores have a soft `cap`, unless it is 0.
template <typename T>
void attend_tile(float (*sums)[TILE], float* total, float* top, const float (*q)[TILE],
                 const int32_t* limits, int64_t window, const Context<T>& context,
                 int64_t head_dim, int64_t first, int64_t end, float cap) {
    alignas(CACHE_LINE) float keys[KEYS * MAX_HEAD_DIM], values[KEYS * MAX_HEAD_DIM];
    alignas(CACHE_LINE) float scores[KEYS][TILE], shrink[TILE];
    float key_scales[KEYS], value_scales[KEYS];
    int32_t lows[TILE];
    for (int r = 0; r < TILE; r++) lows[r] = limits[r] - int32_t(window);
    const int32_t all_see = *std::min_element(limits, limits + TILE);
    const int32_t all_see_from = *std::max_element(lows, lows + TILE);
    context.go_through(first, end, [&](const Near<T>& near, int64_t start, int count) {
        const int padded = (count + BLOCK - 1) / BLOCK * BLOCK;
        if constexpr (is_codes<T>) context.read_scales(near, 1.0f, key_scales, value_scales);
        for (int j = 0; j < padded; j++) {
            for (int64_t d = 0; d < head_dim; d += BLOCK) {
                fetch_next(near.keys + j, d);
                fetch_next(near.values + j, d);
            }
            for (int64_t d = 0; d < head_dim; d++) {
                keys[j * head_dim + d] = widen(near.keys[j][d]);
                values[j * head_dim + d] = widen(near.values[j][d]);
                if constexpr (is_codes<T>) {
                    keys[j * head_dim + d] *= key_scales[j];
                    values[j * head_dim + d] *= value_scales[j];
                }
            }
        }
        multiply<false>(scores, keys, head_dim, 1, q, padded, int(head_dim), nullptr);
        if (cap != 0)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++) scores[j][r] = capped(scores[j][r], cap);
        if (start + count > all_see)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++)
                    scores[j][r] = start + j < limits[r] ? scores[j][r] : -INFINITY;
        if (start < all_see_from)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++)
                    scores[j][r] = start + j >= lows[r] ? scores[j][r] : -INFINITY;
        std::copy(top, top + TILE, shrink);
        for (int j = 0; j < count; j++)
            for (int r = 0; r < TILE; r++) top[r] = scores[j][r] > top[r] ? scores[j][r] : top[r];
        for (int r = 0; r < TILE; r++) {
            shrink[r] = exp2_of(shrink[r] - top[r]);
            total[r] *= shrink[r];
        }
        for (int j = 0; j < count; j++)
            for (int r = 0; r < TILE; r++) {
                scores[j][r] = exp2_of(scores[j][r] - top[r]);
                total[r] += scores[j][r];
            }
        multiply<true>(sums, values, 1, head_dim, scores, int(head_dim), count, shrink);
    });
}

}  // namespace
