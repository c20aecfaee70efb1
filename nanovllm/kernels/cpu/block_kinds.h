// GGUF's block types, and the layout in which our kernels read their weights.
//
// A tile has 16 outputs. The inputs of a tile are divided into units of 32 inputs. A unit's codes
// are vectors of 64 bytes: byte 4 r + j of vector i belongs to output r and input 4 i + j. Codes of
// fewer than 8 bits are planes of B = 1, 2 or 4 bits: the bits of vector i are in vector i % B of
// the plane, from bit i / B * B on. So a unit's plane has B vectors, and unpacking needs a shift
// and a mask. Codes are unsigned; ZERO is the code of the value 0.
//
// The scales of a tile are apart from its codes: for each block the float16 numbers of 16 outputs,
// then the bytes of 16 outputs for each group.

#pragma once

#include <cstdint>

namespace {

constexpr int OUTPUTS = 16;  // of a tile
constexpr int UNIT = 32;     // inputs
constexpr int UNIT_VECTORS = UNIT / 4;
constexpr int VECTOR = 4 * OUTPUTS;  // bytes
constexpr int MAX_SIZE = 256;
constexpr int MAX_GROUPS = 16;

// How the scale and the offset of a group follow from the numbers d and m and the group's bytes.
enum Scaling {
    WHOLE,     // d; m
    SIGNED,    // d * byte
    PAIRS,     // d * first byte; -m * second byte
    NIBBLES,   // d * low bits; -m * high bits
    EXPONENT,  // 2^(byte - 128)
};
enum Values { INTEGERS, NONLINEAR, E2M1 };  // what codes stand for

template <int Low, int High, int Zero, int Size, int Group, Scaling Scales, int Halves,
          Values Meaning = INTEGERS>
struct Kind {
    static constexpr int LOW = Low, HIGH = High;  // bits of the planes
    static constexpr int ZERO = Zero, SIZE = Size, GROUP = Group, HALVES = Halves;
    static constexpr Scaling SCALING = Scales;
    static constexpr Values VALUES = Meaning;
    static constexpr bool HAS_OFFSETS = Halves == 2;
    static constexpr int UNITS = SIZE / UNIT, GROUPS = SIZE / GROUP;
    static constexpr int GROUPS_OF_UNIT = UNIT / GROUP, GROUP_VECTORS = GROUP / 4;
    static constexpr int GROUP_BYTES = SCALING == WHOLE ? 0 : SCALING == PAIRS ? 2 : 1;
    static constexpr int UNIT_CODES = (LOW + HIGH) * VECTOR;                          // bytes
    static constexpr int BLOCK_SCALES = (2 * HALVES + GROUPS * GROUP_BYTES) * OUTPUTS;  // bytes
    // Whether the values of all codes times 2^PART_BITS fit a byte. PART_BITS is the size of the
    // second part of an input that is rounded to an integer: see block_rounded.h.
    static constexpr bool IS_SHORT = Meaning == INTEGERS && Low + High <= 4;
    static constexpr int PART_BITS = IS_SHORT ? 8 - Low - High : 7;
};

struct Q4_0 : Kind<4, 0, 8, 32, 32, WHOLE, 1> {};
struct Q4_1 : Kind<4, 0, 0, 32, 32, WHOLE, 2> {};
struct Q5_0 : Kind<4, 1, 16, 32, 32, WHOLE, 1> {};
struct Q5_1 : Kind<4, 1, 0, 32, 32, WHOLE, 2> {};
struct Q8_0 : Kind<8, 0, 128, 32, 32, WHOLE, 1> {};
struct Q2_K : Kind<2, 0, 0, 256, 16, NIBBLES, 2> {};
struct Q3_K : Kind<2, 1, 4, 256, 16, SIGNED, 1> {};
struct Q4_K : Kind<4, 0, 0, 256, 32, PAIRS, 2> {};
struct Q5_K : Kind<4, 1, 0, 256, 32, PAIRS, 2> {};
struct Q6_K : Kind<4, 2, 32, 256, 16, SIGNED, 1> {};
struct IQ4_NL : Kind<4, 0, 128, 32, 32, WHOLE, 1, NONLINEAR> {};
struct IQ4_XS : Kind<4, 0, 128, 256, 32, SIGNED, 1, NONLINEAR> {};
struct MXFP4 : Kind<4, 0, 12, 32, 32, EXPONENT, 0, E2M1> {};

// The values of codes plus ZERO, for codes that are not integers of a range.
constexpr uint8_t NONLINEAR_VALUES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t E2M1_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A weight of N outputs and K inputs in tiles, as `TiledBlocks` of block_linear.py describes it.
struct Blocks {
    const uint8_t* codes;   // [tiles, units, UNIT_CODES]
    const uint8_t* scales;  // [tiles, blocks, BLOCK_SCALES]
    int64_t outputs, inputs, kind;

    int64_t tiles() const { return (outputs + OUTPUTS - 1) / OUTPUTS; }
    template <typename K>
    const uint8_t* unit(int64_t tile, int64_t unit) const {
        return codes + (tile * (inputs / UNIT) + unit) * K::UNIT_CODES;
    }
    template <typename K>
    const uint8_t* block_scales(int64_t tile, int64_t block) const {
        return scales + (tile * (inputs / K::SIZE) + block) * K::BLOCK_SCALES;
    }
};

// use(K()) of the type with this number, in the order of block_linear.py.
template <typename Use>
inline void with_kind(int64_t kind, const Use& use) {
    switch (kind) {
        case 0: return use(Q4_0());
        case 1: return use(Q4_1());
        case 2: return use(Q5_0());
        case 3: return use(Q5_1());
        case 4: return use(Q8_0());
        case 5: return use(Q2_K());
        case 6: return use(Q3_K());
        case 7: return use(Q4_K());
        case 8: return use(Q5_K());
        case 9: return use(Q6_K());
        case 10: return use(IQ4_NL());
        case 11: return use(IQ4_XS());
        case 12: return use(MXFP4());
    }
}

}  // namespace
