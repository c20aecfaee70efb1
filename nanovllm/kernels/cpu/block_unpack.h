// Unpack the codes and scales of tiles into vectors.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "block_kinds.h"
#include "scalar.h"
#include "vector.h"

namespace {

constexpr int PIECES = OUTPUTS / LANES;  // vectors of outputs in a tile

typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

template <typename V>
inline V load_as(const void* from) {
    V to;
    std::memcpy(&to, from, sizeof(to));
    return to;
}

// Vector i of a plane of B bits, with its codes from bit `to` on.
template <int B>
inline Bytes field(const uint8_t* plane, int i, int to, int piece) {
    Shorts codes = load_as<Shorts>(plane + i % B * VECTOR + piece * 4 * LANES);
    if (B == 8) return (Bytes)codes;
    const int shift = i / B * B - to;
    codes = shift > 0 ? codes >> shift : codes << -shift;
    return (Bytes)(codes & uint16_t(0x101 * (((1 << B) - 1) << to)));
}

// The values of codes of 4 bits.
inline Bytes look_up(const uint8_t* values, Bytes codes) {
#if defined(__AVX512BW__)
    const __m128i once = _mm_loadu_si128((const __m128i*)values);
    const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, once);
    return (Bytes)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
    return (Bytes)_mm256_shuffle_epi8(table, (__m256i)codes);
#else
    for (int i = 0; i < 4 * LANES; i++) codes[i] = values[codes[i]];
    return codes;
#endif
}

// The unit's codes for a piece of the outputs.
template <typename K>
__attribute__((always_inline)) inline void unpack(const uint8_t* unit, int piece, Bytes* codes) {
#pragma GCC unroll 8
    for (int i = 0; i < UNIT_VECTORS; i++) {
        codes[i] = field<K::LOW>(unit, i, 0, piece);
        if constexpr (K::HIGH > 0)
            codes[i] |= field<K::HIGH>(unit + K::LOW * VECTOR, i, K::LOW, piece);
        if constexpr (K::VALUES == NONLINEAR) codes[i] = look_up(NONLINEAR_VALUES, codes[i]);
        if constexpr (K::VALUES == E2M1) codes[i] = look_up(E2M1_VALUES, codes[i]);
    }
}

// Prefetch a unit's codes into the L2 cache: more lines can be in flight to it than to the L1 cache.
template <typename K>
__attribute__((always_inline)) inline void fetch_codes(const uint8_t* unit) {
#pragma GCC unroll 8
    for (int at = 0; at < K::UNIT_CODES; at += CACHE_LINE) __builtin_prefetch(unit + at, 0, 2);
}

// A float16 number. The exponent's bias is smaller by 112 than that of floats.
inline float widen_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    const float size = rest < 0x7c00 ? bit_cast<float>(rest << 13) * 0x1p112f
                                     : bit_cast<float>(rest << 13 | 0x7f800000);
    return bit_cast<float>(bit_cast<uint32_t>(size) | sign);
}

inline Vec load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Vec to;
    for (int i = 0; i < LANES; i++)
        to[i] = widen_half(uint16_t(from[2 * i] | from[2 * i + 1] << 8));
    return to;
#endif
}

typedef uint8_t LaneBytes __attribute__((vector_size(LANES)));
typedef int8_t SignedLaneBytes __attribute__((vector_size(LANES)));
typedef int16_t LaneShorts __attribute__((vector_size(2 * LANES)));

inline IntVec load_unsigned(const uint8_t* from) {  // in two steps, as gcc converts them well
    return __builtin_convertvector(
        __builtin_convertvector(load_as<LaneBytes>(from), LaneShorts), IntVec);
}
inline Vec load_signed(const uint8_t* from) {
    const auto shorts = __builtin_convertvector(load_as<SignedLaneBytes>(from), LaneShorts);
    return __builtin_convertvector(__builtin_convertvector(shorts, IntVec), Vec);
}
inline Vec floats(IntVec x) { return __builtin_convertvector(x, Vec); }

// Byte j of each word, less the zero point. The bytes become the low bits of 2^23 and more.
template <typename K>
inline Vec byte_of(Bytes codes, int j) {
    const Words bits = ((Words)codes >> (8 * j) & 255) | 0x4b000000;
    return (Vec)bits - (0x1p23f + float(K::ZERO));
}

// 2^(exponent - 128). The smallest two are subnormal.
inline Vec powers(IntVec exponents) {
    const IntVec tiny = exponents < 2;
    const IntVec subnormal = 0x200000 << (exponents & 1);
    return (Vec)((tiny & subnormal) | (~tiny & (exponents - 1) << 23));
}

// The float16 numbers of a block, for a piece of the outputs.
template <typename K>
struct Numbers {
    Vec d, m;

    Numbers(const uint8_t* scales, int piece) {
        if constexpr (K::HALVES > 0) d = load_halves(scales + 2 * piece * LANES);
        if constexpr (K::HALVES > 1) m = load_halves(scales + 2 * (OUTPUTS + piece * LANES));
    }
};

struct Scale {
    Vec scale, offset;
};

// The scale and offset of a group of the block.
template <typename K>
__attribute__((always_inline)) inline Scale scale_of(const Numbers<K>& numbers,
                                                     const uint8_t* scales, int group, int piece) {
    const uint8_t* at =
        scales + (2 * K::HALVES + group * K::GROUP_BYTES) * OUTPUTS + piece * LANES;
    if constexpr (K::SCALING == SIGNED) {
        return {numbers.d * load_signed(at), Vec{}};
    } else if constexpr (K::SCALING == PAIRS) {
        return {numbers.d * floats(load_unsigned(at)),
                -(numbers.m * floats(load_unsigned(at + OUTPUTS)))};
    } else if constexpr (K::SCALING == NIBBLES) {
        const IntVec both = load_unsigned(at);
        return {numbers.d * floats(both & 15), -(numbers.m * floats(both >> 4))};
    } else if constexpr (K::SCALING == EXPONENT) {
        return {powers(load_unsigned(at)), Vec{}};
    } else if constexpr (K::HAS_OFFSETS) {
        return {numbers.d, numbers.m};
    } else {
        return {numbers.d, Vec{}};
    }
}

}  // namespace
