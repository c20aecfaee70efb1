// Inputs of products with weights in blocks: bfloat16 rows that are rounded to integers.
//
// Each unit of 32 inputs becomes integers times a power of two. An integer is first * 2^PART_BITS +
// second, in two bytes. It has 12 bits for codes of 4 bits, 13 and 14 bits for codes of 3 and 2,
// and 14 bits for all others. The largest input, and all inputs of at least an 8th of its size (a
// 32nd with 14 bits), keep the 8 bits of bfloat16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "block_kinds.h"
#include "parallel.h"
#include "scalar.h"
#include "vector.h"

namespace {

constexpr int PARTS = 2;
constexpr int ROW_BYTES = PARTS * UNIT;  // of a unit of a row

// The largest integer of a unit is 2^TOP to 2^(TOP + 1). Parts of 7 bits are at most 64, so that
// the sums of two products with codes fit 16 bits: 255 * 64 * 2 < 2^15.
template <typename K>
constexpr int TOP = K::PART_BITS < 7 ? K::PART_BITS + 6 : 12;

// The byte of a part of inputs 4 i to 4 i + 3. The parts of 16 inputs follow each other if their
// products are added in one sum.
template <typename K>
constexpr int place_of(int part, int i) {
    return K::IS_SHORT && K::GROUP == 16 ? i / 4 * UNIT + part * 16 + i % 4 * 4
                                         : part * UNIT + 4 * i;
}

// Rounded rows, in groups of `size` rows. The rows after the last one are zero.
struct Rounded {
    const int8_t* parts;  // [groups, units, size, ROW_BYTES]
    const float* scales;  // [groups, units, size]
    const int32_t* sums;  // [groups, units, 2, size]: of 16 inputs, or one of 32; see `stored_sum`
    int64_t units, size;
};

// What products need of a sum of integers: as a float for offsets, else as the zero point's part.
template <typename K>
inline int32_t stored_sum(int32_t sum) {
    return K::HAS_OFFSETS ? bit_cast<int32_t>(float(sum)) : -K::ZERO * sum;
}

// A unit's exponent, and whether all of its inputs are finite, from its largest size in bits.
template <int Top>
struct Range {
    float scale, factor;

    explicit Range(int32_t largest) {
        const int32_t exponent = std::max(largest >> 7, Top + 1);  // as stored, plus 127
        const bool finite = largest < 0x7f80;
        scale = finite ? bit_cast<float>((exponent - Top) << 23) : NAN;
        factor = finite ? bit_cast<float>((254 + Top - exponent) << 23) : 0.0f;
    }
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)

// Round a unit of a row; returns its scale.
template <typename K>
inline float round_unit(const bf16* x, int8_t* to, int32_t* sums, int64_t sums_stride) {
    const __m512i bits = _mm512_loadu_si512(x);
    const __m512i sizes = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(sizes),
                                          _mm512_extracti64x4_epi64(sizes, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half),
                                          _mm256_extracti128_si256(half, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
    const Range<TOP<K>> range(0xffff - (_mm_cvtsi128_si32(least) & 0xffff));
    int32_t sum[2];
    for (int h = 0; h < 2; h++) {
        const __m256i words = h ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits);
        const __m512i floats = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
        __m512i integers = _mm512_cvtps_epi32(
            _mm512_mul_ps((__m512)floats, _mm512_set1_ps(range.factor)));
        constexpr int HALF = K::PART_BITS == 7 ? 64 : 0;
        const __m512i first = _mm512_srai_epi32(
            _mm512_add_epi32(integers, _mm512_set1_epi32(HALF)), K::PART_BITS);
        const __m512i second = _mm512_sub_epi32(integers, _mm512_slli_epi32(first, K::PART_BITS));
        _mm_storeu_si128((__m128i*)(to + place_of<K>(0, 4 * h)), _mm512_cvtepi32_epi8(first));
        _mm_storeu_si128((__m128i*)(to + place_of<K>(1, 4 * h)), _mm512_cvtepi32_epi8(second));
        sum[h] = _mm512_reduce_add_epi32(integers);
    }
    if (K::GROUP == 16) sums[0] = stored_sum<K>(sum[0]), sums[sums_stride] = stored_sum<K>(sum[1]);
    else sums[0] = stored_sum<K>(sum[0] + sum[1]);
    return range.scale;
}

#else

template <typename K>
inline float round_unit(const bf16* x, int8_t* to, int32_t* sums, int64_t sums_stride) {
    uint16_t largest = 0;
    for (int i = 0; i < UNIT; i++) largest = std::max<uint16_t>(largest, x[i].bits & 0x7fff);
    const Range<TOP<K>> range(largest);
    int32_t sum[2] = {};
    for (int i = 0; i < UNIT; i++) {
        constexpr float SHIFT = 0x1.8p23f;  // adding it rounds to an integer, in the low bits
        const float shifted = (range.factor ? widen(x[i]) : 0.0f) * range.factor + SHIFT;
        const int32_t integer = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(SHIFT);
        constexpr int HALF = K::PART_BITS == 7 ? 64 : 0;
        const int32_t first = (integer + HALF) >> K::PART_BITS;
        to[place_of<K>(0, i / 4) + i % 4] = int8_t(first);
        to[place_of<K>(1, i / 4) + i % 4] = int8_t(integer - (first << K::PART_BITS));
        sum[i / 16] += integer;
    }
    if (K::GROUP == 16) sums[0] = stored_sum<K>(sum[0]), sums[sums_stride] = stored_sum<K>(sum[1]);
    else sums[0] = stored_sum<K>(sum[0] + sum[1]);
    return range.scale;
}

#endif

// Round rows [rows, inputs], in groups of `size`. The memory stays valid until this thread's next
// call.
template <typename K>
Rounded round_rows(const bf16* x, int64_t stride, int64_t rows, int64_t inputs, int64_t size,
                   int64_t threads) {
    thread_local std::vector<uint8_t> scratch;  // kept for the next call
    const int64_t units = inputs / UNIT, padded = (rows + size - 1) / size * size;
    constexpr int64_t BYTES = ROW_BYTES + 4 + 2 * 4;  // of a unit of a row
    const size_t needed = padded * units * BYTES + CACHE_LINE;
    if (scratch.size() < needed) scratch.resize(needed);
    int8_t* parts = (int8_t*)((uintptr_t(scratch.data()) + CACHE_LINE - 1) & -CACHE_LINE);
    float* scales = (float*)(parts + padded * units * ROW_BYTES);
    int32_t* sums = (int32_t*)(scales + padded * units);
    for_each_row(padded, inputs, threads, [&](int64_t row) {
        int64_t at = row / size * units * size + row % size;
        int32_t* of_unit = sums + row / size * units * 2 * size + row % size;
        for (int64_t u = 0; u < units; u++, at += size, of_unit += 2 * size)
            if (row < rows) {
                scales[at] = round_unit<K>(x + row * stride + u * UNIT, parts + at * ROW_BYTES,
                                           of_unit, size);
            } else {
                std::memset(parts + at * ROW_BYTES, 0, ROW_BYTES);
                scales[at] = 0, of_unit[0] = of_unit[size] = 0;
            }
    });
    return {parts, scales, sums, units, size};
}

}  // namespace
