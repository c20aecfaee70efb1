// The order of sums in attention, and what all ways to compute it share.
//
// A row's result depends on its query, its keys and its values alone. It is the same, bit for bit,
// for any number of rows that are computed with it, and for any division into steps, threads or
// ways (few_queries.h, tile.h):
//
// - A score is one sum in float32, from the first number of the head to the last. Each product is
//   added with one rounding (`add_product`). The query includes the factors scale and log2(e).
//   Scales of codes multiply the score.
// - Positions are divided into groups of KEYS, from 0 on. The weights of a group are powers of two
//   of scores minus the maximum so far. Their total is added in halves (`total_of`); keys that the
//   row does not see have the weight 0. A sum of values is multiplied once to refer to the new
//   maximum, then values are added one after the other. Weights are not rounded to 16 bits.
// - Positions are also divided into parts of a fixed number of groups (`Step::part_keys`), from 0
//   on. Each part has a state of its own. States are added from the first part to the last.
//
// Groups and parts of which a row sees nothing do not change its state.

#pragma once

#include <algorithm>
#include <cstdint>

#include "add_product.h"
#include "scalar.h"
#include "vector.h"

namespace {

// The sum of KEYS weights: the second half is added to the first, until one is left.
inline float total_of(const float* weights) {
    Vec sums[KEYS / LANES];
    for (int v = 0; v < KEYS / LANES; v++) sums[v] = load(weights + v * LANES);
    for (int half = KEYS / LANES / 2; half; half /= 2)
        for (int v = 0; v < half; v++) sums[v] += sums[v + half];
    return sum_of(sums[0]);
}

// The same for a vector of rows, with the weights of a key in each line of TILE numbers.
template <int STEP = 1>
__attribute__((always_inline)) inline Vec totals_of(const float (*weights)[TILE]) {
    if constexpr (STEP == KEYS) return load(weights[0]);
    else return totals_of<2 * STEP>(weights) + totals_of<2 * STEP>(weights + STEP);
}

// Add the totals of N other states, and return by what each state's sums are multiplied.
template <int N>
inline void join(float* top, float* total, const float* other_top, const float* other_total,
                 float* shrink, float* grow) {
    for (int r = 0; r < N; r++) {
        const float highest = std::max(top[r], other_top[r]);
        shrink[r] = exp2_of(top[r] - highest);
        grow[r] = exp2_of(other_top[r] - highest);
        top[r] = highest;
    }
    for (int r = 0; r < N; r += LANES)
        vec(total + r) = add_product(load(total + r) * load(shrink + r), load(other_total + r),
                                     load(grow + r));
}

// Let `attend` add the keys first .. end - 1 to a state without keys, part by part.
template <typename S, typename Attend>
inline void attend_parts(S& state, int64_t first, int64_t end, int64_t part_keys, int64_t columns,
                         const Attend& attend) {
    state.clear(columns);
    int64_t next = std::min(first / part_keys * part_keys + part_keys, end);
    attend(state, first, next);
    while (next < end) {
        S part;
        part.clear(columns);
        const int64_t start = next;
        next = std::min(start + part_keys, end);
        attend(part, start, next);
        state.add(part, columns);
    }
}

}  // namespace
