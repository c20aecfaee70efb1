// Add adapters (low-rank products) to linear layers: down to the rank, and up to the outputs.
//
// Each group of rows has P projections of K inputs and together N outputs, with ranks up to R. Up
// to BLOCK_ROWS rows of a group are computed together, so that weights are read once for them. Each
// number adds up its products in an order that does not depend on the other rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "add_product.h"
#include "parallel.h"
#include "scalar.h"
#include "vector.h"

namespace {

constexpr int BLOCK_ROWS = 4;
constexpr int SUMS = 8;                // vectors of sums that stay in registers, at most
constexpr int64_t SOME_RANKS = 8;      // ranks that a thread takes at a time
constexpr int64_t SOME_COLUMNS = 256;  // columns that a thread takes at a time

// Vectors of sums for each of several rows.
constexpr int sums_of_row(int rows) { return SUMS / (rows == 3 ? 4 : rows); }

struct RowBlock {
    int32_t group;
    int32_t rows[BLOCK_ROWS];  // -1 after the last one

    int size() const { return int(std::find(rows, rows + BLOCK_ROWS, -1) - rows); }
};

struct RowBlocks {
    const RowBlock* blocks;
    int64_t count;

    // The form that `group_rows` writes: the number of blocks, then the blocks.
    explicit RowBlocks(const int32_t* from)
        : blocks((const RowBlock*)(from + 1)), count(from[0]) {}

    // The number of weights that the blocks read, if a rank of projection p has sizes(p) weights.
    template <typename Sizes>
    int64_t work(const int32_t* ranks, int64_t parts, const Sizes& sizes) const {
        int64_t sum = 0;
        for (int64_t i = 0; i < count; i++)
            for (int64_t p = 0; p < parts; p++)
                sum += ranks[blocks[i].group * parts + p] * sizes(p);
        return sum;
    }
};

// Write the blocks of rows with these groups. Rows with a group outside [0, num_groups) have none.
void group_rows(const int32_t* groups, int64_t num_rows, int64_t num_groups, int32_t* to) {
    RowBlock* blocks = (RowBlock*)(to + 1);
    std::vector<RowBlock*> unfilled(num_groups, nullptr);
    int32_t& count = to[0] = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        const int32_t group = groups[row];
        if (group < 0 || group >= num_groups) continue;
        RowBlock*& block = unfilled[group];
        if (!block) {
            block = &blocks[count++];
            block->group = group;
            std::fill(block->rows, block->rows + BLOCK_ROWS, -1);
        }
        const int size = block->size();
        block->rows[size] = int32_t(row);
        if (size + 1 == BLOCK_ROWS) block = nullptr;
    }
}

// Call work(number), as a constant, for a number of rows in a block.
template <typename Work>
inline void with_constant(int number, const Work& work) {
    static_assert(BLOCK_ROWS == 4);
    if (number == 1) work(std::integral_constant<int, 1>());
    if (number == 2) work(std::integral_constant<int, 2>());
    if (number == 3) work(std::integral_constant<int, 3>());
    if (number == 4) work(std::integral_constant<int, 4>());
}

// Load the first `count` numbers of a vector, and zeros after them.
template <typename T>
inline Vec load_first(const T* x, int64_t count) {
    alignas(CACHE_LINE) float numbers[LANES] = {};
    for (int64_t i = 0; i < count; i++) numbers[i] = widen(x[i]);
    return load(numbers);
}

// Products of ROWS rows with `count` rows of A, RANKS of them at a time, and then one by one.
template <int ROWS, int RANKS, typename T>
inline void multiply_ranks(const T* const* x, const T* a, int64_t size, int64_t count,
                           T* const* to, int64_t rank = 0) {
    for (; rank + RANKS <= count; rank += RANKS) {
        Vec sums[ROWS][RANKS] = {};
        const auto add = [&](int64_t k, const auto& read) {
            Vec weights[RANKS];
            for (int n = 0; n < RANKS; n++) weights[n] = read(a + (rank + n) * size + k);
            for (int r = 0; r < ROWS; r++) {
                const Vec input = read(x[r] + k);
                for (int n = 0; n < RANKS; n++)
                    sums[r][n] = add_product(sums[r][n], input, weights[n]);
            }
        };
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES) add(k, [](const T* from) { return load(from); });
        if (k < size) add(k, [&](const T* from) { return load_first(from, size - k); });
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < RANKS; n++) to[r][rank + n] = narrow<T>(sum_of(sums[r][n]));
    }
    if constexpr (RANKS > 1) multiply_ranks<ROWS, 1>(x, a, size, count, to, rank);
}

// x [T / per_row, K] times A [G, P * R, K]: `down` [T, P * R], up to each projection's rank.
template <typename T>
void lora_down(const T* x, int64_t stride, int64_t per_row, const T* a, const int32_t* ranks,
               const int32_t* groups, int64_t parts, int64_t max_rank, int64_t size, T* down,
               int64_t threads) {
    const RowBlocks rows(groups);
    const int64_t width = parts * max_rank, pieces = (max_rank + SOME_RANKS - 1) / SOME_RANKS;
    const int64_t work = rows.work(ranks, parts, [&](int64_t) { return size; });
    for_each(rows.count * parts * pieces, work <= FEW_ELEMENTS ? 1 : threads, [&](int64_t index) {
        const RowBlock& block = rows.blocks[index / (parts * pieces)];
        const int64_t part = index / pieces % parts, first = index % pieces * SOME_RANKS;
        const int64_t count = std::min(SOME_RANKS, ranks[block.group * parts + part] - first);
        if (count <= 0) return;
        const int64_t column = part * max_rank + first;
        with_constant(block.size(), [&](auto number) {
            const T* from[number];
            T* to[number];
            for (int r = 0; r < number; r++) {
                from[r] = x + block.rows[r] / per_row * stride;
                to[r] = down + block.rows[r] * width + column;
            }
            const T* weights = a + (block.group * width + column) * size;
            multiply_ranks<number, sums_of_row(number)>(from, weights, size, count, to);
        });
    });
}

// The rows of a block in one projection, with their factors, outputs and shares.
template <int ROWS, typename T, typename O>
struct Additions {
    const T* down[ROWS];
    O* out[ROWS];
    float share[ROWS];
    const T* b;
    int64_t rank, stride;  // the rank, and the stride of B's rows

    // Add to VECS vectors of outputs; the last vector has `count` numbers.
    template <int VECS, typename Read>
    inline void add_vectors(int64_t column, int64_t count, const Read& read) const {
        Vec sums[ROWS][VECS] = {};
        for (int64_t k = 0; k < rank; k++) {
            Vec weights[VECS];
            for (int v = 0; v < VECS; v++) weights[v] = read(b + k * stride + column + v * LANES);
            for (int r = 0; r < ROWS; r++) {
                const Vec factor = all_lanes(widen(down[r][k]));
                for (int v = 0; v < VECS; v++)
                    sums[r][v] = add_product(sums[r][v], factor, weights[v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++) {
                O* to = out[r] + column + v * LANES;
                alignas(CACHE_LINE) float total[LANES];
                vec(total) = add_product(read(to), sums[r][v], all_lanes(share[r]));
                const int64_t here = v + 1 < VECS ? LANES : count;
                for (int64_t i = 0; i < here; i++) to[i] = narrow<O>(total[i]);
            }
    }

    // Add to the outputs from `column` to `end`, VECS vectors at a time.
    template <int VECS>
    inline void add(int64_t column, int64_t end) const {
        const auto whole = [](const auto* from) { return load(from); };
        for (; column + VECS * LANES <= end; column += VECS * LANES)
            add_vectors<VECS>(column, LANES, whole);
        if constexpr (VECS > 1) {
            add<1>(column, end);
        } else if (column < end) {
            const int64_t rest = end - column;
            add_vectors<1>(column, rest, [&](const auto* from) { return load_first(from, rest); });
        }
    }
};

// Add `down` [T, P * R] times B [G, R, N], times `shares` [T] or 1, to `out` [T, N]. Projection p
// has the columns up to ends[p].
template <typename T, typename O>
void add_up(const T* down, const T* b, const int32_t* ranks, const int32_t* groups,
            const int64_t* ends, int64_t parts, int64_t max_rank, const float* shares, O* out,
            int64_t stride, int64_t threads) {
    const RowBlocks rows(groups);
    const int64_t columns = ends[parts - 1], width = parts * max_rank;
    const auto start_of = [&](int64_t part) { return part ? ends[part - 1] : 0; };
    const int64_t work =
        rows.work(ranks, parts, [&](int64_t part) { return ends[part] - start_of(part); });
    const int64_t pieces = (columns + SOME_COLUMNS - 1) / SOME_COLUMNS;
    for_each(pieces * rows.count, work <= FEW_ELEMENTS ? 1 : threads, [&](int64_t index) {
        const RowBlock& block = rows.blocks[index / pieces];
        const int64_t first = index % pieces * SOME_COLUMNS;
        with_constant(block.size(), [&](auto number) {
            Additions<number, T, O> additions;
            additions.b = b + block.group * max_rank * columns, additions.stride = columns;
            for (int64_t part = 0; part < parts; part++) {
                const int64_t start = std::max(first, start_of(part));
                const int64_t end = std::min(first + SOME_COLUMNS, ends[part]);
                additions.rank = ranks[block.group * parts + part];
                if (start >= end || additions.rank == 0) continue;
                for (int r = 0; r < number; r++) {
                    const int64_t row = block.rows[r];
                    additions.down[r] = down + row * width + part * max_rank;
                    additions.out[r] = out + row * stride;
                    additions.share[r] = shares ? shares[row] : 1.0f;
                }
                additions.template add<sums_of_row(number)>(start, end);
            }
        });
    });
}

// `out` has the weights' type, or is float32.
template <typename T>
void lora_up(const T* down, const T* b, const int32_t* ranks, const int32_t* groups,
             const int64_t* ends, int64_t parts, int64_t max_rank, const float* shares, void* out,
             int64_t stride, int64_t is_float32, int64_t threads) {
    if (is_float32)
        add_up(down, b, ranks, groups, ends, parts, max_rank, shares, (float*)out, stride, threads);
    else
        add_up(down, b, ranks, groups, ends, parts, max_rank, shares, (T*)out, stride, threads);
}

}  // namespace
