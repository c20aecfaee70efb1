// Linear layers. A weight is plain numbers, or codes of 8 or 4 bits with a scale for each group of
// inputs.
//
// All arithmetic is float32. A weight's inputs are divided into blocks, in the same way for any
// batch. A block's products are added up in the order of its inputs. The zero point times the sum
// of the block's inputs is subtracted from this sum; the result is multiplied by the scale and
// added to the output.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "add_product.h"
#include "codes.h"
#include "parallel.h"
#include "scalar.h"
#include "vector.h"

namespace {

constexpr int64_t MAX_DEPTH = 128;  // inputs of a block: a tile's, in float32, fit the L1 cache
constexpr int64_t MAX_ROWS = 256;   // rows that share a tile: their sums fit the L2 cache
constexpr int ROWS = 6;             // the sums of this many rows stay in registers

// For PAIRS and ROWS_OF_TABLE see pair_linear.h.
enum Kind { INT8, INT4, E4M3, BFLOAT16, FLOAT32, PAIRS, ROWS_OF_TABLE };

// A weight, as `TiledMatrix` of tiled_linear.py describes it. It has P inputs, including the zeros
// that pad groups to whole blocks of B = `depth` inputs.
struct Matrix {
    const int8_t* codes;   // [tiles, P, WIDTH], of 4 bits [tiles, P / 8, WIDTH, 4 bytes]; or numbers
    const float* scales;   // [tiles, groups, WIDTH], or null
    const int8_t* zeros;   // [tiles, groups, WIDTH], or null
    const int32_t* order;  // [P], or null
    int64_t outputs, depth, blocks, blocks_of_group, kind;

    int64_t groups() const { return blocks / blocks_of_group; }
};

// A matrix, and the inputs that it is multiplied by.
struct Product : Matrix {
    const float* x;       // [blocks, rows, B]
    const float* x_sums;  // [blocks, rows]
    int64_t rows;
};

// Call use(input, w) with the weights of each input of a step.
template <typename Codes, typename Use>
__attribute__((always_inline)) inline void decode_step(const Codes& codes, int64_t k, int column,
                                                       const Use& use) {
    fetch_ahead(codes, k, column);
    typename Codes::Held held = codes.read(k, column);
#pragma GCC unroll 8
    for (int i = 0; i < STEP; i++) {
        Vec w[VECS];
        codes.decode(held, k, i, column, w);
        use(k + i, w);
    }
}

// totals[row] += the block's products, for R rows from `row` on. Not inlined, so that the code for
// decoded weights is compiled once.
template <int R, typename Codes>
__attribute__((noinline)) void add_block(const Product& p, const Codes& codes, int64_t tile,
                                         int64_t block, int64_t row, float (*totals)[WIDTH]) {
    const float* x = p.x + (block * p.rows + row) * p.depth;
    const float* x_sums = p.x_sums + block * p.rows + row;
    const int64_t group = (tile * p.groups() + block / p.blocks_of_group) * WIDTH, depth = p.depth;
    const float* scales = p.scales ? p.scales + group : nullptr;
    const int8_t* zeros = p.zeros ? p.zeros + group : nullptr;
    for (int column = 0; column < WIDTH; column += COLUMNS) {
        Vec sums[R][VECS] = {};
        for (int64_t k = 0; k < depth; k += STEP)
            decode_step(codes, k, column, [&](int64_t input, const Vec* w) {
                for (int r = 0; r < R; r++) {
                    const Vec at = all_lanes(x[r * depth + input]);
                    for (int v = 0; v < VECS; v++) sums[r][v] = add_product(sums[r][v], at, w[v]);
                }
            });
# pragma GCC unroll 8  // otherwise the sums would be in memory
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECS; v++) {
                const int at = column + v * LANES;
                Vec sum = sums[r][v];
                Vec& total = vec(totals[row + r] + at);
                if (zeros) sum = add_product(sum, all_lanes(-x_sums[r]), load(zeros + at));
                total = scales ? add_product(total, sum, load(scales + at)) : total + sum;
            }
    }
}

// Compute all rows of a block, up to R at a time.
template <int R, typename Codes>
inline void add_rows(const Product& p, const Codes& codes, int64_t tile, int64_t block, int64_t row,
                     float (*totals)[WIDTH]) {
    for (; row + R <= p.rows; row += R) add_block<R>(p, codes, tile, block, row, totals);
    if constexpr (R > 1) add_rows<R - 1>(p, codes, tile, block, row, totals);
}

// A reader of codes that also stores the decoded weights, for later rows.
template <typename Codes>
struct Kept : Codes {
    float (*weights)[WIDTH];

    void decode(typename Codes::Held& held, int64_t k, int i, int column, Vec* w) const {
        Codes::decode(held, k, i, column, w);
        for (int v = 0; v < VECS; v++) vec(weights[k + i] + column + v * LANES) = w[v];
    }
};

// Compute totals [rows, WIDTH] of a tile.
template <typename Codes>
void multiply_tile(const Product& p, int64_t tile, float (*totals)[WIDTH]) {
    const int64_t block_bytes = p.depth * WIDTH * Codes::BITS / 8;
    std::fill(totals[0], totals[p.rows], 0.0f);
    for (int64_t block = 0; block < p.blocks; block++) {
        Codes codes;
        codes.from = p.codes + (tile * p.blocks + block) * block_bytes;
        if (p.rows <= ROWS) {
            add_rows<ROWS>(p, codes, tile, block, 0, totals);
        } else {  // the first rows decode
            alignas(CACHE_LINE) float weights[MAX_DEPTH][WIDTH];
            Kept<Codes> kept;
            kept.from = codes.from, kept.weights = weights;
            add_block<ROWS>(p, kept, tile, block, 0, totals);
            add_rows<ROWS>(p, Floats{{(const int8_t*)weights[0]}}, tile, block, ROWS, totals);
        }
    }
}

// Copy x [rows, inputs] to [blocks, rows, B], and compute the sums of its blocks.
template <typename T>
void pack_rows(const T* x, int64_t stride, const Product& p, float* packed, float* sums,
               int64_t threads) {
    const int32_t* order = p.order;
    for_each_row(p.rows, p.blocks * p.depth, threads, [&](int64_t row) {
        for (int64_t block = 0; block < p.blocks; block++) {
            float* to = packed + (block * p.rows + row) * p.depth;
            const T* from = x + row * stride;
            const int64_t first = block * p.depth;
            for (int64_t i = 0; i < p.depth; i++)
                if (!order) to[i] = widen(from[first + i]);
                else to[i] = order[first + i] < 0 ? 0.0f : widen(from[order[first + i]]);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < p.depth; i++) sum += to[i];
            sums[block * p.rows + row] = sum;
        }
    });
}

// out [rows, outputs] = x @ weight.T + bias.
template <typename T>
void tiled_linear(const Matrix* weight, const T* x, int64_t stride, const T* bias, T* out,
                  int64_t all_rows, int64_t threads) {
    Product p = {*weight};
    thread_local std::vector<float> scratch;  // kept for the next call
    const size_t num_packed = p.blocks * p.depth * std::min(MAX_ROWS, all_rows);
    const size_t needed = num_packed + p.blocks * std::min(MAX_ROWS, all_rows);
    if (scratch.size() < needed) scratch.resize(needed);
    float *packed = scratch.data(), *sums = packed + num_packed;
    p.x = packed, p.x_sums = sums;
    const auto multiply = p.kind == INT8       ? multiply_tile<Int8>
                          : p.kind == INT4     ? multiply_tile<Int4>
                          : p.kind == E4M3     ? multiply_tile<E4m3>
                          : p.kind == BFLOAT16 ? multiply_tile<Plain<bf16>>
                                               : multiply_tile<Plain<float>>;
    for (int64_t first = 0; first < all_rows; first += MAX_ROWS) {
        p.rows = std::min(MAX_ROWS, all_rows - first);
        pack_rows(x + first * stride, stride, p, packed, sums, threads);
        for_each((p.outputs + WIDTH - 1) / WIDTH, threads, [&](int64_t tile) {
            alignas(CACHE_LINE) float totals[MAX_ROWS][WIDTH];
            multiply(p, tile, totals);
            const int64_t start = tile * WIDTH, count = std::min<int64_t>(WIDTH, p.outputs - start);
            for (int64_t row = 0; row < p.rows; row++) {
                T* to = out + (first + row) * p.outputs + start;
                for (int64_t n = 0; n < count; n++)
                    to[n] = narrow<T>(totals[row][n] + (bias ? widen(bias[start + n]) : 0.0f));
            }
        });
    }
}

}  // namespace
