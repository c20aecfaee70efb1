// Products of weights in blocks and plain inputs, in float32; and the weights as plain numbers.
//
// Parts of up to 256 inputs are added in the order of the inputs, and so are the products of a
// part.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "add_product.h"
#include "block_unpack.h"
#include "block_write.h"
#include "parallel.h"

namespace {

constexpr int64_t DEPTH = 256;     // inputs of a part: its weights fit the L1 cache
constexpr int64_t MAX_MANY = 256;  // rows that share a tile
constexpr int SOME_ROWS = LANES == 16 ? 12 : 6;  // the sums of this many rows stay in registers

// Weights [SIZE, OUTPUTS] of a block in float32, as plain/dequantize_blocks.py defines them.
template <typename K>
void decode_block(const Blocks& weight, int64_t tile, int64_t block, float (*to)[OUTPUTS]) {
    const uint8_t* scales = weight.block_scales<K>(tile, block);
    for (int piece = 0; piece < PIECES; piece++) {
        const Numbers<K> numbers(scales, piece);
        for (int u = 0; u < K::UNITS; u++) {
            Bytes codes[UNIT_VECTORS];
            unpack<K>(weight.unit<K>(tile, block * K::UNITS + u), piece, codes);
#pragma GCC unroll 8
            for (int i = 0; i < UNIT_VECTORS; i++) {
                const int group = (u * UNIT_VECTORS + i) / K::GROUP_VECTORS;
                const Scale of = scale_of<K>(numbers, scales, group, piece);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    Vec value = byte_of<K>(codes[i], j) * of.scale;
                    if constexpr (K::HAS_OFFSETS) value += of.offset;
                    vec(to[u * UNIT + 4 * i + j] + piece * LANES) = value;
                }
            }
        }
    }
}

// Weights of up to DEPTH inputs from `start` on, where a block begins; returns their number.
template <typename K>
int64_t decode_part(const Blocks& weight, int64_t tile, int64_t start, float (*to)[OUTPUTS]) {
    const int64_t count = std::min(DEPTH, weight.inputs - start);
    for (int64_t k = 0; k < count; k += K::SIZE)
        decode_block<K>(weight, tile, (start + k) / K::SIZE, to + k);
    return count;
}

// totals[row] += the part's products, for R rows of x.
template <int R>
__attribute__((noinline)) void add_part(const float (*weights)[OUTPUTS], const float* x,
                                        int64_t stride, int64_t count, float (*totals)[OUTPUTS]) {
    Vec sums[R][PIECES] = {};
    for (int64_t k = 0; k < count; k++) {
        Vec w[PIECES];
        for (int piece = 0; piece < PIECES; piece++) w[piece] = load(weights[k] + piece * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
            for (int piece = 0; piece < PIECES; piece++)
                sums[r][piece] = add_product(sums[r][piece], all_lanes(x[r * stride + k]), w[piece]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        for (int piece = 0; piece < PIECES; piece++)
            vec(totals[r] + piece * LANES) += sums[r][piece];
}

// The same for all rows, up to R at a time.
template <int R>
inline void add_parts(const float (*weights)[OUTPUTS], const float* x, int64_t stride,
                      int64_t count, int64_t rows, float (*totals)[OUTPUTS]) {
    for (; rows >= R; rows -= R, x += R * stride, totals += R)
        add_part<R>(weights, x, stride, count, totals);
    if constexpr (R > 1) add_parts<R / 2>(weights, x, stride, count, rows, totals);
}

// out [rows, outputs] = x @ weight.T + bias.
template <typename T>
void block_floats(const Blocks* weight, const T* x, int64_t stride, const T* bias, T* out,
                  int64_t all_rows, int64_t threads) {
    thread_local std::vector<float> scratch;  // kept for the next call
    const int64_t inputs = weight->inputs;
    if (int64_t(scratch.size()) < inputs * std::min(MAX_MANY, all_rows))
        scratch.resize(inputs * std::min(MAX_MANY, all_rows));
    float* wide = scratch.data();
    with_kind(weight->kind, [&](auto kind) {
        using K = decltype(kind);
        for (int64_t first = 0; first < all_rows; first += MAX_MANY) {
            const int64_t rows = std::min(MAX_MANY, all_rows - first);
            for_each_row(rows, inputs, threads, [&](int64_t row) {
                const T* from = x + (first + row) * stride;
                for (int64_t i = 0; i < inputs; i++) wide[row * inputs + i] = widen(from[i]);
            });
            for_each(weight->tiles(), threads, [&](int64_t tile) {
                alignas(CACHE_LINE) float totals[MAX_MANY][OUTPUTS];
                alignas(CACHE_LINE) float weights[DEPTH][OUTPUTS];
                std::fill(totals[0], totals[rows], 0.0f);
                for (int64_t k = 0; k < inputs; k += DEPTH) {
                    const int64_t count = decode_part<K>(*weight, tile, k, weights);
                    add_parts<SOME_ROWS>(weights, wide + k, inputs, count, rows, totals);
                }
                write_outputs(totals, weight->outputs, tile, 1, bias, rows, rows,
                              out + first * weight->outputs);
            });
        }
    });
}

// to [rows, inputs] = the weights of the outputs `ids`.
template <typename T>
void weights_of_rows(const Blocks* weight, const int64_t* ids, int64_t rows, T* to,
                     int64_t threads) {
    with_kind(weight->kind, [&](auto kind) {
        using K = decltype(kind);
        for_each_row(rows, weight->inputs * OUTPUTS, threads, [&](int64_t row) {
            alignas(CACHE_LINE) float weights[DEPTH][OUTPUTS];
            for (int64_t start = 0; start < weight->inputs; start += DEPTH) {
                const int64_t count = decode_part<K>(*weight, ids[row] / OUTPUTS, start, weights);
                for (int64_t k = 0; k < count; k++)
                    to[row * weight->inputs + start + k] =
                        narrow<T>(weights[k][ids[row] % OUTPUTS]);
            }
        });
    });
}

}  // namespace
