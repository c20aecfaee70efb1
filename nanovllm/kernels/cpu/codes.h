// Weights in tiles of WIDTH outputs, and how their codes or numbers become float32.
//
// A reader of codes returns vectors of outputs, one input after the other. Inputs come in steps of
// STEP inputs: a reader may keep what it has read in a step. BITS is the size of a code.

#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "vector.h"

namespace {

constexpr int WIDTH = 64;                  // outputs of a tile
constexpr int VECS = LANES == 16 ? 4 : 2;  // vectors of outputs that are computed together
constexpr int COLUMNS = VECS * LANES;
constexpr int STEP = 8;                    // inputs of a step
constexpr int64_t AHEAD = 1 << 14;         // how many bytes after the codes are prefetched

typedef int8_t ByteVec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 2)));
typedef int32_t LooseIntVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline IntVec load_bytes(const int8_t* x) {
#ifdef __AVX512F__
    return (IntVec)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)x));
#else  // in two steps: gcc converts to four times the size one by one
    return __builtin_convertvector(__builtin_convertvector(*(const ByteVec*)x, ShortVec), IntVec);
#endif
}
inline Vec load(const int8_t* x) { return __builtin_convertvector(load_bytes(x), Vec); }

// Plain numbers, float or bf16: [inputs, WIDTH].
template <typename T>
struct Plain {
    static constexpr int BITS = 8 * sizeof(T);
    struct Held {};
    const int8_t* from;

    Held read(int64_t, int) const { return {}; }
    void decode(Held&, int64_t k, int i, int column, Vec* w) const {
        const T* at = (const T*)from + (k + i) * WIDTH + column;
        for (int v = 0; v < VECS; v++) w[v] = load(at + v * LANES);
    }
};

// Decoded weights, which are already in the processor's cache.
struct Floats : Plain<float> {};

// Integers of 8 bits: [inputs, WIDTH].
struct Int8 {
    static constexpr int BITS = 8;
    struct Held {};
    const int8_t* from;

    Held read(int64_t, int) const { return {}; }
    void decode(Held&, int64_t k, int i, int column, Vec* w) const {
        for (int v = 0; v < VECS; v++) w[v] = load(from + (k + i) * WIDTH + column + v * LANES);
    }
};

// e4m3 numbers, [inputs, WIDTH], as multiples of UNIT.
struct E4m3 : Int8 {
#ifdef __AVX512BW__  // as float16 numbers, which have an exponent larger by 8
    static constexpr float UNIT = 256.0f;
    void decode(Held&, int64_t k, int i, int column, Vec* w) const {
        for (int v = 0; v < VECS; v++) {
            const auto* at = (const __m128i*)(from + (k + i) * WIDTH + column + v * LANES);
            const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
            const __m256i half = _mm256_slli_epi16(words, 7) & _mm256_set1_epi16(int16_t(0xbf80));
            w[v] = (Vec)_mm512_maskz_cvtph_ps(0xffff, half);
        }
    }
#else
    static constexpr float UNIT = 1.0f;
    void decode(Held&, int64_t k, int i, int column, Vec* w) const {
        for (int v = 0; v < VECS; v++) {
            const IntVec code = load_bytes(from + (k + i) * WIDTH + column + v * LANES);
            const IntVec tiny = (code & 0x78) == 0;  // -1 where the number is subnormal
            const IntVec bits = ((code & 0x7f) << 20) + ((120 - tiny) << 23);
            const Vec size = (Vec)bits - (Vec)(tiny & bit_cast<int32_t>(0x1p-6f));
            w[v] = (Vec)((IntVec)size | (code & INT32_MIN));
        }
    }
#endif
};

// Integers of 4 bits: [inputs / 8, WIDTH] words of eight inputs, the first one in the low bits.
struct Int4 {
    static constexpr int BITS = 4;
    struct Held {
        IntVec words[VECS];
    };
    const int8_t* from;

    Held read(int64_t k, int column) const {
        const int8_t* at = from + k * (WIDTH / 2);
        Held held;
        for (int v = 0; v < VECS; v++)
            held.words[v] = *(const LooseIntVec*)(at + (column + v * LANES) * 4);
        return held;
    }
    void decode(Held& held, int64_t, int i, int, Vec* w) const {
        for (int v = 0; v < VECS; v++) {
#ifdef __AVX512F__
            const Vec values = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
            w[v] = __builtin_shuffle(values, held.words[v]);  // by their low 4 bits
            held.words[v] = held.words[v] >> 4;
#else
            w[v] = __builtin_convertvector(held.words[v] << (28 - 4 * i) >> 28, Vec);
#endif
        }
    }
};

// Prefetch a step of codes, for all columns, into the L2 cache: more lines can be in flight to it
// than to the L1 cache. It is always inlined, because gcc would drop calls of a function without
// results.
template <typename Codes>
__attribute__((always_inline)) inline void fetch_ahead(const Codes& codes, int64_t k, int column) {
    constexpr int64_t BYTES = STEP * WIDTH * Codes::BITS / 8;
    if (std::is_same<Codes, Floats>::value || column > 0) return;
#pragma GCC unroll 8
    for (int64_t at = 0; at < BYTES; at += CACHE_LINE)
        __builtin_prefetch(codes.from + k / STEP * BYTES + AHEAD + at, 0, 2);
}

}  // namespace
