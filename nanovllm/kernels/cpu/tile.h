// Attention of a tile: TILE rows of a sequence, each in one lane of the vectors. It has the order of
// sums that softmax.h says.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "add_product.h"
#include "context.h"
#include "scalar.h"
#include "softmax.h"
#include "vector.h"

namespace {

// c [rows, TILE] = a [rows, depth] @ b [depth, TILE], or c * shrink + a @ b, in the first V vectors
// of each row. `rows` is a multiple of the rows of a block, which are more if V is 1; a's element
// (i, j) is at i * a_row + j * a_column.
template <int V>
constexpr int block_rows = V == 1 ? 2 * BLOCK : BLOCK;

template <bool ADD, int V>
inline void multiply(float (*c)[TILE], const float* a, int64_t a_row, int64_t a_column,
                     const float (*b)[TILE], int rows, int depth, const float* shrink) {
    constexpr int ROWS = block_rows<V>;
    for (int row = 0; row < rows; row += ROWS) {
        Vec sums[ROWS][V];
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < V; v++)
                sums[i][v] = ADD ? load(c[row + i] + v * LANES) * load(shrink + v * LANES) : Vec{};
        const float* from = a + row * a_row;
        for (int j = 0; j < depth; j++)
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < V; v++)
                    sums[i][v] = add_product(sums[i][v], all_lanes(from[i * a_row + j * a_column]),
                                             load(b[j] + v * LANES));
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < V; v++) vec(c[row + i] + v * LANES) = sums[i][v];
    }
}

// Write `size` numbers as `load` returns them.
template <typename T>
inline void load_all(const T* from, int64_t size, float* to) {
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES) vec(to + d) = load(from + d);
    for (; d < size; d++) to[d] = as_loaded(from[d]);
}

// The unfinished softmax of a tile, as `State`, with a row in each lane.
struct alignas(CACHE_LINE) TileState {
    float top[TILE], total[TILE];
    float sums[MAX_HEAD_DIM][TILE];

    void clear(int64_t value_dim) {
        std::fill(top, top + TILE, NO_SCORE);
        std::fill(total, total + TILE, 0.0f);
        std::fill(sums[0], sums[value_dim], 0.0f);
    }

    void add(const TileState& other, int64_t value_dim) {
        alignas(CACHE_LINE) float shrink[TILE], grow[TILE];
        join<TILE>(top, total, other.top, other.total, shrink, grow);
        for (int64_t d = 0; d < value_dim; d++)
            for (int r = 0; r < TILE; r += LANES)
                vec(sums[d] + r) = add_product(load(sums[d] + r) * load(shrink + r),
                                               load(other.sums[d] + r), load(grow + r));
    }
};

// Add the keys first .. end - 1 to the state of a tile; row r sees the `window` keys before
// limits[r]. No operation crosses lanes. q [D, TILE] includes the factors scale and log2(e). Values
// have `value_dim` numbers, rounded up for blocks; if they are the first ones of the keys (SHARED),
// they are converted once for both products. Only the first V vectors have rows. Scores have a soft
// `cap`, unless it is 0.
template <typename T, bool SHARED, int V>
void attend_tile(TileState& state, const float (*q)[TILE], const int32_t* limits, int64_t window,
                 const Context<T>& context, int64_t head_dim, int64_t value_dim, int64_t first,
                 int64_t end, float cap) {
    alignas(CACHE_LINE) float keys[KEYS * MAX_HEAD_DIM];
    alignas(CACHE_LINE) float own_values[SHARED ? 1 : KEYS * MAX_HEAD_DIM];
    float *top = state.top, *total = state.total;
    float* values = SHARED ? keys : own_values;
    alignas(CACHE_LINE) float scores[KEYS][TILE], shrink[TILE];
    float key_scales[KEYS], value_scales[KEYS];
    int32_t lows[TILE];
    for (int r = 0; r < TILE; r++) lows[r] = limits[r] - int32_t(window);
    const int32_t all_see = *std::min_element(limits, limits + TILE);
    const int32_t all_see_from = *std::max_element(lows, lows + TILE);
    context.go_through(first, end, [&](const Near<T>& near, int64_t start, int count) {
        const int padded = (count + block_rows<V> - 1) / block_rows<V> * block_rows<V>;
        if constexpr (is_codes<T>) context.read_scales(near, CODE_FACTOR, key_scales, value_scales);
        for (int j = 0; j < padded; j++) {
            for (int64_t d = 0; d < head_dim; d += BLOCK) {
                fetch_next(near.keys + j, d);
                if (!SHARED) fetch_next(near.values + j, d);
            }
            load_all(near.keys[j], head_dim, keys + j * head_dim);
            if (!SHARED) load_all(near.values[j], head_dim, values + j * head_dim);
        }
        multiply<false, V>(scores, keys, head_dim, 1, q, padded, int(head_dim), nullptr);
        if constexpr (is_codes<T>)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++) scores[j][r] *= key_scales[j];
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
        for (int r = 0; r < TILE; r++) shrink[r] = exp2_of(shrink[r] - top[r]);
        for (int j = 0; j < count; j++)
            for (int r = 0; r < TILE; r++) scores[j][r] = exp2_of(scores[j][r] - top[r]);
        std::fill(scores[count], scores[KEYS], 0.0f);
        for (int r = 0; r < TILE; r += LANES)
            vec(total + r) = add_product(totals_of((const float(*)[TILE])(scores[0] + r)),
                                         load(total + r), load(shrink + r));
        if constexpr (is_codes<T>)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++) scores[j][r] *= value_scales[j];
        multiply<true, V>(state.sums, values, 1, head_dim, scores, int(value_dim), count, shrink);
    });
}

}  // namespace
