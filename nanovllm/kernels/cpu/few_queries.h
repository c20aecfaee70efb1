// Attention of a sequence of at most FEW rows, which reads keys directly from memory.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "context.h"
#include "scalar.h"
#include "vector.h"

namespace {

// The unfinished softmax of a few rows: the sums of weights and of weighted values, in units of
// 2^top. After `clear` it has no keys; `add` adds the state of other keys.
struct alignas(CACHE_LINE) State {
    float top[FEW], total[FEW];
    float sums[FEW][MAX_HEAD_DIM];

    void clear(int64_t head_dim) {
        for (int r = 0; r < FEW; r++) {
            top[r] = NO_SCORE;
            total[r] = 0;
            std::fill(sums[r], sums[r] + head_dim, 0.0f);
        }
    }

    void add(const State& other, int64_t rows, int64_t head_dim) {
        for (int64_t r = 0; r < rows; r++) {
            const float highest = std::max(top[r], other.top[r]);
            const float shrink = exp2_of(top[r] - highest);
            const float grow = exp2_of(other.top[r] - highest);
            top[r] = highest;
            total[r] = total[r] * shrink + other.total[r] * grow;
            for (int64_t d = 0; d < head_dim; d++)
                sums[r][d] = sums[r][d] * shrink + other.sums[r][d] * grow;
        }
    }
};

// scores[r][j] = q[r] . keys[j] for R rows and four keys; D is a multiple of LANES.
template <int R, typename T>
inline void dots(const float (*q)[MAX_HEAD_DIM], const T* const* keys, int64_t head_dim,
                 float (*scores)[KEYS]) {
    Vec sums[R][4] = {};
    for (int64_t d = 0; d < head_dim; d += LANES)
        for (int j = 0; j < 4; j++) {
            const Vec key = load(keys[j] + d);
            fetch_next(keys + j, d);
            for (int r = 0; r < R; r++) sums[r][j] += load(q[r] + d) * key;
        }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) scores[r][j] = sum_of(sums[r][j]);
}

// sums[r] = sums[r] * shrink[r] + weights[r] @ values, for R rows and V vectors from `d` on.
template <int R, int V, typename T>
inline void weigh(float (*sums)[MAX_HEAD_DIM], const float* shrink, const float (*weights)[KEYS],
                  const T* const* values, int count, int64_t d) {
    Vec held[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) held[r][v] = load(sums[r] + d + v * LANES) * shrink[r];
    for (int j = 0; j < count; j++)
        for (int v = 0; v < V; v++) {
            const Vec value = load(values[j] + d + v * LANES);
            fetch_next(values + j, d + v * LANES);
            for (int r = 0; r < R; r++) held[r][v] += weights[r][j] * value;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) vec(sums[r] + d + v * LANES) = held[r][v];
}

// Add the keys first .. end - 1 to the state of a few rows, R at a time. Values have `value_dim`
// numbers, rounded up to a multiple of LANES. q includes the factors scale and log2(e); row r sees the `window` keys before limits[r]. Scores have a soft `cap`,
// unless it is 0.
template <int R, typename T>
void attend_few(State& state, const float (*q)[MAX_HEAD_DIM], const int32_t* limits, int64_t window,
                int64_t rows, const Context<T>& context, int64_t head_dim, int64_t value_dim,
                int64_t first, int64_t end, float cap) {
    float scores[FEW][KEYS], shrink[FEW], key_scales[KEYS], value_scales[KEYS];
    context.go_through(first, end, [&](const Near<T>& near, int64_t start, int count) {
        if constexpr (is_codes<T>)
            context.read_scales(near, CODE_FACTOR, key_scales, value_scales);
        for (int64_t r = 0; r < rows; r += R) {
            for (int j = 0; j < count; j += 4)
                dots<R>(q + r, near.keys + j, head_dim, (float (*)[KEYS])(scores[r] + j));
            for (int64_t i = r; i < r + R; i++) {
                const int seen = int(std::clamp<int64_t>(limits[i] - start, 0, count));
                const int hidden = int(std::clamp<int64_t>(limits[i] - window - start, 0, count));
                float* row = scores[i];
                float top = state.top[i], total = 0;
                if constexpr (is_codes<T>)
                    for (int j = 0; j < KEYS; j++) row[j] *= key_scales[j];
                if (cap != 0)
#pragma omp simd
                    for (int j = 0; j < KEYS; j++) row[j] = capped(row[j], cap);
                std::fill(row, row + hidden, -INFINITY);
                std::fill(row + seen, row + KEYS, -INFINITY);
#pragma omp simd reduction(max : top)
                for (int j = 0; j < KEYS; j++) top = row[j] > top ? row[j] : top;
#pragma omp simd reduction(+ : total)
                for (int j = 0; j < KEYS; j++) {
                    row[j] = exp2_of(row[j] - top);
                    total += row[j];
                }
                if constexpr (is_codes<T>)
                    for (int j = 0; j < KEYS; j++) row[j] *= value_scales[j];
                shrink[i] = exp2_of(state.top[i] - top);
                state.top[i] = top;
                state.total[i] = state.total[i] * shrink[i] + total;
            }
            int64_t d = 0;
            for (; d + 4 * LANES <= value_dim; d += 4 * LANES)
                weigh<R, 4>(state.sums + r, shrink + r, scores + r, near.values, count, d);
            for (; d < value_dim; d += LANES)
                weigh<R, 1>(state.sums + r, shrink + r, scores + r, near.values, count, d);
        }
    });
}

}  // namespace
