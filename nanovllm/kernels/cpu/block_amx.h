// Products of weights in blocks and many rows of bfloat16, by AMX, Intel's unit for products of
// small matrices.
//
// Weights are rounded to bfloat16. The unit adds the products of two inputs at a time to the sums,
// in float32 and in the order of the inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "block_unpack.h"
#include "block_write.h"
#include "parallel.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define BLOCKS_BY_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef BLOCKS_BY_AMX

constexpr int REGISTER_ROWS = 16;                    // a register has 16 rows of 64 bytes
constexpr int TILES = 2;                             // tiles of outputs that are computed together
constexpr int WIDE = TILES * OUTPUTS;                // outputs
constexpr int ROW_UNIT = 2 * REGISTER_ROWS;          // rows that are computed together
constexpr int PART_UNITS = 8;                         // units that are decoded together
constexpr int64_t INPUT_BYTES = 3 << 19;                 // of packed rows: they fit the L2 cache
constexpr int64_t LEAST_ROWS = 64, MOST_ROWS = 512;  // rows that are packed together

// The shapes of the unit's registers: all have their full size.
struct alignas(CACHE_LINE) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    Shapes() {
        std::fill(row_bytes, row_bytes + 8, 64);
        std::fill(rows, rows + 8, REGISTER_ROWS);
    }
};

// Whether there is such a unit. The system enables it for a process that asks for it.
inline bool has_amx() {
    constexpr int ASK = 0x1023, TILE_DATA = 18;
    static const bool has = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return has;
}

struct Pair {
    bf16 first, second;  // weights of consecutive inputs
};
typedef Pair UnitPairs[UNIT / 2][OUTPUTS];  // a unit of a tile, in the form that AMX multiplies

inline void store_pairs(Vec first, Vec second, Pair* to) {
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    typedef int16_t Places __attribute__((vector_size(64)));
    Places places;
#pragma GCC unroll 32
    for (int i = 0; i < 32; i++) places[i] = int16_t(i / 2 + i % 2 * 16);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)places, words));
}

// Decode a unit of the block.
template <typename K>
__attribute__((always_inline)) inline void decode_pairs(const uint8_t* unit,
                                                        const Numbers<K>& numbers,
                                                        const uint8_t* scales, int index,
                                                        UnitPairs to) {
    Bytes codes[UNIT_VECTORS];
    unpack<K>(unit, 0, codes);
    Scale all[K::GROUPS_OF_UNIT];
    for (int g = 0; g < K::GROUPS_OF_UNIT; g++)
        all[g] = scale_of<K>(numbers, scales, index * K::GROUPS_OF_UNIT + g, 0);
#pragma GCC unroll 8
    for (int i = 0; i < UNIT_VECTORS; i++) {
        const Scale& of = all[i / K::GROUP_VECTORS];
        Vec values[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            values[j] = byte_of<K>(codes[i], j) * of.scale;
            if constexpr (K::HAS_OFFSETS) values[j] += of.offset;
        }
        store_pairs(values[0], values[1], to[2 * i]);
        store_pairs(values[2], values[3], to[2 * i + 1]);
    }
}

// Decode `count` units of a tile from a unit on, where a block begins.
template <typename K>
void decode_units(const Blocks& weight, int64_t tile, int64_t start, int64_t count, UnitPairs* to) {
    for (int64_t u = 0; u < count; u += K::UNITS) {
        const uint8_t* scales = weight.block_scales<K>(tile, (start + u) / K::UNITS);
        const Numbers<K> numbers(scales, 0);
        for (int i = 0; i < K::UNITS; i++) {
            const uint8_t* unit = weight.unit<K>(tile, start + u + i);
            fetch_codes<K>(unit);
            decode_pairs<K>(unit, numbers, scales, i, to[u + i]);
        }
    }
}

typedef bf16 UnitRow[UNIT];

// Registers 0 to 3 += a unit of R * 16 rows times two tiles.
template <int R>
inline void multiply_unit(const UnitRow* x, const UnitPairs& first, const UnitPairs& second) {
    _tile_loadd(4, x, sizeof(UnitRow));
    if (R > 1) _tile_loadd(5, x + REGISTER_ROWS, sizeof(UnitRow));
    _tile_loadd(6, first, sizeof(first[0]));
    _tile_loadd(7, second, sizeof(second[0]));
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (R > 1) _tile_dpbf16ps(2, 5, 6);
    if (R > 1) _tile_dpbf16ps(3, 5, 7);
}

template <int R>
inline void store_totals(float (*totals)[WIDE]) {
    _tile_stored(0, totals[0], sizeof(*totals));
    _tile_stored(1, totals[0] + OUTPUTS, sizeof(*totals));
    if (R > 1) _tile_stored(2, totals[REGISTER_ROWS], sizeof(*totals));
    if (R > 1) _tile_stored(3, totals[REGISTER_ROWS] + OUTPUTS, sizeof(*totals));
}

// totals [16 * R, WIDE] += `count` units of R * 16 rows [units, ROW_UNIT] times two tiles.
template <int R>
inline void multiply_units(const UnitRow* x, int64_t count,
                           const UnitPairs (*weights)[PART_UNITS], float (*totals)[WIDE]) {
    _tile_loadd(0, totals[0], sizeof(*totals));
    _tile_loadd(1, totals[0] + OUTPUTS, sizeof(*totals));
    if (R > 1) _tile_loadd(2, totals[REGISTER_ROWS], sizeof(*totals));
    if (R > 1) _tile_loadd(3, totals[REGISTER_ROWS] + OUTPUTS, sizeof(*totals));
    for (int64_t u = 0; u < count; u++, x += ROW_UNIT)
        multiply_unit<R>(x, weights[0][u], weights[1][u]);
    store_totals<R>(totals);
}

// The same for up to 16 * R rows in all: totals = all units. AMX multiplies a unit while the next
// one is decoded.
template <typename K, int R>
void multiply_few(const Blocks& weight, int64_t tile, int64_t tiles, const UnitRow* x,
                  float (*totals)[WIDE]) {
    alignas(CACHE_LINE) UnitPairs weights[2][TILES] = {};
    const int64_t units = weight.inputs / UNIT;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t u = 0; u < units; u++) {
        for (int64_t i = 0; i < tiles; i++) {
            const uint8_t* unit = weight.unit<K>(tile + i, u);
            const uint8_t* scales = weight.block_scales<K>(tile + i, u / K::UNITS);
            fetch_codes<K>(unit);
            decode_pairs<K>(unit, Numbers<K>(scales, 0), scales, u % K::UNITS, weights[u % 2][i]);
        }
        const UnitPairs* before = weights[1 - u % 2];
        if (u > 0) multiply_unit<R>(x + (u - 1) * ROW_UNIT, before[0], before[1]);
        __asm__ volatile("" ::: "memory");  // gcc does not know what is read into the registers
    }
    const UnitPairs* last = weights[1 - units % 2];
    multiply_unit<R>(x + (units - 1) * ROW_UNIT, last[0], last[1]);
    store_totals<R>(totals);
}

// totals [padded rows, WIDE] = rows, as `pack_rows` writes them, times the tiles from `tile` on.
template <typename K>
void multiply_tiles(const Blocks& weight, int64_t tile, const UnitRow* x, int64_t rows,
                    int64_t padded, float (*totals)[WIDE]) {
    alignas(CACHE_LINE) UnitPairs weights[TILES][PART_UNITS];
    static const Shapes shapes;
    const int64_t units = weight.inputs / UNIT;
    const int64_t tiles = std::min<int64_t>(TILES, weight.tiles() - tile);
    _tile_loadconfig(&shapes);
    if (rows <= ROW_UNIT) {
        if (rows <= REGISTER_ROWS) multiply_few<K, 1>(weight, tile, tiles, x, totals);
        else multiply_few<K, 2>(weight, tile, tiles, x, totals);
        _tile_release();
        return;
    }
    std::memset(totals, 0, padded * sizeof(*totals));
    if (tiles < TILES) std::memset(weights[tiles], 0, sizeof(weights[tiles]));
    for (int64_t u = 0; u < units; u += PART_UNITS) {
        const int64_t count = std::min<int64_t>(PART_UNITS, units - u);
        for (int64_t i = 0; i < tiles; i++) decode_units<K>(weight, tile + i, u, count, weights[i]);
        __asm__ volatile("" ::: "memory");  // gcc does not know what is read into the registers
        for (int64_t row = 0; row < rows; row += ROW_UNIT) {
            const UnitRow* from = x + row * units + u * ROW_UNIT;
            if (rows - row > REGISTER_ROWS)
                multiply_units<2>(from, count, weights, totals + row);
            else multiply_units<1>(from, count, weights, totals + row);
        }
    }
    _tile_release();
}

// Copy rows [rows, inputs] to [padded rows / ROW_UNIT, units, ROW_UNIT]. The padding is zero.
inline void pack_rows(const bf16* x, int64_t stride, int64_t rows, int64_t padded, int64_t inputs,
                      UnitRow* to, int64_t threads) {
    const int64_t units = inputs / UNIT;
    for_each_row(padded, inputs, threads, [&](int64_t row) {
        UnitRow* at = to + row / ROW_UNIT * ROW_UNIT * units + row % ROW_UNIT;
        for (int64_t u = 0; u < units; u++, at += ROW_UNIT)
            if (row < rows) std::memcpy(at, x + row * stride + u * UNIT, sizeof(*at));
            else std::memset(at, 0, sizeof(*at));
    });
}

// out [rows, outputs] = x @ weight.T + bias.
void block_amx(const Blocks* weight, const bf16* x, int64_t stride, const bf16* bias, bf16* out,
               int64_t all_rows, int64_t threads) {
    thread_local std::vector<uint8_t> scratch;  // kept for the next call
    const int64_t inputs = weight->inputs;
    const int64_t fitting = INPUT_BYTES / (2 * inputs) / ROW_UNIT * ROW_UNIT;
    const int64_t most = std::min(MOST_ROWS, std::max(LEAST_ROWS, fitting));
    with_kind(weight->kind, [&](auto kind) {
        using K = decltype(kind);
        for (int64_t first = 0; first < all_rows; first += most) {
            const int64_t rows = std::min(most, all_rows - first);
            const int64_t padded = (rows + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT;
            const size_t needed = padded * inputs * sizeof(bf16) + CACHE_LINE;
            if (scratch.size() < needed) scratch.resize(needed);
            const uintptr_t aligned = (uintptr_t(scratch.data()) + CACHE_LINE - 1) & -CACHE_LINE;
            UnitRow* packed = (UnitRow*)aligned;
            pack_rows(x + first * stride, stride, rows, padded, inputs, packed, threads);
            for_each((weight->tiles() + TILES - 1) / TILES, threads, [&](int64_t task) {
                alignas(CACHE_LINE) float totals[MOST_ROWS][WIDE];
                multiply_tiles<K>(*weight, task * TILES, packed, rows, padded, totals);
                write_outputs(totals, *weight, task * WIDE, bias, rows,
                              out + first * weight->outputs);
            });
        }
    });
}

#else

inline bool has_amx() { return false; }
void block_amx(const Blocks*, const bf16*, int64_t, const bf16*, bf16*, int64_t, int64_t) {}

#endif

}  // namespace
