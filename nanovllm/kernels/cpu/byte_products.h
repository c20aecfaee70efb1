// Products of bfloat16 inputs and weights of 8 bits that have one scale for each output.
//
// Inputs are rounded for each span of 256. The products of a span are added exactly, as integers;
// spans are added in float32, in the order of the inputs. The sum is multiplied by the scale. So an
// output is the same, bit for bit, for any number of rows.
//
// A tile has 16 outputs. Byte 4 r + j of its vector i is the code of output r and input 4 i + j,
// plus 128.

#pragma once

#include <algorithm>
#include <cstdint>

#include "block_amx.h"
#include "byte_rounded.h"

namespace {

constexpr int CHUNK_BYTES = CHUNK * OUTPUTS;
constexpr int32_t BYTE_ZERO = 128;

// A weight, as `TiledBytes` of byte_linear.py describes it.
struct ByteMatrix {
    const uint8_t* codes;  // [tiles, chunks, CHUNK_BYTES]
    const float* scales;   // [tiles, OUTPUTS]
    int64_t outputs, inputs;

    int64_t tiles() const { return (outputs + OUTPUTS - 1) / OUTPUTS; }
    const uint8_t* chunk(int64_t tile, int64_t chunk) const {
        return codes + (tile * (inputs / CHUNK) + chunk) * CHUNK_BYTES;
    }
};

// total + the products of a span, from the sums of both parts.
inline Vec add_span(Vec total, IntVec first, IntVec second, int32_t sum, float scale) {
    const IntVec integers = (first << LOW_BITS) + second - BYTE_ZERO * sum;
    return add_product(total, floats(integers), all_lanes(scale));
}

constexpr int64_t FEW_ROWS = 4;  // rows for which several tiles are read together

// sums of both parts += the products of a piece of a tile's chunk and one row, whose parts are
// `apart` apart. The codes two chunks later are prefetched.
inline void multiply_chunk(const uint8_t* codes, const int8_t* x, int64_t apart, IntVec* sums) {
    IntVec odd[PARTS] = {};
#pragma GCC unroll 8
    for (int i = 0; i < CHUNK / 4; i += 2) {
        for (int v = i; v < i + 2; v++)
            __builtin_prefetch(codes + 2 * CHUNK_BYTES + v * VECTOR, 0, 2);
        for (int part = 0; part < PARTS; part++) {
            const int8_t* at = x + part * apart + 4 * i;
            sums[part] = add_dot(sums[part], load_as<Bytes>(codes + i * VECTOR), at);
            odd[part] = add_dot(odd[part], load_as<Bytes>(codes + (i + 1) * VECTOR), at + 4);
        }
    }
    for (int part = 0; part < PARTS; part++) sums[part] += odd[part];
}

// totals [tiles, rows, OUTPUTS] = a group of x's rows times tiles: up to FEW_ROWS rows and TOGETHER
// tiles, or one tile.
inline void multiply_bytes(const ByteMatrix& weight, int64_t tile, int64_t tiles,
                           const RoundedBytes& x, float (*totals)[OUTPUTS]) {
    IntVec sums[std::max<int64_t>(TOGETHER * FEW_ROWS, MAX_ROUNDED)][PIECES][PARTS];
    const int64_t rows = x.size, apart = rows * CHUNK, count = tiles * rows;
    std::fill(totals[0], totals[count], 0.0f);
    for (int64_t first = 0; first < x.chunks; first += CHUNKS) {
        std::memset(sums, 0, count * sizeof(*sums));
        for (int64_t c = first; c < std::min(first + CHUNKS, x.chunks); c++)
            for (int64_t t = 0; t < tiles; t++)
                for (int64_t r = 0; r < rows; r++)
                    for (int piece = 0; piece < PIECES; piece++)
                        multiply_chunk(weight.chunk(tile + t, c) + piece * 4 * LANES,
                                       x.parts + c * PARTS * apart + r * CHUNK, apart,
                                       sums[t * rows + r][piece]);
        const int64_t span = first / CHUNKS * rows;
        for (int64_t t = 0; t < tiles; t++)
            for (int64_t r = 0; r < rows; r++)
                for (int piece = 0; piece < PIECES; piece++) {
                    Vec& total = vec(totals[t * rows + r] + piece * LANES);
                    const IntVec* of = sums[t * rows + r][piece];
                    total = add_span(total, of[0], of[1], x.sums[span + r], x.scales[span + r]);
                }
    }
}

#ifdef BLOCKS_BY_AMX

struct WholeRows {  // of the registers, in `load_shapes`
    static constexpr bool IS_SHORT = false;
    static constexpr int GROUP = CHUNK;
};

// totals [2][G] += a span of a group of rows times two tiles; codes from `next` are prefetched.
template <int G>
void multiply_span(const int8_t* x, int64_t chunks, const uint8_t* const* codes,
                   const uint8_t* const* next, const float* scales, const int32_t* sums,
                   float (*const* totals)[OUTPUTS]) {
    alignas(CACHE_LINE) int32_t products[PARTS][TILES][G][OUTPUTS];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < chunks; c++, x += PARTS * G * CHUNK) {
        _tile_loadd(4, x, CHUNK);
        _tile_loadd(6, codes[0] + c * CHUNK_BYTES, VECTOR);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, codes[1] + c * CHUNK_BYTES, VECTOR);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, x + G * CHUNK, CHUNK);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
        for (int t = 0; next && t < TILES; t++)
            for (int at = 0; at < CHUNK_BYTES; at += CACHE_LINE)
                __builtin_prefetch(next[t] + c * CHUNK_BYTES + at, 0, 2);
    }
    _tile_stored(0, products[0][0], VECTOR);
    _tile_stored(1, products[0][1], VECTOR);
    _tile_stored(2, products[1][0], VECTOR);
    _tile_stored(3, products[1][1], VECTOR);
    for (int t = 0; t < TILES; t++)
#pragma GCC unroll 4
        for (int r = 0; r < G; r++) {
            Vec& total = vec(totals[t][r]);
            total = add_span(total, load_as<IntVec>(products[0][t][r]),
                             load_as<IntVec>(products[1][t][r]), sums[r], scales[r]);
        }
}

// totals [TILES, padded rows, OUTPUTS] = rows times tiles. A second tile that does not exist is
// computed from the first one's codes.
template <int G>
void multiply_bytes_by_amx(const ByteMatrix& weight, int64_t tile, int64_t tiles,
                           const RoundedBytes& x, int64_t padded, float (*totals)[OUTPUTS]) {
    std::fill(totals[0], totals[TILES * padded], 0.0f);
    for (int64_t first = 0; first < x.chunks; first += CHUNKS) {
        const int64_t count = std::min<int64_t>(CHUNKS, x.chunks - first);
        const int64_t ahead = first + CHUNKS < x.chunks ? 0 : TILES - 1;
        const uint8_t *codes[TILES], *next[TILES];
        for (int64_t t = 0; t < TILES; t++) {
            const int64_t from = tile + std::min(t, tiles - 1);
            codes[t] = weight.chunk(from, first);
            next[t] = weight.chunk(from + ahead, first + CHUNKS);
        }
        for (int64_t row = 0; row < padded; row += G) {
            const int64_t group = row / G, at = (group * x.spans() + first / CHUNKS) * G;
            float(*const of[TILES])[OUTPUTS] = {totals + row, totals + padded + row};
            multiply_span<G>(x.parts + (group * x.chunks + first) * PARTS * G * CHUNK, count, codes,
                             row ? nullptr : next, x.scales + at, x.sums + at, of);
        }
    }
}

#endif

// Multiply the totals by the scales of their outputs, and write them.
inline void write_bytes(float (*totals)[OUTPUTS], const ByteMatrix& weight, int64_t tile,
                        int64_t tiles, const bf16* bias, int64_t rows, int64_t padded, bf16* out) {
    for (int64_t t = 0; t < tiles; t++) {
        const float* scales = weight.scales + (tile + t) * OUTPUTS;
        for (int64_t r = 0; r < rows; r++)
            for (int n = 0; n < OUTPUTS; n += LANES)
                vec(totals[t * padded + r] + n) *= load(scales + n);
    }
    write_outputs(totals, weight.outputs, tile, tiles, bias, rows, padded, out);
}

// out [rows, outputs] = x @ weight.T + bias, for up to `most` rows at a time in groups of `size`.
template <int Together, typename Multiply>
void in_groups(const ByteMatrix& weight, const bf16* x, int64_t stride, const bf16* bias, bf16* out,
               int64_t all_rows, int64_t most, int64_t size, int64_t threads,
               const Multiply& multiply) {
    for (int64_t first = 0; first < all_rows; first += most) {
        const int64_t rows = std::min(most, all_rows - first);
        const int64_t group = size ? size : rows, padded = (rows + group - 1) / group * group;
        const RoundedBytes rounded =
            round_bytes(x + first * stride, stride, rows, weight.inputs, group, threads);
        for_each_run((weight.tiles() + Together - 1) / Together, threads, [&](int64_t task,
                                                                              int64_t last) {
            alignas(CACHE_LINE) float totals[1024][OUTPUTS];
            multiply(rounded, padded, totals, task, last, [&](int64_t tile, int64_t tiles) {
                write_bytes(totals, weight, tile, tiles, bias, rows, padded,
                            out + first * weight.outputs);
            });
        });
    }
}

// out [rows, outputs] = x @ weight.T + bias.
void byte_linear(const ByteMatrix* of, const bf16* x, int64_t stride, const bf16* bias, bf16* out,
                 int64_t all_rows, int64_t threads) {
    const ByteMatrix& weight = *of;
#ifdef BLOCKS_BY_AMX
    if (all_rows >= FEW_FOR_AMX && has_amx()) {
        const int64_t fitting = INPUT_BYTES / (PARTS * weight.inputs) / MOST_GROUP * MOST_GROUP;
        const int64_t most = std::min(MOST_ROWS, std::max(LEAST_ROWS, fitting));
        const auto by = [&](auto group) {
            constexpr int G = decltype(group)::value;
            in_groups<TILES>(weight, x, stride, bias, out, all_rows, most, G, threads,
                             [&](const RoundedBytes& rounded, int64_t padded,
                                 float(*totals)[OUTPUTS], int64_t task, int64_t last,
                                 const auto& write) {
                                 load_shapes<WholeRows, G>();
                                 for (; task < last; task++) {
                                     const int64_t tile = task * TILES;
                                     const int64_t tiles =
                                         std::min<int64_t>(TILES, weight.tiles() - tile);
                                     multiply_bytes_by_amx<G>(weight, tile, tiles, rounded, padded,
                                                              totals);
                                     write(tile, tiles);
                                 }
                                 _tile_release();
                             });
        };
        if (all_rows <= 8) return by(std::integral_constant<int, 8>());
        return by(std::integral_constant<int, 16>());
    }
#endif
    in_groups<TOGETHER>(weight, x, stride, bias, out, all_rows, MAX_ROUNDED, 0, threads,
                        [&](const RoundedBytes& rounded, int64_t, float(*totals)[OUTPUTS],
                            int64_t task, int64_t last, const auto& write) {
                            const int64_t end = std::min(last * TOGETHER, weight.tiles());
                            const int64_t step = rounded.size <= FEW_ROWS ? int64_t(TOGETHER) : 1;
                            for (int64_t tile = task * TOGETHER; tile < end; tile += step) {
                                const int64_t tiles = std::min(step, end - tile);
                                multiply_bytes(weight, tile, tiles, rounded, totals);
                                write(tile, tiles);
                            }
                        });
}

}  // namespace
