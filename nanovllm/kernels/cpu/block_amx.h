// Products of weights in blocks and rounded inputs by AMX, Intel's unit for products of small
// matrices. The arithmetic is that of block_integers.h: sums of integers are exact in any order.
//
// If the values of codes times 2^PART_BITS fit a byte, the unit adds both parts of an input in one
// sum: the first part is multiplied by these, the second one by the values. Otherwise there are two
// sums.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "block_integers.h"

#if defined(HAS_REGISTERS) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define BLOCKS_BY_AMX
#endif

namespace {

#ifdef BLOCKS_BY_AMX

constexpr int TILES = 2;       // tiles of outputs that are computed together
constexpr int PART_UNITS = 8;  // units that are decoded together
constexpr int MOST_GROUP = REGISTER_ROWS;            // rows that are multiplied together
constexpr int64_t INPUT_BYTES = 5 << 18;             // of rounded rows: they fit the L2 cache
constexpr int64_t LEAST_ROWS = 64, MOST_ROWS = 512;  // rows that share decoded weights
constexpr int64_t FEW_FOR_AMX = 4;                   // rows that are faster without it

template <typename K, int G>
inline void load_shapes() {
    // Bytes of a row that are multiplied at a time: a part, or both.
    static constexpr Registers shapes(G, K::IS_SHORT ? PARTS * K::GROUP : K::GROUP);
    configure(shapes);
}

// A unit of a tile, in the form that AMX multiplies.
template <typename K>
struct alignas(CACHE_LINE) Decoded {
    static constexpr int GROUP_ROWS = K::GROUP_VECTORS * (K::IS_SHORT ? PARTS : 1);
    int8_t values[K::GROUPS_OF_UNIT][GROUP_ROWS][VECTOR];
    Vec scales[K::GROUPS_OF_UNIT], offsets[K::GROUPS_OF_UNIT];
};

template <typename K>
__attribute__((always_inline)) inline void decode_unit(const uint8_t* unit,
                                                       const Numbers<K>& numbers,
                                                       const uint8_t* scales, int index,
                                                       Decoded<K>& to) {
    Bytes codes[UNIT_VECTORS];
    unpack<K>(unit, 0, codes);
#pragma GCC unroll 8
    for (int i = 0; i < UNIT_VECTORS; i++) {
        const int group = i / K::GROUP_VECTORS, row = i % K::GROUP_VECTORS;
        const Bytes values = codes[i] - uint8_t(K::ZERO);
        if constexpr (K::IS_SHORT) {
            const uint16_t mask = uint16_t(0x101 * (0xff & 0xff << K::PART_BITS));
            const Bytes shifted = (Bytes)(((Shorts)values << K::PART_BITS) & mask);
            std::memcpy(to.values[group][row], &shifted, VECTOR);
            std::memcpy(to.values[group][K::GROUP_VECTORS + row], &values, VECTOR);
        } else {
            std::memcpy(to.values[group][row], &values, VECTOR);
        }
    }
#pragma GCC unroll 2
    for (int g = 0; g < K::GROUPS_OF_UNIT; g++) {
        const Scale of = scale_of<K>(numbers, scales, index * K::GROUPS_OF_UNIT + g, 0);
        to.scales[g] = of.scale;
        if constexpr (K::HAS_OFFSETS) to.offsets[g] = of.offset;
    }
}

// Decode `count` units of a tile from a unit on, where a block begins.
template <typename K>
void decode_units(const Blocks& weight, int64_t tile, int64_t start, int64_t count,
                  Decoded<K>* to) {
    for (int64_t u = 0; u < count; u += K::UNITS) {
        const uint8_t* scales = weight.block_scales<K>(tile, (start + u) / K::UNITS);
        const Numbers<K> numbers(scales, 0);
        for (int i = 0; i < K::UNITS; i++) {
            decode_unit<K>(weight.unit<K>(tile, start + u + i), numbers, scales, i, to[u + i]);
        }
    }
}

typedef int32_t Sums[MOST_GROUP][OUTPUTS];

// The assembler wants numbers of registers as they are written here.
#define MULTIPLY(SUM, ROWS, WEIGHTS, from, to)                          \
    _tile_loadd(ROWS, from, ROW_BYTES);                                 \
    _tile_zero(SUM);                                                    \
    if constexpr (K::ZERO > 0) _tile_dpbssd(SUM, ROWS, WEIGHTS);        \
    else _tile_dpbsud(SUM, ROWS, WEIGHTS);                              \
    _tile_stored(SUM, to, VECTOR)

// sums = the integer products of a unit of rows and a unit of a tile, for each group: one sum, or
// one for each part. Units alternate between two registers for each operand.
template <typename K, bool Odd>
__attribute__((always_inline)) inline void multiply_unit(const int8_t* x, const Decoded<K>& weight,
                                                         Sums* sums) {
#pragma GCC unroll 2
    for (int g = 0; g < K::GROUPS_OF_UNIT; g++) {
        const int8_t* first = x + place_of<K>(0, g * K::GROUP_VECTORS);
        const int8_t* second = x + place_of<K>(1, g * K::GROUP_VECTORS);
        if constexpr (Odd) {
            _tile_loadd(7, weight.values[g], VECTOR);
            MULTIPLY(2, 5, 7, first, sums[g * PARTS]);
            if constexpr (!K::IS_SHORT) { MULTIPLY(3, 5, 7, second, sums[g * PARTS + 1]); }
        } else {
            _tile_loadd(6, weight.values[g], VECTOR);
            MULTIPLY(0, 4, 6, first, sums[g * PARTS]);
            if constexpr (!K::IS_SHORT) { MULTIPLY(1, 4, 6, second, sums[g * PARTS + 1]); }
        }
    }
}
#undef MULTIPLY

// totals [G] += the products of a unit, from their integers.
template <typename K, int G>
__attribute__((always_inline)) inline void add_sums(const Sums* sums, const Decoded<K>& weight,
                                                    const float* scales, const int32_t* input_sums,
                                                    Vec* totals) {
#pragma GCC unroll 16
    for (int r = 0; r < G; r++) {
        Vec product = {};
#pragma GCC unroll 2
        for (int g = 0; g < K::GROUPS_OF_UNIT; g++) {
            IntVec integers = load_as<IntVec>(sums[g * PARTS][r]);
            if constexpr (!K::IS_SHORT)
                integers = (integers << K::PART_BITS) + load_as<IntVec>(sums[g * PARTS + 1][r]);
            const Vec values = floats(integers);
            product = g ? add_product(product, values, weight.scales[g]) : values * weight.scales[g];
            if constexpr (K::HAS_OFFSETS)
                product = add_product(product, all_lanes(bit_cast<float>(input_sums[g * G + r])),
                                      weight.offsets[g]);
        }
        totals[r] = add_product(totals[r], product, all_lanes(scales[r]));
    }
}

// totals [G, OUTPUTS] += `count` units of a group of rows times a tile. AMX multiplies a unit while
// the sums of the one before are added, and codes from `next` on are prefetched, if that is given.
template <typename K, int G>
void multiply_units(const Rounded& x, int64_t at, int64_t count, const Decoded<K>* weights,
                    const uint8_t* next, float (*totals)[OUTPUTS]) {
    alignas(CACHE_LINE) Sums sums[2][K::GROUPS_OF_UNIT * PARTS];
    Vec total[G];
#pragma GCC unroll 16
    for (int r = 0; r < G; r++) total[r] = load(totals[r]);
    const int8_t* parts = x.parts + at * G * ROW_BYTES;
    const float* scales = x.scales + at * G;
    const int32_t* input_sums = x.sums + at * 2 * G;
    const auto multiply = [&](int64_t u) __attribute__((always_inline)) {
        if (u < count) multiply_unit<K, false>(parts + u * G * ROW_BYTES, weights[u], sums[u % 2]);
    };
    const auto add = [&](int64_t u) __attribute__((always_inline)) {
        add_sums<K, G>(sums[u % 2], weights[u], scales + u * G, input_sums + u * 2 * G, total);
    };
    multiply(0);
    for (int64_t u = 0; u < count; u++) {
        multiply(u + 1);
        if (next) fetch_codes<K>(next + u * K::UNIT_CODES);
        add(u);
    }
#pragma GCC unroll 16
    for (int r = 0; r < G; r++) vec(totals[r]) = total[r];
}

// totals [tiles, padded rows, OUTPUTS] = rows times tiles.
template <typename K, int G>
void multiply_tiles(const Blocks& weight, int64_t tile, int64_t tiles, const Rounded& x,
                    int64_t padded, float (*totals)[OUTPUTS]) {
    Decoded<K> weights[TILES][PART_UNITS];
    std::memset(totals, 0, tiles * padded * sizeof(*totals));
    for (int64_t u = 0; u < x.units; u += PART_UNITS) {
        const int64_t count = std::min<int64_t>(PART_UNITS, x.units - u);
        for (int64_t t = 0; t < tiles; t++) decode_units<K>(weight, tile + t, u, count, weights[t]);
        __asm__ volatile("" ::: "memory");  // gcc does not know what is read into the registers
        const int64_t ahead = u + PART_UNITS < x.units ? 0 : tiles - 1;
        for (int64_t row = 0; row < padded; row += G)
            for (int64_t t = 0; t < tiles; t++) {
                const uint8_t* next = weight.unit<K>(tile + t + ahead, u + PART_UNITS);
                multiply_units<K, G>(x, row / G * x.units + u, count, weights[t],
                                     row ? nullptr : next, totals + t * padded + row);
            }
    }
}

// out [rows, outputs] = x @ weight.T + bias, in groups of G rows.
template <typename K, int G>
void block_amx(const Blocks& weight, const bf16* x, int64_t stride, const bf16* bias, bf16* out,
               int64_t all_rows, int64_t threads) {
    const int64_t fitting = INPUT_BYTES / (PARTS * weight.inputs) / G * G;
    const int64_t most = std::min(MOST_ROWS, std::max(LEAST_ROWS, fitting));
    for (int64_t first = 0; first < all_rows; first += most) {
        const int64_t rows = std::min(most, all_rows - first), padded = (rows + G - 1) / G * G;
        const Rounded rounded =
            round_rows<K>(x + first * stride, stride, rows, weight.inputs, G, threads);
        for_each_run((weight.tiles() + TILES - 1) / TILES, threads, [&](int64_t task,
                                                                        int64_t last) {
            alignas(CACHE_LINE) float totals[TILES * MOST_ROWS][OUTPUTS];
            load_shapes<K, G>();
            for (; task < last; task++) {
                const int64_t tile = task * TILES;
                const int64_t tiles = std::min<int64_t>(TILES, weight.tiles() - tile);
                multiply_tiles<K, G>(weight, tile, tiles, rounded, padded, totals);
                write_outputs(totals, weight.outputs, tile, tiles, bias, rows, padded,
                              out + first * weight.outputs);
            }
            _tile_release();
        });
    }
}

#endif

}  // namespace
