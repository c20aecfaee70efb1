// Products of weights in blocks and rounded inputs, by instructions for products of bytes.
//
// Products of a group of inputs are added exactly, as integers. Each sum is multiplied by its
// group's scale; the products of a unit of 32 inputs are multiplied by the scale of its inputs, and
// units are added in float32, in the order of the inputs. block_amx.h has the same arithmetic, bit
// for bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "add_product.h"
#include "block_rounded.h"
#include "block_unpack.h"
#include "block_write.h"
#include "runs.h"

namespace {

constexpr int TOGETHER = 4;  // tiles that are read together: memory is faster for several streams
constexpr int64_t UNITS_AHEAD = 4;   // units of each tile that are prefetched
constexpr int64_t MAX_ROUNDED = 64;  // rows that share a tile: their sums fit the L1 cache

// sums + the products of four inputs of each output. Without an instruction for this, the sums of
// two products have 16 bits, and fit.
inline IntVec add_dot(IntVec sums, Bytes codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(four));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(four));
    return sums + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(four));
    return sums + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int j = 0; j < 4; j++)
        sums += (IntVec)((Words)codes >> (8 * j) & 255) * int32_t(x[j]);
    return sums;
#endif
}

// The integer products of a group of the unit.
template <typename K>
__attribute__((always_inline)) inline IntVec group_sums(const Bytes* codes, const int8_t* x,
                                                        int group) {
    IntVec sums[PARTS] = {};
    const int first = group * K::GROUP_VECTORS;
#pragma GCC unroll 8
    for (int i = first; i < first + K::GROUP_VECTORS; i++)
        for (int part = 0; part < PARTS; part++)
            sums[part] = add_dot(sums[part], codes[i], x + place_of<K>(part, i));
    return (sums[0] << K::PART_BITS) + sums[1];
}

// total + a piece of a tile times a unit of one row.
template <typename K>
__attribute__((always_inline)) inline Vec add_unit(Vec total, const Bytes* codes,
                                                   const Scale* scales, const Rounded& x,
                                                   int64_t at, const int32_t* sums) {
    Vec product = {};
#pragma GCC unroll 2
    for (int g = 0; g < K::GROUPS_OF_UNIT; g++) {
        const int32_t sum = sums[g * x.size];
        IntVec integers = group_sums<K>(codes, x.parts + at * ROW_BYTES, g);
        if constexpr (K::ZERO > 0) integers += sum;
        const Vec values = floats(integers);
        product = g ? add_product(product, values, scales[g].scale) : values * scales[g].scale;
        if constexpr (K::HAS_OFFSETS)
            product = add_product(product, all_lanes(bit_cast<float>(sum)), scales[g].offset);
    }
    return add_product(total, product, all_lanes(x.scales[at]));
}

// totals [tiles, rows, OUTPUTS] = a group of x's rows times tiles. If R is not 0, there are R rows.
template <typename K, int R>
void multiply_integers(const Blocks& weight, int64_t tile, int64_t tiles, const Rounded& x,
                       float (*totals)[OUTPUTS]) {
    const int64_t rows = R ? R : x.size;
    std::fill(totals[0], totals[tiles * rows], 0.0f);
    const uint8_t *unit = weight.unit<K>(tile, 0), *scales = weight.block_scales<K>(tile, 0);
    const int64_t codes_apart = weight.unit<K>(tile + 1, 0) - unit;
    const int64_t scales_apart = weight.block_scales<K>(tile + 1, 0) - scales;
    for (int64_t u = 0; u < x.units; unit += K::UNIT_CODES, u++) {
        for (int64_t t = 0; t < tiles; t++) {
            if constexpr (K::LOW + K::HIGH > 4) {  // the processor itself prefetches smaller ones
                const int64_t next = u + UNITS_AHEAD < x.units ? 0 : (tiles - 1) * codes_apart;
                fetch_codes<K>(unit + UNITS_AHEAD * K::UNIT_CODES + t * codes_apart + next);
            }
#pragma GCC unroll 2
            for (int piece = 0; piece < PIECES; piece++) {
                const uint8_t* from = scales + t * scales_apart;
                const Numbers<K> numbers(from, piece);
                Bytes codes[UNIT_VECTORS];
                unpack<K>(unit + t * codes_apart, piece, codes);
                Scale of[K::GROUPS_OF_UNIT];
                for (int g = 0; g < K::GROUPS_OF_UNIT; g++)
                    of[g] = scale_of<K>(numbers, from, u % K::UNITS * K::GROUPS_OF_UNIT + g, piece);
                float* to = totals[t * rows] + piece * LANES;
                for (int64_t r = 0; r < rows; r++)
                    vec(to + r * OUTPUTS) = add_unit<K>(load(to + r * OUTPUTS), codes, of, x,
                                                        u * rows + r, x.sums + u * 2 * rows + r);
            }
        }
        if ((u + 1) % K::UNITS == 0) scales += K::BLOCK_SCALES;
    }
}

// out [rows, outputs] = x @ weight.T + bias, of rounded inputs.
template <typename K>
void block_integers(const Blocks& weight, const bf16* x, int64_t stride, const bf16* bias,
                    bf16* out, int64_t all_rows, int64_t threads) {
    for (int64_t first = 0; first < all_rows; first += MAX_ROUNDED) {
        const int64_t rows = std::min(MAX_ROUNDED, all_rows - first);
        const Rounded rounded =
            round_rows<K>(x + first * stride, stride, rows, weight.inputs, rows, threads);
        for_each_run((weight.tiles() + TOGETHER - 1) / TOGETHER, threads, [&](int64_t task,
                                                                              int64_t last) {
            alignas(CACHE_LINE) float totals[TOGETHER * MAX_ROUNDED][OUTPUTS];
            for (; task < last; task++) {
                const int64_t tile = task * TOGETHER;
                const int64_t tiles = std::min<int64_t>(TOGETHER, weight.tiles() - tile);
                if (rows == 1) multiply_integers<K, 1>(weight, tile, tiles, rounded, totals);
                else multiply_integers<K, 0>(weight, tile, tiles, rounded, totals);
                write_outputs(totals, weight.outputs, tile, tiles, bias, rows, rows,
                              out + first * weight.outputs);
            }
        });
    }
}

}  // namespace
