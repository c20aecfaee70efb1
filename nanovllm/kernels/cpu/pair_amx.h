// Products of weights in pairs by AMX, Intel's unit for products of small matrices.
//
// The order of sums: AMX adds the products of a unit's 16 pairs of inputs to the sum of the units
// before, in float32, and always in the same way. So an output is the same, bit for bit, for any
// number of rows, whatever the other rows are, and on any number of threads.

#pragma once

#include "amx.h"
#include "pairs.h"
#include "parallel.h"

#if defined(HAS_REGISTERS) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define PAIRS_BY_AMX
#endif

namespace {

#ifdef PAIRS_BY_AMX

constexpr int GROUP = REGISTER_ROWS;
constexpr int BLOCK_ROWS = 2 * GROUP;
constexpr int64_t PART = 8;           // units of weights that stay in the L1 cache
constexpr int64_t NEAR_UNITS = 4;     // how far few rows prefetch
constexpr int64_t LEAST_BLOCKS = 4, MOST_BLOCKS = 16;  // of rows that are multiplied together
constexpr int64_t PASS_BYTES = 1 << 20;                // of these rows: they fit the L2 cache

// Two groups of rows, and the distance from the inputs of a unit to those of the next.
struct RowGroups {
    const bf16 *first, *second;
    int64_t stride_bytes, step;
};

// Which lines of later units are prefetched with each unit, and to which cache. Always inlined:
// gcc would drop calls of a function without results.
template <int LEVEL>
struct Fetch {
    const Unit* from;
    int start, end;

    __attribute__((always_inline)) void operator()(int64_t unit) const {
        const char* at = (const char*)(from + unit);
        for (int i = start; i < end; i++) __builtin_prefetch(at + i * CACHE_LINE, 0, 4 - LEVEL);
    }
};

typedef float Sums[BLOCK_ROWS][UNIT_OUTPUTS];

template <int G>
inline void load_sums(const Sums& from) {
    _tile_loadd(0, from[0], sizeof(from[0]));
    _tile_loadd(1, from[0] + HALF, sizeof(from[0]));
    if (G > 1) _tile_loadd(2, from[GROUP], sizeof(from[0]));
    if (G > 1) _tile_loadd(3, from[GROUP] + HALF, sizeof(from[0]));
}

template <int G>
inline void store_sums(Sums& to) {
    _tile_stored(0, to[0], sizeof(to[0]));
    _tile_stored(1, to[0] + HALF, sizeof(to[0]));
    if (G > 1) _tile_stored(2, to[GROUP], sizeof(to[0]));
    if (G > 1) _tile_stored(3, to[GROUP] + HALF, sizeof(to[0]));
}

inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// sums (+)= G groups of rows times some units of a tile. The sums of its first units begin at 0.
template <int G, typename Fetch>
inline void add_units(const RowGroups& x, const Unit* units, int64_t count, const Fetch& fetch,
                      bool are_first, Sums& sums) {
    __asm__ volatile("" ::: "memory");  // gcc does not know what is read into the registers
    if (are_first) clear_sums();
    else load_sums<G>(sums);
    const bf16 *first = x.first, *second = x.second;
    for (int64_t u = 0; u < count; u++, first += x.step, second += x.step) {
        fetch(u);
        _tile_loadd(4, first, x.stride_bytes);
        _tile_loadd(6, units[u][0], CACHE_LINE);
        _tile_loadd(7, units[u][1], CACHE_LINE);
        if (G > 1) _tile_loadd(5, second, x.stride_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (G > 1) _tile_dpbf16ps(2, 5, 6);
        if (G > 1) _tile_dpbf16ps(3, 5, 7);
    }
    store_sums<G>(sums);
}

// sums = up to 16 rows times a tile and the next one, whose sums are in the place of a second
// group's. Memory is read faster in two streams. The last tile of all is multiplied twice.
inline void multiply_two_tiles(const PairProduct& p, int64_t tile, Sums& sums) {
    __asm__ volatile("" ::: "memory");  // gcc does not know what is read into the registers
    clear_sums();
    const bf16* x = p.x;
    const Unit* units = p.tile(tile);
    const int64_t apart = tile + 1 < p.tiles() ? p.num_units : 0;
    const Fetch<1> fetch = {units + NEAR_UNITS, 0, UNIT_LINES};
    for (int64_t u = 0; u < p.num_units; u++, x += UNIT_INPUTS) {
        _tile_loadd(4, x, p.stride * sizeof(bf16));
        fetch(u);
        _tile_loadd(6, units[u][0], CACHE_LINE);
        _tile_loadd(7, units[u][1], CACHE_LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        fetch(u + apart);
        _tile_loadd(6, units[u + apart][0], CACHE_LINE);
        _tile_loadd(7, units[u + apart][1], CACHE_LINE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }
    store_sums<2>(sums);
}

// Multiply up to 16 rows, by two tiles at a time.
inline void multiply_group(const PairProduct& p, int64_t threads) {
    const Registers shapes(p.rows);
    for_each((p.tiles() + 1) / 2, threads, [&](int64_t pair) {
        alignas(CACHE_LINE) Sums sums;
        const int64_t tile = 2 * pair;
        configure(shapes);
        multiply_two_tiles(p, tile, sums);
        _tile_release();
        p.write(sums, tile, 0, p.rows);
        if (tile + 1 < p.tiles()) p.write(sums + GROUP, tile + 1, 0, p.rows);
    });
}

// Multiply up to 32 rows, which are read where they are. The second group ends with the last row,
// and may have rows of the first one too.
inline void multiply_few(const PairProduct& p, int64_t threads) {
    if (p.rows <= GROUP) return multiply_group(p, threads);
    const int64_t second = p.rows - GROUP;
    const Registers shapes(GROUP);
    const RowGroups x = {p.x, p.x + second * p.stride, p.stride * 2, UNIT_INPUTS};
    for_each(p.tiles(), threads, [&](int64_t tile) {
        alignas(CACHE_LINE) Sums sums;
        const Unit* units = p.tile(tile);
        const Fetch<1> fetch = {units + NEAR_UNITS, 0, UNIT_LINES};
        configure(shapes);
        add_units<2>(x, units, p.num_units, fetch, true, sums);
        _tile_release();
        p.write(sums, tile, 0, GROUP);
        p.write(sums + GROUP, tile, second, GROUP);
    });
}

// Copy rows to [blocks, units, BLOCK_ROWS, UNIT_INPUTS]. The last row fills up the last block.
inline void pack_blocks(const PairProduct& p, int64_t blocks, bf16* to, int64_t threads) {
    for_each_row(blocks * BLOCK_ROWS, p.inputs(), threads, [&](int64_t row) {
        const bf16* from = p.x + std::min(row, p.rows - 1) * p.stride;
        const int64_t block = row / BLOCK_ROWS, place = row % BLOCK_ROWS;
        bf16* at = to + block * BLOCK_ROWS * p.inputs() + place * UNIT_INPUTS;
        for (int64_t u = 0; u < p.num_units; u++, at += BLOCK_ROWS * UNIT_INPUTS)
            std::memcpy(at, from + u * UNIT_INPUTS, UNIT_INPUTS * sizeof(bf16));
    });
}

// Multiply blocks of rows by a tile. During the blocks, the next part of weights is prefetched.
inline void multiply_tile(const PairProduct& p, const bf16* packed, int64_t blocks, int64_t tile) {
    constexpr int64_t STEP = BLOCK_ROWS * UNIT_INPUTS;
    alignas(CACHE_LINE) Sums sums[MOST_BLOCKS];
    for (int64_t u = 0; u < p.num_units; u += PART) {
        const Unit* units = p.tile(tile) + u;
        const int64_t count = std::min(PART, p.num_units - u);
        for (int64_t b = 0; b < blocks; b++) {
            const bf16* first = packed + (b * p.num_units + u) * STEP;
            const RowGroups x = {first, first + STEP / 2, CACHE_LINE, STEP};
            const Fetch<2> fetch = {units + PART, int(b * UNIT_LINES / blocks),
                                    int((b + 1) * UNIT_LINES / blocks)};
            if (p.rows - b * BLOCK_ROWS > GROUP)
                add_units<2>(x, units, count, fetch, u == 0, sums[b]);
            else add_units<1>(x, units, count, fetch, u == 0, sums[b]);
        }
    }
    for (int64_t b = 0, row = 0; b < blocks; b++, row += BLOCK_ROWS)
        p.write(sums[b], tile, row, std::min<int64_t>(BLOCK_ROWS, p.rows - row));
}

// The rows that are multiplied in one pass through the weight.
inline int64_t rows_of_pass(const PairProduct& p, int64_t rows) {
    const int64_t fitting = PASS_BYTES / (BLOCK_ROWS * p.inputs() * int64_t(sizeof(bf16)));
    const int64_t most = std::min(MOST_BLOCKS, std::max(LEAST_BLOCKS, fitting)) * BLOCK_ROWS;
    const int64_t passes = (rows + most - 1) / most;
    return ((rows + passes - 1) / passes + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
}

inline size_t scratch_of_pass(const PairProduct& p, int64_t rows) {
    return rows <= BLOCK_ROWS ? 0 : rows * p.inputs() * sizeof(bf16);
}

inline void multiply_pass(const PairProduct& p, void* scratch, int64_t threads) {
    if (p.rows <= BLOCK_ROWS) {
        multiply_few(p, threads);
        return;
    }
    const int64_t blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    pack_blocks(p, blocks, (bf16*)scratch, threads);
    const Registers shapes(GROUP);
    for_each(p.tiles(), threads, [&](int64_t tile) {
        configure(shapes);
        multiply_tile(p, (const bf16*)scratch, blocks, tile);
        _tile_release();
    });
}

#endif

}  // namespace
