// Products by AMX of bfloat16 weights that stay as PyTorch has them, [outputs, inputs]: an embedding
// needs its rows too.
//
// Here the weight's rows are the first operand, and the inputs are copied to pairs. The order of
// sums is that of pair_amx.h: both products have the same bits.

#pragma once

#include <vector>

#include "pair_amx.h"

namespace {

#ifdef PAIRS_BY_AMX

constexpr int MOST_GROUPS = 4;  // of rows that are multiplied together
struct alignas(CACHE_LINE) InputUnit {
    Pair pairs[UNIT_INPUTS / 2][GROUP];
};

// A weight, and rows in pairs.
struct RowProduct {
    const bf16* weight;
    int64_t outputs, inputs;
    const bf16* bias;
    const InputUnit* x;  // [groups of 16 rows, units]
    int64_t rows;
    bf16* out;

    int64_t units() const { return inputs / UNIT_INPUTS; }
};

// Copy rows to [groups, units, pairs, 16 rows]. The last group has zeros for rows that are missing.
inline void pack_pairs(const bf16* x, int64_t stride, int64_t rows, int64_t groups, int64_t units,
                       InputUnit* to, int64_t threads) {
    for_each_row(groups * GROUP, units * UNIT_INPUTS, threads, [&](int64_t row) {
        InputUnit* at = to + row / GROUP * units;
        const Pair* from = (const Pair*)(x + row * stride);
        for (int64_t u = 0; u < units; u++)
            for (int p = 0; p < UNIT_INPUTS / 2; p++)
                at[u].pairs[p][row % GROUP] = row < rows ? from[u * UNIT_INPUTS / 2 + p] : Pair{};
    });
}

typedef float OutputSums[MOST_GROUPS][GROUP][GROUP];  // of groups, outputs, rows

// Multiply 16 outputs from `start` on by G groups of rows, and prefetch the 16 after them.
template <int G>
inline void multiply_outputs(const RowProduct& p, int64_t start, OutputSums& sums) {
    const int64_t stride = p.inputs * sizeof(bf16), units = p.units();
    const char* weight = (const char*)(p.weight + start * p.inputs);
    __asm__ volatile("" ::: "memory");  // gcc does not know what is read into the registers
    clear_sums();
    for (int64_t u = 0; u < units; u++) {
        const InputUnit* x = p.x + u;
#pragma GCC unroll 16
        for (int line = 0; line < GROUP; line++)
            __builtin_prefetch(weight + GROUP * stride + (u * GROUP + line) * CACHE_LINE, 0, 2);
        _tile_loadd(4, weight + u * CACHE_LINE, stride);
        _tile_loadd(5, x, CACHE_LINE);
        _tile_dpbf16ps(0, 4, 5);
        if (G > 1) _tile_loadd(6, x + units, CACHE_LINE);
        if (G > 1) _tile_dpbf16ps(1, 4, 6);
        if (G > 2) _tile_loadd(5, x + 2 * units, CACHE_LINE);
        if (G > 2) _tile_dpbf16ps(2, 4, 5);
        if (G > 3) _tile_loadd(6, x + 3 * units, CACHE_LINE);
        if (G > 3) _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums[0], CACHE_LINE);
    if (G > 1) _tile_stored(1, sums[1], CACHE_LINE);
    if (G > 2) _tile_stored(2, sums[2], CACHE_LINE);
    if (G > 3) _tile_stored(3, sums[3], CACHE_LINE);
}

// Round the sums of outputs from start + skip on.
inline void write_outputs(const RowProduct& p, int64_t start, int64_t skip,
                          const OutputSums& sums) {
    alignas(CACHE_LINE) float added[GROUP] = {};
    for (int n = 0; p.bias && n < GROUP; n++) added[n] = widen(p.bias[start + n]);
    for (int64_t row = 0; row < p.rows; row++) {
        alignas(CACHE_LINE) float of_row[GROUP];
        for (int n = 0; n < GROUP; n++) of_row[n] = sums[row / GROUP][n][row % GROUP] + added[n];
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(of_row));
        const __mmask16 from_skip = __mmask16(0xffff << skip);
        _mm256_mask_storeu_epi16(p.out + row * p.outputs + start, from_skip, rounded);
    }
}

// Multiply up to 64 rows. The last 16 outputs may include some that were computed before.
template <int G>
inline void multiply_groups(const RowProduct& p, int64_t threads) {
    const Registers shapes(GROUP);
    constexpr int64_t SOME = 2 * GROUP;  // outputs of a task
    for_each((p.outputs + SOME - 1) / SOME, threads, [&](int64_t task) {
        alignas(CACHE_LINE) OutputSums sums;
        configure(shapes);
        const int64_t end = std::min(p.outputs, (task + 1) * SOME);
        for (int64_t at = task * SOME; at < end; at += GROUP) {
            const int64_t start = std::min(at, p.outputs - GROUP);
            multiply_outputs<G>(p, start, sums);
            write_outputs(p, start, at - start, sums);
        }
        _tile_release();
    });
}

inline void multiply_rows(const RowProduct& p, int64_t threads) {
    const int64_t groups = (p.rows + GROUP - 1) / GROUP;
    if (groups == 1) multiply_groups<1>(p, threads);
    else if (groups == 2) multiply_groups<2>(p, threads);
    else if (groups == 3) multiply_groups<3>(p, threads);
    else multiply_groups<4>(p, threads);
}

// out [rows, outputs] = x @ weight.T + bias, for whole units of inputs and at least 16 outputs.
inline void row_linear(const bf16* weight, int64_t outputs, int64_t inputs, const bf16* x,
                       int64_t stride, const bf16* bias, bf16* out, int64_t all_rows,
                       int64_t threads) {
    constexpr int64_t MOST_ROWS = MOST_GROUPS * GROUP;
    thread_local std::vector<InputUnit> scratch;  // kept for the next call
    RowProduct p = {weight, outputs, inputs, bias};
    const int64_t most = (std::min(MOST_ROWS, all_rows) + GROUP - 1) / GROUP;
    if (int64_t(scratch.size()) < most * p.units()) scratch.resize(most * p.units());
    for (int64_t first = 0; first < all_rows; first += MOST_ROWS) {
        p.rows = std::min(MOST_ROWS, all_rows - first);
        p.x = scratch.data(), p.out = out + first * outputs;
        const int64_t groups = (p.rows + GROUP - 1) / GROUP;
        pack_pairs(x + first * stride, stride, p.rows, groups, p.units(), scratch.data(), threads);
        multiply_rows(p, threads);
    }
}

#else

inline void row_linear(const bf16*, int64_t, int64_t, const bf16*, int64_t, const bf16*, bf16*,
                       int64_t, int64_t) {}

#endif

}  // namespace
