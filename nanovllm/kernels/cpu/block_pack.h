// Copy weights from the blocks of a GGUF file into the layout of block_kinds.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "block_kinds.h"
#include "parallel.h"

namespace {

// The parts of a block: codes in the order of the inputs, numbers, and the bytes of groups.
struct Parts {
    uint8_t codes[MAX_SIZE];
    uint16_t halves[2];
    uint8_t bytes[MAX_GROUPS][2];
};

// Split a run of bytes into fields: the lowest bits of all bytes, then the next bits. They are
// added to `codes`, from bit `to` on.
inline void split(const uint8_t* from, int run, int runs, int bits, int to, uint8_t* codes) {
    for (int r = 0; r < runs; r++, from += run)
        for (int shift = 0; shift < 8; shift += bits)
            for (int i = 0; i < run; i++)
                *codes++ |= uint8_t((from[i] >> shift & ((1 << bits) - 1)) << to);
}

inline uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half;
}

inline void set_signed(const uint8_t* scales, int groups, Parts& to) {
    for (int g = 0; g < groups; g++) to.bytes[g][0] = uint8_t(scales[g] - 32);
}

// The scales and offsets of 8 groups, of 6 bits each, in 12 bytes.
inline void read_pairs(const uint8_t* from, Parts& to) {
    for (int g = 0; g < 4; g++)
        for (int p = 0; p < 2; p++) {
            const uint8_t first = from[4 * p + g], last = from[8 + g];
            to.bytes[g][p] = first & 63;
            to.bytes[g + 4][p] = uint8_t((last >> (4 * p) & 15) | first >> 6 << 4);
        }
}

inline void read_halves(const uint8_t* from, int count, Parts& to) {
    for (int h = 0; h < count; h++) to.halves[h] = half_at(from + 2 * h);
}

inline void read(Q4_0, const uint8_t* from, Parts& to) {
    read_halves(from, 1, to);
    split(from + 2, 16, 1, 4, 0, to.codes);
}
inline void read(Q4_1, const uint8_t* from, Parts& to) {
    read_halves(from, 2, to);
    split(from + 4, 16, 1, 4, 0, to.codes);
}
inline void read(Q5_0, const uint8_t* from, Parts& to) {
    read_halves(from, 1, to);
    split(from + 2, 1, 4, 1, 4, to.codes);
    split(from + 6, 16, 1, 4, 0, to.codes);
}
inline void read(Q5_1, const uint8_t* from, Parts& to) {
    read_halves(from, 2, to);
    split(from + 4, 1, 4, 1, 4, to.codes);
    split(from + 8, 16, 1, 4, 0, to.codes);
}
inline void read(Q8_0, const uint8_t* from, Parts& to) {
    read_halves(from, 1, to);
    for (int i = 0; i < UNIT; i++) to.codes[i] = from[2 + i] ^ 0x80;
}
inline void read(Q2_K, const uint8_t* from, Parts& to) {
    for (int g = 0; g < 16; g++) to.bytes[g][0] = from[g];
    split(from + 16, 32, 2, 2, 0, to.codes);
    read_halves(from + 80, 2, to);
}
inline void read(Q3_K, const uint8_t* from, Parts& to) {
    split(from, 32, 1, 1, 2, to.codes);
    split(from + 32, 32, 2, 2, 0, to.codes);
    uint8_t scales[16] = {};
    split(from + 96, 8, 1, 4, 0, scales);
    split(from + 104, 4, 1, 2, 4, scales);
    set_signed(scales, 16, to);
    read_halves(from + 108, 1, to);
}
inline void read(Q4_K, const uint8_t* from, Parts& to) {
    read_halves(from, 2, to);
    read_pairs(from + 4, to);
    split(from + 16, 32, 4, 4, 0, to.codes);
}
inline void read(Q5_K, const uint8_t* from, Parts& to) {
    read_halves(from, 2, to);
    read_pairs(from + 4, to);
    split(from + 16, 32, 1, 1, 4, to.codes);
    split(from + 48, 32, 4, 4, 0, to.codes);
}
inline void read(Q6_K, const uint8_t* from, Parts& to) {
    split(from, 64, 2, 4, 0, to.codes);
    split(from + 128, 32, 2, 2, 4, to.codes);
    for (int g = 0; g < 16; g++) to.bytes[g][0] = from[192 + g];
    read_halves(from + 208, 1, to);
}
inline void read(IQ4_NL, const uint8_t* from, Parts& to) { read(Q4_0(), from, to); }
inline void read(IQ4_XS, const uint8_t* from, Parts& to) {
    read_halves(from, 1, to);
    uint8_t scales[8] = {};
    split(from + 2, 1, 2, 2, 4, scales);
    split(from + 4, 1, 4, 4, 0, scales);
    set_signed(scales, 8, to);
    split(from + 8, 16, 8, 4, 0, to.codes);
}
inline void read(MXFP4, const uint8_t* from, Parts& to) {
    to.bytes[0][0] = from[0];
    split(from + 1, 16, 1, 4, 0, to.codes);
}

// Write a plane of B bits of the codes of a unit of one output. Four codes are computed as a word.
template <int B>
inline void pack_plane(const uint8_t* codes, int shift, int output, uint8_t* plane) {
    for (int v = 0; v < B; v++) {
        uint32_t packed = 0;
        for (int i = v; i < UNIT_VECTORS; i += B) {
            uint32_t four;
            std::memcpy(&four, codes + 4 * i, 4);
            packed |= (four >> shift & 0x1010101u * ((1 << B) - 1)) << i / B * B;
        }
        std::memcpy(plane + v * VECTOR + 4 * output, &packed, 4);
    }
}

template <typename K>
void pack_block(const uint8_t* from, int output, uint8_t* codes, uint8_t* scales) {
    Parts parts;
    std::memset(parts.codes, 0, K::SIZE);  // `split` adds bits
    read(K(), from, parts);
    for (int u = 0; u < K::UNITS; u++, codes += K::UNIT_CODES) {
        pack_plane<K::LOW>(parts.codes + u * UNIT, 0, output, codes);
        if constexpr (K::HIGH > 0)
            pack_plane<K::HIGH>(parts.codes + u * UNIT, K::LOW, output, codes + K::LOW * VECTOR);
    }
    for (int h = 0; h < K::HALVES; h++)
        std::memcpy(scales + 2 * (h * OUTPUTS + output), &parts.halves[h], 2);
    scales += 2 * K::HALVES * OUTPUTS;
    for (int g = 0; g < K::GROUPS; g++)
        for (int p = 0; p < K::GROUP_BYTES; p++)
            scales[(g * K::GROUP_BYTES + p) * OUTPUTS + output] = parts.bytes[g][p];
}

// The bytes of a tile's codes and scales.
void tile_bytes(int64_t kind, int64_t inputs, int64_t* to) {
    with_kind(kind, [&](auto kind) {
        using K = decltype(kind);
        to[0] = inputs / UNIT * K::UNIT_CODES;
        to[1] = inputs / K::SIZE * K::BLOCK_SCALES;
    });
}

// Fill a weight's codes and scales, which are zero before, from the bytes of a file.
void arrange_blocks(const Blocks* to, const uint8_t* from, int64_t block_bytes, int64_t threads) {
    with_kind(to->kind, [&](auto kind) {
        using K = decltype(kind);
        const int64_t blocks = to->inputs / K::SIZE;
        for_each(to->tiles(), threads, [&](int64_t tile) {
            const int64_t first = tile * OUTPUTS;
            const int count = int(std::min<int64_t>(OUTPUTS, to->outputs - first));
            for (int r = 0; r < count; r++)
                for (int64_t b = 0; b < blocks; b++)
                    pack_block<K>(from + ((first + r) * blocks + b) * block_bytes, r,
                                  (uint8_t*)to->template unit<K>(tile, b * K::UNITS),
                                  (uint8_t*)to->template block_scales<K>(tile, b));
        });
    });
}

}  // namespace
