// Products of weights in blocks and rounded bfloat16 inputs, for few rows.
//
// Each unit of 32 inputs is rounded to integers of 14 bits times a power of two. The largest input,
// and all inputs of at least a 32nd of its size, keep the 8 bits of bfloat16. Products of a group
// are added exactly, as integers. Then units are added in float32, in the order of the inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "block_unpack.h"
#include "block_write.h"
#include "parallel.h"

namespace {

constexpr int PARTS = 2;         // of an integer: each has 8 bits
constexpr int PART_BITS = 7;     // the first part is multiplied by 2^7
constexpr int TOP_BITS = 12;     // the largest integer of a unit is 2^12 to 2^13
constexpr int64_t MAX_ROUNDED = 64;  // rows that share a tile: their sums fit the L1 cache

// A unit of inputs: (parts[0] * 2^7 + parts[1]) * scale.
struct alignas(32) RoundedUnit {
    int8_t parts[PARTS][UNIT];
    float scale;
    int32_t sums[UNIT / 16];  // of 16 integers
};

inline RoundedUnit round_unit(const bf16* x) {
    RoundedUnit to;
    uint16_t largest = 0;
    for (int i = 0; i < UNIT; i++) largest = std::max<uint16_t>(largest, x[i].bits & 0x7fff);
    const int32_t exponent = std::max(largest >> 7, TOP_BITS + 1);  // as stored, plus 127
    const bool finite = largest < 0x7f80;
    to.scale = finite ? bit_cast<float>((exponent - TOP_BITS) << 23) : NAN;
    const float factor = finite ? bit_cast<float>((254 + TOP_BITS - exponent) << 23) : 0.0f;
    for (int half = 0; half < UNIT / 16; half++) {
        int32_t sum = 0;
        for (int i = half * 16; i < half * 16 + 16; i++) {
            constexpr float SHIFT = 0x1.8p23f;  // adding it rounds to an integer, in the low bits
            const float shifted = (finite ? widen(x[i]) : 0.0f) * factor + SHIFT;
            const int32_t integer = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(SHIFT);
            const int32_t first = (integer + (1 << (PART_BITS - 1))) >> PART_BITS;
            to.parts[0][i] = int8_t(first);
            to.parts[1][i] = int8_t(integer - (first << PART_BITS));
            sum += integer;
        }
        to.sums[half] = sum;
    }
    return to;
}

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool HAS_DOT = true;
#else
constexpr bool HAS_DOT = false;
#endif

// sums + the products of four inputs of each output. Without an instruction for this, the sums of
// two products have 16 bits, and fit: 255 * 64 * 2 < 2^15.
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

// The integer products of a group of the unit, less those of the zero point.
template <typename K>
__attribute__((always_inline)) inline IntVec group_sums(const Bytes* codes, const RoundedUnit& x,
                                                        int32_t sum, int group) {
    IntVec sums[PARTS] = {};
    const int first = group * K::GROUP_VECTORS;
#pragma GCC unroll 8
    for (int i = first; i < first + K::GROUP_VECTORS; i++)
        for (int part = 0; part < PARTS; part++)
            sums[part] = add_dot(sums[part], codes[i], x.parts[part] + 4 * i);
    return (sums[0] << PART_BITS) + (sums[1] - K::ZERO * sum);
}

// A piece of a tile times a unit of one row.
template <typename K>
__attribute__((always_inline)) inline Vec unit_product(const Bytes* codes, const Scale* scales,
                                                       const RoundedUnit& x) {
    Vec product = {};
#pragma GCC unroll 2
    for (int g = 0; g < K::GROUPS_OF_UNIT; g++) {
        const int32_t sum = K::GROUP == 16 ? x.sums[g] : x.sums[0] + x.sums[1];
        product += floats(group_sums<K>(codes, x, sum, g)) * scales[g].scale;
        if constexpr (K::HAS_OFFSETS) product += float(sum) * scales[g].offset;
    }
    return product * x.scale;
}

// totals [rows, OUTPUTS] = rows [units, rows] times a tile. If R is not 0, there are R rows.
template <typename K, int R>
void multiply_integers(const Blocks& weight, int64_t tile, const RoundedUnit* x, int64_t rows,
                       float (*totals)[OUTPUTS]) {
    if (R) rows = R;
    Vec sums[R ? R : MAX_ROUNDED][PIECES];
    for (int64_t r = 0; r < rows; r++)
        for (int piece = 0; piece < PIECES; piece++) sums[r][piece] = Vec{};
    const uint8_t* unit = weight.unit<K>(tile, 0);
    for (int64_t block = 0; block < weight.inputs / K::SIZE; block++) {
        const uint8_t* scales = weight.block_scales<K>(tile, block);
        for (int u = 0; u < K::UNITS; u++, unit += K::UNIT_CODES, x += rows) {
            fetch_codes<K>(unit);
#pragma GCC unroll 2
            for (int piece = 0; piece < PIECES; piece++) {
                const Numbers<K> numbers(scales, piece);
                Bytes codes[UNIT_VECTORS];
                unpack<K>(unit, piece, codes);
                Scale of[K::GROUPS_OF_UNIT];
                for (int g = 0; g < K::GROUPS_OF_UNIT; g++)
                    of[g] = scale_of<K>(numbers, scales, u * K::GROUPS_OF_UNIT + g, piece);
                for (int64_t r = 0; r < rows; r++)
                    sums[r][piece] += unit_product<K>(codes, of, x[r]);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int piece = 0; piece < PIECES; piece++)
            std::memcpy(totals[r] + piece * LANES, &sums[r][piece], sizeof(Vec));
}

// Round rows [rows, inputs] to [units, rows].
inline void round_rows(const bf16* x, int64_t stride, int64_t rows, int64_t inputs,
                       RoundedUnit* to, int64_t threads) {
    for_each_row(rows, inputs, threads, [&](int64_t row) {
        for (int64_t u = 0; u < inputs / UNIT; u++)
            to[u * rows + row] = round_unit(x + row * stride + u * UNIT);
    });
}

// out [rows, outputs] = x @ weight.T + bias, of rounded inputs.
void block_integers(const Blocks* weight, const bf16* x, int64_t stride, const bf16* bias,
                    bf16* out, int64_t all_rows, int64_t threads) {
    thread_local std::vector<RoundedUnit> scratch;  // kept for the next call
    const size_t needed = weight->inputs / UNIT * std::min(MAX_ROUNDED, all_rows);
    if (scratch.size() < needed) scratch.resize(needed);
    const RoundedUnit* rounded = scratch.data();
    with_kind(weight->kind, [&](auto kind) {
        using K = decltype(kind);
        for (int64_t first = 0; first < all_rows; first += MAX_ROUNDED) {
            const int64_t rows = std::min(MAX_ROUNDED, all_rows - first);
            round_rows(x + first * stride, stride, rows, weight->inputs, scratch.data(), threads);
            for_each(weight->tiles(), threads, [&](int64_t tile) {
                float totals[MAX_ROUNDED][OUTPUTS];
                if (rows == 1) multiply_integers<K, 1>(*weight, tile, rounded, 1, totals);
                else multiply_integers<K, 0>(*weight, tile, rounded, rows, totals);
                write_outputs(totals, *weight, tile * OUTPUTS, bias, rows,
                              out + first * weight->outputs);
            });
        }
    });
}

}  // namespace
