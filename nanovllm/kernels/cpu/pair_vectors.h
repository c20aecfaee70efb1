// Products of weights in pairs by vectors: instructions that add two products of bfloat16 to each
// sum in float32, of AVX-512.
//
// The order of sums: each pair of inputs is added to the sum of the pairs before. So an output is
// the same, bit for bit, for any number of rows, whatever the other rows are, and on any number of
// threads.

#pragma once

#include "pairs.h"
#include "parallel.h"

#if defined(__AVX512BF16__) && !defined(PAIRS_BY_AMX)
#define PAIRS_BY_VECTORS
#endif

namespace {

#ifdef PAIRS_BY_VECTORS

constexpr int TOGETHER = 12;       // rows whose sums stay in registers
constexpr int64_t MOST_ROWS = 264;  // that share a tile: their sums fit the L2 cache
constexpr int64_t FEW_ROWS = 8;    // up to this many are read where they are
constexpr int64_t PART = 8;        // units of weights that stay in the L1 cache
constexpr int64_t NEAR_UNITS = 4;  // how far weights are prefetched

typedef float Sums[UNIT_OUTPUTS];

// Some rows: the distances from a row to the next, and from the inputs of a unit to the next ones.
struct RowGroup {
    const bf16* first;
    int64_t stride, step;
};

// sums (+)= R rows times some units of a tile. The sums of its first units begin at 0.
template <int R, bool FETCH>
inline void add_units(const RowGroup& x, const Unit* units, int64_t count, bool are_first,
                      Sums* sums) {
    __m512 low[R], high[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        low[r] = are_first ? _mm512_setzero_ps() : _mm512_load_ps(sums[r]);
        high[r] = are_first ? _mm512_setzero_ps() : _mm512_load_ps(sums[r] + HALF);
    }
    const bf16* at = x.first;
    for (int64_t u = 0; u < count; u++, at += x.step)
        for (int pair = 0; pair < UNIT_INPUTS / 2; pair++) {
            if (FETCH) __builtin_prefetch(units[u + NEAR_UNITS][0][pair], 0, 3);
            if (FETCH) __builtin_prefetch(units[u + NEAR_UNITS][1][pair], 0, 3);
            const __m512bh first = (__m512bh)_mm512_load_si512(units[u][0][pair]);
            const __m512bh second = (__m512bh)_mm512_load_si512(units[u][1][pair]);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                int32_t inputs;
                std::memcpy(&inputs, at + r * x.stride + 2 * pair, sizeof(inputs));
                const __m512bh of_row = (__m512bh)_mm512_set1_epi32(inputs);
                low[r] = _mm512_dpbf16_ps(low[r], first, of_row);
                high[r] = _mm512_dpbf16_ps(high[r], second, of_row);
            }
        }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(sums[r], low[r]);
        _mm512_store_ps(sums[r] + HALF, high[r]);
    }
}

// The same for a number of rows up to R.
template <int R>
inline void add_group(const RowGroup& x, int64_t rows, const Unit* units, int64_t count,
                      bool fetches, bool are_first, Sums* sums) {
    if (rows == R && fetches) add_units<R, true>(x, units, count, are_first, sums);
    else if (rows == R) add_units<R, false>(x, units, count, are_first, sums);
    else if constexpr (R > 1)
        add_group<R - 1>(x, rows, units, count, fetches, are_first, sums);
}

// Copy rows to [groups, units, rows of a group, UNIT_INPUTS].
inline void pack_groups(const PairProduct& p, bf16* to, int64_t threads) {
    for_each_row(p.rows, p.inputs(), threads, [&](int64_t row) {
        const int64_t start = row / TOGETHER * TOGETHER;
        const int64_t size = std::min<int64_t>(TOGETHER, p.rows - start);
        bf16* at = to + start * p.inputs() + (row - start) * UNIT_INPUTS;
        for (int64_t u = 0; u < p.num_units; u++, at += size * UNIT_INPUTS)
            std::memcpy(at, p.x + row * p.stride + u * UNIT_INPUTS, UNIT_INPUTS * sizeof(bf16));
    });
}

// The rows that are multiplied in one pass through the weight.
inline int64_t rows_of_pass(const PairProduct&, int64_t rows) {
    const int64_t passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return ((rows + passes - 1) / passes + TOGETHER - 1) / TOGETHER * TOGETHER;
}

inline size_t scratch_of_pass(const PairProduct& p, int64_t rows) {
    return rows * p.inputs() * sizeof(bf16);
}

inline void multiply_pass(const PairProduct& p, void* scratch, int64_t threads) {
    const bool is_packed = p.rows > FEW_ROWS;
    if (is_packed) pack_groups(p, (bf16*)scratch, threads);
    for_each(p.tiles(), threads, [&](int64_t tile) {
        alignas(CACHE_LINE) Sums sums[MOST_ROWS];
        const int64_t part = is_packed ? PART : p.num_units;
        for (int64_t u = 0; u < p.num_units; u += part)
            for (int64_t row = 0; row < p.rows; row += TOGETHER) {
                const int64_t size = std::min<int64_t>(TOGETHER, p.rows - row);
                RowGroup x = {p.x + u * UNIT_INPUTS, p.stride, UNIT_INPUTS};
                if (is_packed) {
                    const bf16* first = (const bf16*)scratch + row * p.inputs();
                    x = {first + u * size * UNIT_INPUTS, UNIT_INPUTS, size * UNIT_INPUTS};
                }
                add_group<TOGETHER>(x, size, p.tile(tile) + u, std::min(part, p.num_units - u),
                                    row == 0, u == 0, sums + row);
            }
        p.write(sums, tile, 0, p.rows);
    });
}

#endif

}  // namespace
